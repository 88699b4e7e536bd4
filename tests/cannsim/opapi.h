// The framework in which the aclnn operators of the simulator are written.
//
// ACLNN(aclnnRelu, (In self, Out out), unary(...)) exports the pair aclnnReluGetWorkspaceSize / aclnnRelu. The
// expression checks the arguments at once, by throwing Refusal, and returns the Kernel that the stream runs later.
//
// An operator computes in one of three C types (float, double, int64_t); loaders and storers convert to and from the
// ten storage types in blocks, so that an operator is one lambda and not one instantiation per combination of dtypes.
#pragma once

#include "cannsim.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>

struct aclScalarList {
  std::vector<aclScalar> scalars;
};

namespace opapi {

// ---- What goes wrong ------------------------------------------------------------------------------------------------

constexpr int kNullArgument = 161001;     // ACLNN_ERR_PARAM_NULLPTR
constexpr int kInvalidArgument = 161002;  // ACLNN_ERR_PARAM_INVALID

struct Refusal {  // thrown while the arguments are checked
  int code;
  std::string message;
};

struct DeviceFault : std::runtime_error {  // thrown while the kernel runs
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void refuse(const std::string &message) { throw Refusal{kInvalidArgument, message}; }

// A macro, so that a message is made only when it is needed: every launch passes a dozen of these checks.
#define require(condition, ...)                    \
  do {                                             \
    if (!(condition)) ::opapi::refuse(__VA_ARGS__); \
  } while (false)

// ---- Operators ------------------------------------------------------------------------------------------------------

using In = const aclTensor *;
using Out = aclTensor *;
using Num = const aclScalar *;
using Ints = const aclIntArray *;
using Tensors = const aclTensorList *;
using Nums = const aclScalarList *;
using Shape = std::vector<int64_t>;
using Kernel = std::function<void()>;

int plan(const char *name, uint64_t *workspace_size, aclOpExecutor **executor, const std::function<Kernel()> &check);
int launch(const char *name, void *workspace, uint64_t bytes, aclOpExecutor *executor, aclrtStream stream);

#define OPAPI_EXPORT extern "C" __attribute__((visibility("default")))
#define OPAPI_UNPACK(...) __VA_ARGS__
#define ACLNN(NAME, PARAMETERS, ...)                                                                             \
  OPAPI_EXPORT int NAME##GetWorkspaceSize(OPAPI_UNPACK PARAMETERS, uint64_t *workspace_size,                     \
                                          aclOpExecutor **executor) {                                            \
    return opapi::plan(#NAME, workspace_size, executor, [&]() -> opapi::Kernel { return __VA_ARGS__; });         \
  }                                                                                                              \
  OPAPI_EXPORT int NAME(void *workspace, uint64_t bytes, aclOpExecutor *executor, aclrtStream stream) {          \
    return opapi::launch(#NAME, workspace, bytes, executor, stream);                                             \
  }

// ---- Data types -----------------------------------------------------------------------------------------------------

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Bool {
  uint8_t bits;
};

float to_float(Half value);
float to_float(BFloat16 value);
Half to_half(float value);
BFloat16 to_bfloat16(float value);

using Dtypes = uint64_t;  // a set of aclDataType
constexpr Dtypes dtypes(std::initializer_list<aclDataType> list) {
  Dtypes set = 0;
  for (aclDataType dtype : list) set |= Dtypes{1} << dtype;
  return set;
}
constexpr Dtypes kFloat32 = dtypes({ACL_FLOAT});
constexpr Dtypes kFloats = dtypes({ACL_FLOAT, ACL_FLOAT16, ACL_BF16});
constexpr Dtypes kDouble = dtypes({ACL_DOUBLE});
constexpr Dtypes kFloatsAndDouble = dtypes({ACL_FLOAT, ACL_FLOAT16, ACL_BF16, ACL_DOUBLE});
constexpr Dtypes kInts = dtypes({ACL_INT8, ACL_INT16, ACL_INT32, ACL_INT64, ACL_UINT8});
constexpr Dtypes kBool = dtypes({ACL_BOOL});
constexpr Dtypes kIndex = dtypes({ACL_INT32, ACL_INT64});
constexpr Dtypes kNumbers = kFloats | kDouble | kInts;
constexpr Dtypes kAll = kNumbers | kBool;

constexpr bool in(aclDataType dtype, Dtypes set) { return dtype >= 0 && dtype < 64 && (set >> dtype & 1); }
constexpr bool is_floating(aclDataType dtype) { return in(dtype, kFloats | kDouble); }

std::string name_of(aclDataType dtype);
size_t size_of(aclDataType dtype);
aclDataType promote(aclDataType a, aclDataType b);             // torch.promote_types
aclDataType promote(const aclTensor &tensor, const aclScalar &scalar);  // a Python number beside a tensor
bool can_cast(aclDataType from, aclDataType to);               // torch.can_cast
inline aclDataType floating(aclDataType dtype) { return is_floating(dtype) ? dtype : ACL_FLOAT; }

template <typename F>
auto by_dtype(aclDataType dtype, F f) {
  switch (dtype) {
    case ACL_FLOAT: return f(float{});
    case ACL_DOUBLE: return f(double{});
    case ACL_FLOAT16: return f(Half{});
    case ACL_BF16: return f(BFloat16{});
    case ACL_INT8: return f(int8_t{});
    case ACL_INT16: return f(int16_t{});
    case ACL_INT32: return f(int32_t{});
    case ACL_INT64: return f(int64_t{});
    case ACL_UINT8: return f(uint8_t{});
    case ACL_BOOL: return f(Bool{});
    default: throw Refusal{kInvalidArgument, "dtype " + name_of(dtype) + " is not supported"};
  }
}

// Calls f with a value of the type that an operator on `dtype` computes in.
template <typename F>
auto by_kind(aclDataType dtype, F f) {
  if (dtype == ACL_DOUBLE) return f(double{});
  if (is_floating(dtype)) return f(float{});
  return f(int64_t{});
}

// The same for an operator that takes floating tensors only.
template <typename F>
auto by_precision(aclDataType dtype, F f) {
  if (dtype == ACL_DOUBLE) return f(double{});
  return f(float{});
}

template <typename To, typename From>
To convert(From value) {
  if constexpr (std::is_same_v<To, From>) return value;
  else if constexpr (std::is_same_v<From, Half> || std::is_same_v<From, BFloat16>) return convert<To>(to_float(value));
  else if constexpr (std::is_same_v<From, Bool>) return convert<To>(static_cast<int64_t>(value.bits != 0));
  else if constexpr (std::is_same_v<To, Half>) return to_half(static_cast<float>(value));
  else if constexpr (std::is_same_v<To, BFloat16>) return to_bfloat16(static_cast<float>(value));
  else if constexpr (std::is_same_v<To, Bool>) return Bool{static_cast<uint8_t>(value != 0)};
  else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    // Out of range is undefined in C++: saturate at 64 bits, then wrap to the narrower types.
    constexpr auto limit = static_cast<From>(9223372036854775808.0);
    if (std::isnan(value)) return 0;
    if (value >= limit) return static_cast<To>(std::numeric_limits<int64_t>::max());
    if (value < -limit) return static_cast<To>(std::numeric_limits<int64_t>::min());
    return static_cast<To>(static_cast<int64_t>(value));
  } else return static_cast<To>(value);
}

// ---- Arguments ------------------------------------------------------------------------------------------------------

std::string text(const Shape &shape);
int64_t count(const Shape &shape);

// The tensor behind an argument, or a Refusal that names it: null, dtype outside `allowed`, private format, bad view.
const aclTensor &tensor(In argument, const char *name, Dtypes allowed = kAll);
// The same for one that the kernel writes.
const aclTensor &tensor(Out argument, const char *name, Dtypes allowed = kAll);
// Says that the kernel writes this tensor, where that is not an argument of type Out: one of a list. CANNSIM_CORRUPT
// spoils what was said to be written.
void writes(const aclTensor &tensor);
const aclScalar &scalar(Num argument, const char *name);

template <typename C>
C value(const aclScalar &scalar) {
  return by_dtype(scalar.dtype, [&](auto tag) {
    decltype(tag) stored;
    std::memcpy(&stored, scalar.bytes, sizeof stored);
    return convert<C>(stored);
  });
}

// The number as it is once it is an element of a tensor of `dtype`, which is how most operators of CANN use it.
template <typename C>
C rounded(const aclScalar &scalar, aclDataType dtype) {
  const auto wide = [&](auto c) { return value<decltype(c)>(scalar); };
  return by_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<T, double>) return convert<C>(wide(double{}));
    else if constexpr (std::is_integral_v<T>) return convert<C>(convert<T>(wide(int64_t{})));
    else if constexpr (std::is_same_v<T, Bool>) return convert<C>(convert<T>(wide(double{})));
    else return convert<C>(convert<T>(wide(float{})));
  });
}

