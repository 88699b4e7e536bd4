// Handles, argument checks and conversions: what every aclnn operator of the simulator stands on.
#include "opapi.h"

#include <memory>
#include <mutex>
#include <sstream>
#include <unordered_map>

namespace opapi {

// ---- Operators ------------------------------------------------------------------------------------------------------

// Nothing is kept in it, but on hardware few operators do without: whoever launches must bring it.
constexpr uint64_t kWorkspace = 1024;

namespace {

// Of the call of `plan` that this thread is in.
thread_local std::vector<aclTensor> outputs;

}  // namespace

void writes(const aclTensor &tensor) {
  if (cannsim::corrupts()) outputs.push_back(tensor);
}

int plan(const char *name, uint64_t *workspace_size, aclOpExecutor **executor, const std::function<Kernel()> &check) {
  const auto entry = [name] { return std::string(name) + "GetWorkspaceSize"; };
  if (cannsim::watched()) {
    if (const int code = cannsim::enter(entry().c_str())) return code;
  }
  try {
    if (workspace_size == nullptr) throw Refusal{kNullArgument, "workspaceSize is null"};
    if (executor == nullptr) throw Refusal{kNullArgument, "executor is null"};
    outputs.clear();
    Kernel kernel = check();
    require(!cannsim::corrupts() || !outputs.empty(), "the simulator does not know what it writes");
    *executor = new aclOpExecutor{name, std::move(kernel), std::move(outputs)};
    *workspace_size = kWorkspace;
    return 0;
  } catch (const Refusal &refusal) {
    return cannsim::fail(refusal.code, entry() + ": " + refusal.message);
  }
}

int launch(const char *name, void *workspace, uint64_t bytes, aclOpExecutor *executor, aclrtStream stream) {
  const std::unique_ptr<aclOpExecutor> spent(executor);  // whatever becomes of the launch
  if (const int code = cannsim::enter(name)) {
    cannsim::launch_failed(stream);
    return code;
  }
  if (spent == nullptr) return cannsim::fail(kNullArgument, std::string(name) + ": executor is null");
  if (std::strcmp(spent->name, name) != 0)
    return cannsim::fail(kInvalidArgument, std::string(name) + ": executor is one of " + spent->name);
  if (bytes < kWorkspace || cannsim::alias(workspace, kWorkspace) == nullptr)
    return cannsim::fail(kInvalidArgument, std::string(name) + ": the workspace is not the device memory asked for");
  return cannsim::enqueue(stream, name, std::move(spent->run), std::move(spent->outputs));
}

// ---- Data types -----------------------------------------------------------------------------------------------------

namespace {

template <typename To, typename From>
To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

}  // namespace

float to_float(Half half) {
  const uint32_t sign = uint32_t(half.bits & 0x8000) << 16;
  const uint32_t exponent = half.bits >> 10 & 0x1f;
  const uint32_t fraction = half.bits & 0x3ff;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24 is exact
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t rebased = exponent == 0x1f ? 0xff : exponent + (127 - 15);
  return bit_cast<float>(sign | rebased << 23 | fraction << 13);
}

float to_float(BFloat16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

// Both round to nearest, ties to even.
Half to_half(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return Half{uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return Half{uint16_t(sign | 0x7c00)};  // 65520 and above round to infinity
  if (magnitude < 0x38800000) {                                        // subnormal in half: let float addition round
    const float aligned = bit_cast<float>(magnitude) + 0.5f;           // one unit of 0.5f's last place is 2^-24
    return Half{uint16_t(sign | (bit_cast<uint32_t>(aligned) - bit_cast<uint32_t>(0.5f)))};
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return Half{uint16_t(sign | (rounded - ((127 - 15) << 23)) >> 13)};
}

BFloat16 to_bfloat16(float value) {
  if (std::isnan(value)) return BFloat16{0x7fc0};
  const uint32_t bits = bit_cast<uint32_t>(value);
  return BFloat16{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

std::string name_of(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT: return "FLOAT";
    case ACL_DOUBLE: return "DOUBLE";
    case ACL_FLOAT16: return "FLOAT16";
    case ACL_BF16: return "BFLOAT16";
    case ACL_INT8: return "INT8";
    case ACL_INT16: return "INT16";
    case ACL_INT32: return "INT32";
    case ACL_INT64: return "INT64";
    case ACL_UINT8: return "UINT8";
    case ACL_BOOL: return "BOOL";
    case ACL_COMPLEX64: return "COMPLEX64";
    case ACL_COMPLEX128: return "COMPLEX128";
    default: return "#" + std::to_string(static_cast<int>(dtype));
  }
}

size_t size_of(aclDataType dtype) {
  return by_dtype(dtype, [](auto tag) { return sizeof tag; });
}

aclDataType promote(aclDataType a, aclDataType b) {
  if (a == b) return a;
  // Ordered so that the later of two is wide enough for both, but for the two pairs below.
  constexpr aclDataType order[] = {ACL_BOOL,  ACL_UINT8,   ACL_INT8, ACL_INT16, ACL_INT32,
                                   ACL_INT64, ACL_FLOAT16, ACL_BF16, ACL_FLOAT, ACL_DOUBLE};
  const auto rank = [&](aclDataType dtype) {
    const auto *found = std::find(std::begin(order), std::end(order), dtype);
    require(found != std::end(order), "dtype " + name_of(dtype) + " is not supported");
    return found;
  };
  const aclDataType low = *std::min(rank(a), rank(b)), high = *std::max(rank(a), rank(b));
  if (low == ACL_UINT8 && high == ACL_INT8) return ACL_INT16;
  if (low == ACL_FLOAT16 && high == ACL_BF16) return ACL_FLOAT;
  return high;
}

namespace {

int category(aclDataType dtype) { return dtype == ACL_BOOL ? 0 : is_floating(dtype) ? 2 : 1; }

}  // namespace

// A number widens a tensor's dtype only by its category.
aclDataType promote(const aclTensor &tensor, const aclScalar &scalar) {
  if (category(scalar.dtype) <= category(tensor.dtype)) return tensor.dtype;
  return is_floating(scalar.dtype) ? ACL_FLOAT : scalar.dtype;
}

bool can_cast(aclDataType from, aclDataType to) { return category(from) <= category(to); }

// ---- Arguments ------------------------------------------------------------------------------------------------------

std::string text(const Shape &shape) {
  std::ostringstream out;
  out << '[';
  for (size_t d = 0; d < shape.size(); d++) out << (d ? ", " : "") << shape[d];
  out << ']';
  return out.str();
}

int64_t count(const Shape &shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}

namespace {

constexpr size_t kMaxRank = 8;  // of CANN

// Elements from the first to one past the last that the view reaches.
int64_t span(const aclTensor &view) {
  int64_t last = 0;
  for (size_t d = 0; d < view.shape.size(); d++) {
    if (view.shape[d] == 0) return 0;
    last += (view.shape[d] - 1) * view.strides[d];
  }
  return last + 1;
}

bool is_base_format(aclFormat format) {
  return format == ACL_FORMAT_ND || format == ACL_FORMAT_NCHW || format == ACL_FORMAT_NCDHW || format == ACL_FORMAT_NCL;
}

}  // namespace

const aclTensor &tensor(In argument, const char *name, Dtypes allowed) {
  const std::string who(name);
  if (argument == nullptr) throw Refusal{kNullArgument, who + " is null"};
  require(in(argument->dtype, allowed), who + ": dtype " + name_of(argument->dtype) + " is not supported");
  require(is_base_format(argument->format),
          who + ": format " + std::to_string(static_cast<int>(argument->format)) + " is not supported");
  require(argument->shape.size() <= kMaxRank, who + ": more than 8 dimensions");
  require(span(*argument) == 0 || argument->data != nullptr, who + ": no device memory");
  require(span(*argument) == 0 || argument->offset + span(*argument) <= count(argument->storage),
          who + ": view of shape " + text(argument->shape) + ", strides " + text(argument->strides) + " at offset " +
              std::to_string(argument->offset) + " exceeds the storage " + text(argument->storage));
  return *argument;
}

const aclTensor &tensor(Out argument, const char *name, Dtypes allowed) {
  const aclTensor &checked = tensor(static_cast<In>(argument), name, allowed);
  writes(checked);
  return checked;
}

const aclScalar &scalar(Num argument, const char *name) {
  if (argument == nullptr) throw Refusal{kNullArgument, std::string(name) + " is null"};
  require(in(argument->dtype, kAll), std::string(name) + ": dtype " + name_of(argument->dtype) + " is not supported");
  return *argument;
}

void require_shape(const aclTensor &tensor, const char *name, const Shape &expected) {
  require(tensor.shape == expected,
          std::string(name) + ": shape " + text(tensor.shape) + ", expected " + text(expected));
}

void require_fits(const aclTensor &tensor, const char *name, const Shape &shape) {
  bool fits = tensor.shape.size() <= shape.size();
  for (size_t d = 1; fits && d <= tensor.shape.size(); d++) {  // from the last dimension
    const int64_t size = tensor.shape[tensor.shape.size() - d];
    fits = size == 1 || size == shape[shape.size() - d];
  }
  require(fits, std::string(name) + ": shape " + text(tensor.shape) + " does not broadcast to " + text(shape));
}

void require_dtype(const aclTensor &tensor, const char *name, aclDataType expected) {
  require(tensor.dtype == expected,
          std::string(name) + ": dtype " + name_of(tensor.dtype) + ", expected " + name_of(expected));
}

void require_cast(aclDataType from, const aclTensor &out) {
  require(can_cast(from, out.dtype),
          "out: a result of dtype " + name_of(from) + " cannot be cast to " + name_of(out.dtype));
}

Shape broadcast(const Shape &a, const Shape &b) {
  Shape result(std::max(a.size(), b.size()));
  for (size_t d = 0; d < result.size(); d++) {  // from the last dimension
    const int64_t x = d < a.size() ? a[a.size() - 1 - d] : 1, y = d < b.size() ? b[b.size() - 1 - d] : 1;
    require(x == y || x == 1 || y == 1, "shapes " + text(a) + " and " + text(b) + " do not broadcast");
    result[result.size() - 1 - d] = x == 1 ? y : x;
  }
  return result;
}

Shape expand(const aclTensor &tensor, const Shape &shape) {
  Shape strides(shape.size(), 0);
  const size_t added = shape.size() - tensor.shape.size();
  for (size_t d = 0; d < tensor.shape.size(); d++)
    if (tensor.shape[d] == shape[added + d]) strides[added + d] = tensor.strides[d];
  return strides;
}

size_t axis(int64_t dim, size_t rank, const char *name) {
  const int64_t limit = std::max<int64_t>(1, static_cast<int64_t>(rank));  // a scalar counts as one dimension
  require(dim >= -limit && dim < limit, std::string(name) + ": " + std::to_string(dim) + " is outside [" +
                                            std::to_string(-limit) + ", " + std::to_string(limit - 1) + "]");
  return static_cast<size_t>(dim < 0 ? dim + limit : dim);
}

std::vector<bool> axes(const std::vector<int64_t> &dims, size_t rank) {
  std::vector<bool> chosen(std::max<size_t>(1, rank), dims.empty());
  for (int64_t dim : dims) {
    require(!chosen[axis(dim, rank)], "dim: " + std::to_string(dim) + " appears twice");
    chosen[axis(dim, rank)] = true;
  }
  chosen.resize(rank);
  return chosen;
}

aclTensor narrow(aclTensor view, size_t dim, int64_t start, int64_t length) {
  view.offset += start * view.strides[dim];
  view.shape[dim] = length;
  return view;
}

aclTensor unsqueeze(aclTensor view, size_t dim) {
  view.shape.insert(view.shape.begin() + static_cast<ptrdiff_t>(dim), 1);
  view.strides.insert(view.strides.begin() + static_cast<ptrdiff_t>(dim), 0);
  return view;
}

// ---- Device memory --------------------------------------------------------------------------------------------------

std::byte *resolve(const aclTensor &view) {
  const auto bytes = static_cast<int64_t>(size_of(view.dtype));
  const int64_t length = span(view) * bytes;
  if (length == 0) return nullptr;
  const std::byte *address = static_cast<std::byte *>(view.data) + view.offset * bytes;
  void *memory = cannsim::alias(address, static_cast<size_t>(length));
  if (memory == nullptr)
    throw DeviceFault("a tensor of shape " + text(view.shape) + " and dtype " + name_of(view.dtype) +
                      " is outside of allocated device memory");
  if (reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(bytes) != 0)
    throw DeviceFault("misaligned tensor of dtype " + name_of(view.dtype));
  return static_cast<std::byte *>(memory);
}

// ---- Element by element ---------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kBlock = 512;

struct Operand {
  std::byte *base = nullptr;
  int64_t bytes = 0;
};

}  // namespace

// Walks `shape` block by block: visit(elements of each input, n, where the results go, their stride).
template <typename C, typename F>
void walk(const Shape &shape, const std::vector<aclTensor> &inputs, const aclTensor *out, F visit) {
  const size_t n_inputs = inputs.size();
  std::array<Shape, kMaxInputs + 1> strides;  // the inputs', then that of `out`
  strides.fill(Shape(shape.size(), 0));
  std::array<Operand, kMaxInputs + 1> operands;
  std::array<Loader<C>, kMaxInputs> loads{};
  for (size_t k = 0; k < n_inputs; k++) {
    strides[k] = expand(inputs[k], shape);
    operands[k] = {resolve(inputs[k]), static_cast<int64_t>(size_of(inputs[k].dtype))};
    loads[k] = loader<C>(inputs[k].dtype);
  }
  if (out != nullptr) {
    strides[kMaxInputs] = out->strides;
    operands[kMaxInputs] = {resolve(*out), static_cast<int64_t>(size_of(out->dtype))};
  }

  const Space<kMaxInputs + 1> space(shape, strides);
  const auto &step = space.step();
  C scratch[kMaxInputs][kBlock];
  space.each_run([&](const auto &offset, int64_t length) {
    for (int64_t begin = 0; begin < length; begin += kBlock) {
      const int64_t n = std::min(kBlock, length - begin);
      const auto at = [&](size_t k) { return operands[k].base + (offset[k] + begin * step[k]) * operands[k].bytes; };
      const C *x[kMaxInputs];
      for (size_t k = 0; k < n_inputs; k++) x[k] = loads[k](at(k), step[k], n, scratch[k]);
      visit(x, n, at(kMaxInputs), step[kMaxInputs]);
    }
  });
}

template <typename C>
Kernel map_blocks(const aclTensor &out, std::vector<aclTensor> inputs, Body<C> body) {
  return [out, inputs = std::move(inputs), body = std::move(body)] {
    const Storer<C> write = storer<C>(out.dtype);
    C results[kBlock];
    walk<C>(out.shape, inputs, &out, [&](const C *const *x, int64_t n, std::byte *to, int64_t stride) {
      body(x, n, results);
      write(results, n, to, stride);
    });
  };
}

template <typename C>
void each_block(const Shape &shape, const std::vector<aclTensor> &inputs,
                const std::function<void(const C *const *inputs, int64_t n)> &visit) {
  walk<C>(shape, inputs, nullptr, [&](const C *const *x, int64_t n, std::byte *, int64_t) { visit(x, n); });
}

template void each_block<float>(const Shape &, const std::vector<aclTensor> &,
                                const std::function<void(const float *const *, int64_t)> &);
template Kernel map_blocks<float>(const aclTensor &, std::vector<aclTensor>, Body<float>);
template Kernel map_blocks<double>(const aclTensor &, std::vector<aclTensor>, Body<double>);
template Kernel map_blocks<int64_t>(const aclTensor &, std::vector<aclTensor>, Body<int64_t>);

// ---- Handles --------------------------------------------------------------------------------------------------------

namespace {

// Live tensors, so that a stale handle is an error and not a crash.
class LiveTensors {
 public:
  aclTensor *add(aclTensor value) {
    auto owned = std::make_unique<aclTensor>(std::move(value));
    aclTensor *handle = owned.get();
    const std::lock_guard<std::mutex> guard(mutex_);
    handles_.emplace(handle, std::move(owned));
    return handle;
  }
  bool remove(In handle) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return handles_.erase(handle) == 1;
  }
  template <typename F>
  bool with(In handle, F f) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = handles_.find(handle);
    if (found == handles_.end()) return false;
    f(*found->second);
    return true;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<In, std::unique_ptr<aclTensor>> handles_;
};

LiveTensors &live() {
  static auto *tensors = new LiveTensors;  // never destroyed: torch_npu releases handles until the process is gone
  return *tensors;
}

// Wraps the making of a handle: null, with a message, when the call is refused. Handles are plain host memory, so
// making and destroying them is neither traced nor a place where a failure can be injected.
template <typename F>
auto make(const char *name, F f) -> decltype(f()) {
  try {
    return f();
  } catch (const Refusal &refusal) {
    cannsim::fail(refusal.code, std::string(name) + ": " + refusal.message);
    return nullptr;
  }
}

template <typename T>
std::vector<T> values(const T *from, uint64_t size) {
  if (from == nullptr && size != 0) throw Refusal{kNullArgument, "value is null"};
  return std::vector<T>(from, from + size);
}

}  // namespace

void report_shape(In handle, const Shape &shape) {
  if (!live().with(handle, [&](aclTensor &tensor) { tensor.shape = shape; }))
    throw DeviceFault("out was destroyed before the kernel could report its shape");
}

OPAPI_EXPORT aclTensor *aclCreateTensor(const int64_t *view_dims, uint64_t rank, aclDataType dtype,
                                        const int64_t *strides, int64_t offset, aclFormat format,
                                        const int64_t *storage_dims, uint64_t storage_rank, void *data) {
  return make("aclCreateTensor", [&] {
    aclTensor view;
    view.dtype = dtype;
    view.format = format;
    view.shape = values(view_dims, rank);
    view.strides = values(strides, rank);
    view.offset = offset;
    view.storage = values(storage_dims, storage_rank);
    view.data = data;
    const auto negative = [](int64_t n) { return n < 0; };
    require(std::none_of(view.shape.begin(), view.shape.end(), negative), "negative view dimension");
    require(std::none_of(view.strides.begin(), view.strides.end(), negative), "negative stride");
    require(std::none_of(view.storage.begin(), view.storage.end(), negative), "negative storage dimension");
    require(offset >= 0, "negative offset");
    return live().add(std::move(view));
  });
}

OPAPI_EXPORT aclScalar *aclCreateScalar(void *value, aclDataType dtype) {
  return make("aclCreateScalar", [&] {
    if (value == nullptr) throw Refusal{kNullArgument, "value is null"};
    auto *scalar = new aclScalar{dtype, {}};
    // A complex number, which no operator takes, must still be a handle: torch_npu creates them for its own checks.
    const size_t bytes = dtype == ACL_COMPLEX64 ? 8 : dtype == ACL_COMPLEX128 ? 16 : size_of(dtype);
    std::memcpy(scalar->bytes, value, bytes);
    return scalar;
  });
}

OPAPI_EXPORT aclIntArray *aclCreateIntArray(const int64_t *value, uint64_t size) {
  return make("aclCreateIntArray", [&] { return new aclIntArray{values(value, size)}; });
}

OPAPI_EXPORT aclFloatArray *aclCreateFloatArray(const float *value, uint64_t size) {
  return make("aclCreateFloatArray", [&] { return new aclFloatArray{values(value, size)}; });
}

OPAPI_EXPORT aclBoolArray *aclCreateBoolArray(const bool *value, uint64_t size) {
  return make("aclCreateBoolArray", [&] { return new aclBoolArray{values(value, size)}; });
}

OPAPI_EXPORT aclTensorList *aclCreateTensorList(const aclTensor *const *value, uint64_t size) {
  return make("aclCreateTensorList", [&] { return new aclTensorList{values(value, size)}; });
}

OPAPI_EXPORT aclScalarList *aclCreateScalarList(const aclScalar *const *value, uint64_t size) {
  return make("aclCreateScalarList", [&] {
    auto *list = new aclScalarList;
    for (const aclScalar *scalar : values(value, size)) list->scalars.push_back(opapi::scalar(scalar, "value"));
    return list;
  });
}

OPAPI_EXPORT int aclDestroyTensor(const aclTensor *handle) {
  if (handle == nullptr || live().remove(handle)) return 0;
  return cannsim::fail(kInvalidArgument, "aclDestroyTensor: not a live tensor");
}

OPAPI_EXPORT int aclDestroyScalar(const aclScalar *handle) {
  delete handle;
  return 0;
}

OPAPI_EXPORT int aclDestroyIntArray(const aclIntArray *handle) {
  delete handle;
  return 0;
}

OPAPI_EXPORT int aclDestroyFloatArray(const aclFloatArray *handle) {
  delete handle;
  return 0;
}

OPAPI_EXPORT int aclDestroyBoolArray(const aclBoolArray *handle) {
  delete handle;
  return 0;
}

OPAPI_EXPORT int aclDestroyScalarList(const aclScalarList *handle) {
  delete handle;
  return 0;
}

// A list owns its tensors.
OPAPI_EXPORT int aclDestroyTensorList(const aclTensorList *handle) {
  if (handle == nullptr) return 0;
  for (const aclTensor *tensor : handle->tensors) aclDestroyTensor(tensor);
  delete handle;
  return 0;
}

// The caller releases `*dims` with delete[].
OPAPI_EXPORT int aclGetViewShape(const aclTensor *handle, int64_t **dims, uint64_t *rank) {
  if (int code = cannsim::enter("aclGetViewShape")) return code;
  if (dims == nullptr || rank == nullptr) return cannsim::fail(kNullArgument, "aclGetViewShape: null result");
  const bool found = live().with(handle, [&](const aclTensor &tensor) {
    *rank = tensor.shape.size();
    *dims = new int64_t[tensor.shape.size()];
    std::copy(tensor.shape.begin(), tensor.shape.end(), *dims);
  });
  return found ? 0 : cannsim::fail(kInvalidArgument, "aclGetViewShape: not a live tensor");
}

}  // namespace opapi