void require_shape(const aclTensor &tensor, const char *name, const Shape &expected);
void require_fits(const aclTensor &tensor, const char *name, const Shape &shape);  // broadcasts to exactly that
void require_dtype(const aclTensor &tensor, const char *name, aclDataType expected);
void require_cast(aclDataType from, const aclTensor &out);
Shape broadcast(const Shape &a, const Shape &b);
Shape expand(const aclTensor &tensor, const Shape &shape);  // the strides of `tensor` seen as `shape`
size_t axis(int64_t dim, size_t rank, const char *name = "dim");
std::vector<bool> axes(const std::vector<int64_t> &dims, size_t rank);  // which dimensions; none given means all

// A view of one dimension's range, and a view with one more or one fewer dimension.
aclTensor narrow(aclTensor view, size_t dim, int64_t start, int64_t length);
aclTensor unsqueeze(aclTensor view, size_t dim);

// ---- Device memory, inside a kernel ---------------------------------------------------------------------------------

// The first element of a view; checks that the whole view lies in live memory. nullptr when it has no element.
std::byte *resolve(const aclTensor &view);

// Sets the shape of a live handle: an operator with a data-dependent output reports it so (see aclGetViewShape).
void report_shape(In handle, const Shape &shape);

// `n` elements `stride` apart as consecutive values of C: in `scratch`, or where they are if nothing needs converting.
template <typename C>
using Loader = const C *(*)(const std::byte *from, int64_t stride, int64_t n, C *scratch);
template <typename C>
using Storer = void (*)(const C *from, int64_t n, std::byte *to, int64_t stride);

template <typename C, typename T>
const C *load(const std::byte *from, int64_t stride, int64_t n, C *scratch) {
  const T *source = reinterpret_cast<const T *>(from);
  if constexpr (std::is_same_v<C, T>) {
    if (stride == 1) return source;
  }
  for (int64_t i = 0; i < n; i++) scratch[i] = convert<C>(source[i * stride]);
  return scratch;
}

template <typename C, typename T>
void store(const C *from, int64_t n, std::byte *to, int64_t stride) {
  T *target = reinterpret_cast<T *>(to);
  if (stride == 1) {
    for (int64_t i = 0; i < n; i++) target[i] = convert<T>(from[i]);
  } else {
    for (int64_t i = 0; i < n; i++) target[i * stride] = convert<T>(from[i]);
  }
}

template <typename C>
Loader<C> loader(aclDataType dtype) {
  return by_dtype(dtype, [](auto tag) -> Loader<C> { return load<C, decltype(tag)>; });
}

template <typename C>
Storer<C> storer(aclDataType dtype) {
  return by_dtype(dtype, [](auto tag) -> Storer<C> { return store<C, decltype(tag)>; });
}

// A shape that M operands walk through together, in row-major order, with the dimensions fused that all of them can
// cross in one stride. Offsets and strides count elements.
template <size_t M>
class Space {
 public:
  using Offsets = std::array<int64_t, M>;

  Space(const Shape &shape, const std::array<Shape, M> &strides) {
    for (size_t d = 0; d < shape.size(); d++) {
      empty_ |= shape[d] == 0;
      if (shape[d] == 1) continue;
      Offsets step;
      for (size_t m = 0; m < M; m++) step[m] = strides[m][d];
      bool fuses = !sizes_.empty();
      for (size_t m = 0; m < M && fuses; m++) fuses = steps_.back()[m] == step[m] * shape[d];
      if (fuses) {
        sizes_.back() *= shape[d];
        steps_.back() = step;
      } else {
        sizes_.push_back(shape[d]);
        steps_.push_back(step);
      }
    }
    if (sizes_.empty()) {
      sizes_.push_back(1);
      steps_.push_back(Offsets{});
    }
  }

  const Offsets &step() const { return steps_.back(); }
  bool single_run() const { return sizes_.size() == 1; }

  // Calls visit(offsets, n) for every run of n elements along the innermost dimension, each step() apart.
  template <typename F>
  void each_run(F visit) const {
    if (empty_) return;
    const size_t outer = sizes_.size() - 1;
    std::array<int64_t, 16> position{};
    Offsets offset{};
    for (;;) {
      visit(static_cast<const Offsets &>(offset), sizes_.back());
      size_t d = outer;
      for (; d > 0; d--) {
        for (size_t m = 0; m < M; m++) offset[m] += steps_[d - 1][m];
        if (++position[d - 1] < sizes_[d - 1]) break;
        for (size_t m = 0; m < M; m++) offset[m] -= steps_[d - 1][m] * sizes_[d - 1];
        position[d - 1] = 0;
      }
      if (d == 0) return;
    }
  }

 private:
  Shape sizes_;
  std::vector<Offsets> steps_;
  bool empty_ = false;
};

// ---- Element by element ---------------------------------------------------------------------------------------------

// A block of an operator: n results from n elements of each input.
template <typename C>
using Body = std::function<void(const C *const *inputs, int64_t n, C *results)>;

constexpr size_t kMaxInputs = 4;

// Inside a kernel: calls visit(elements of each input, n) for every block of `shape`, to which the inputs broadcast.
template <typename C>
void each_block(const Shape &shape, const std::vector<aclTensor> &inputs,
                const std::function<void(const C *const *inputs, int64_t n)> &visit);

template <typename C>
Kernel map_blocks(const aclTensor &out, std::vector<aclTensor> inputs, Body<C> body);

template <typename C, size_t... K, typename F>
void apply(F f, const C *const *inputs, int64_t n, C *results, std::index_sequence<K...>) {
  for (int64_t i = 0; i < n; i++) results[i] = static_cast<C>(f(inputs[K][i]...));
}

// out[i] = f(inputs[0][i], inputs[1][i], ...), computed in C, the inputs broadcast to the shape of `out`.
template <typename C, size_t N, typename F>
Kernel map(const aclTensor &out, const std::array<aclTensor, N> &inputs, F f) {
  static_assert(N <= kMaxInputs);
  return map_blocks<C>(out, {inputs.begin(), inputs.end()}, [f](const C *const *x, int64_t n, C *results) {
    apply<C>(f, x, n, results, std::make_index_sequence<N>{});
  });
}

// f of every element; `out` has the dtype and the shape of `self`, which is floating.
template <typename F>
Kernel activation(In self, Out out, Dtypes allowed, F f) {
  const aclTensor &x = tensor(self, "self", allowed), &y = tensor(out, "out");
  require_shape(y, "out", x.shape);
  require_dtype(y, "out", x.dtype);
  return by_precision(x.dtype, [&](auto c) { return map<decltype(c), 1>(y, {x}, f); });
}

inline Kernel copy(const aclTensor &out, const aclTensor &self) {
  return by_kind(self.dtype, [&](auto c) { return map<decltype(c), 1>(out, {self}, [](auto x) { return x; }); });
}

inline Kernel in_turn(std::vector<Kernel> kernels) {
  return [kernels = std::move(kernels)] {
    for (const Kernel &kernel : kernels) kernel();
  };
}

}  // namespace opapi
