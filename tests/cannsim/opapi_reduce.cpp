// Operators along dimensions: sums, extremes, predicates, softmax. Each is a function of one row at a time, the row
// being the elements that the reduced dimensions span, gathered into consecutive values.
#include "opapi.h"

namespace opapi {
namespace {

// ---- Rows -----------------------------------------------------------------------------------------------------------

// The part of a view's dimensions (or strides) that is reduced, or that is not.
Shape pick(const Shape &values, const std::vector<bool> &reduced, bool wanted) {
  Shape picked;
  for (size_t d = 0; d < values.size(); d++)
    if (reduced[d] == wanted) picked.push_back(values[d]);
  return picked;
}

// Gathers one row after another.
template <typename C>
class Rows {
 public:
  Rows(const aclTensor &self, const std::vector<bool> &reduced)
      : space_(pick(self.shape, reduced, true), {pick(self.strides, reduced, true)}),
        length_(count(pick(self.shape, reduced, true))),
        read_(loader<C>(self.dtype)),
        base_(resolve(self)),
        bytes_(static_cast<int64_t>(size_of(self.dtype))),
        scratch_(static_cast<size_t>(length_)) {}

  int64_t length() const { return length_; }

  const C *at(int64_t offset) {
    const int64_t stride = space_.step()[0];
    if (space_.single_run() && length_ > 0) return read_(base_ + offset * bytes_, stride, length_, scratch_.data());
    int64_t filled = 0;
    space_.each_run([&](const auto &inner, int64_t n) {
      C *target = scratch_.data() + filled;
      const C *values = read_(base_ + (offset + inner[0]) * bytes_, stride, n, target);
      if (values != target) std::copy(values, values + n, target);
      filled += n;
    });
    return scratch_.data();
  }

 private:
  Space<1> space_;
  int64_t length_;
  Loader<C> read_;
  const std::byte *base_;
  int64_t bytes_;
  std::vector<C> scratch_;
};

Shape reduced_shape(const Shape &shape, const std::vector<bool> &reduced, bool keepdim) {
  Shape result;
  for (size_t d = 0; d < shape.size(); d++) {
    if (!reduced[d]) result.push_back(shape[d]);
    else if (keepdim) result.push_back(1);
  }
  return result;
}

// out[...] = f(row, length), computed from C; the type that f returns decides how the result is stored.
template <typename C, typename F>
Kernel reduce_rows(const aclTensor &self, const std::vector<bool> &reduced, bool keepdim, const aclTensor &out, F f) {
  const Shape out_strides = keepdim ? pick(out.strides, reduced, false) : out.strides;
  return [=] {
    using R = std::invoke_result_t<F, const C *, int64_t>;
    Rows<C> rows(self, reduced);
    std::byte *to = resolve(out);
    const auto bytes = static_cast<int64_t>(size_of(out.dtype));
    const Storer<R> write = storer<R>(out.dtype);
    const Space<2> kept(pick(self.shape, reduced, false), {pick(self.strides, reduced, false), out_strides});
    kept.each_run([&](const auto &offset, int64_t n) {
      for (int64_t i = 0; i < n; i++) {
        const R result = f(rows.at(offset[0] + i * kept.step()[0]), rows.length());
        write(&result, 1, to + (offset[1] + i * kept.step()[1]) * bytes, 1);
      }
    });
  };
}

// `out` and the inputs have one shape; f(a row of each input, length, results) fills one row along `dim`.
template <typename C, size_t N, typename F>
Kernel transform_rows(const std::array<aclTensor, N> &inputs, size_t dim, const aclTensor &out, F f) {
  std::vector<bool> along(std::max<size_t>(1, out.shape.size()), false);
  along[dim] = true;
  along.resize(out.shape.size());
  const int64_t out_stride = out.shape.empty() ? 1 : out.strides[dim];
  return [=] {
    std::vector<Rows<C>> rows;
    std::array<Shape, N + 1> strides;
    for (size_t k = 0; k < N; k++) {
      rows.emplace_back(inputs[k], along);
      strides[k] = pick(inputs[k].strides, along, false);
    }
    strides[N] = pick(out.strides, along, false);
    std::byte *to = resolve(out);
    const auto bytes = static_cast<int64_t>(size_of(out.dtype));
    const Storer<C> write = storer<C>(out.dtype);
    const int64_t length = rows.front().length();
    std::vector<C> results(static_cast<size_t>(length));
    const Space<N + 1> kept(pick(out.shape, along, false), strides);
    kept.each_run([&](const auto &offset, int64_t n) {
      for (int64_t i = 0; i < n; i++) {
        std::array<const C *, N> row;
        for (size_t k = 0; k < N; k++) row[k] = rows[k].at(offset[k] + i * kept.step()[k]);
        f(row, length, results.data());
        write(results.data(), length, to + (offset[N] + i * kept.step()[N]) * bytes, out_stride);
      }
    });
  };
}

// ---- Functions of a row ---------------------------------------------------------------------------------------------

// Floating sums accumulate in double.
template <typename C>
using Wide = std::conditional_t<std::is_integral_v<C>, int64_t, double>;

template <typename C>
Wide<C> sum_of(const C *row, int64_t n) {
  if constexpr (std::is_integral_v<C>) {
    uint64_t sum = 0;  // wraps
    for (int64_t i = 0; i < n; i++) sum += static_cast<uint64_t>(row[i]);
    return static_cast<int64_t>(sum);
  } else {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += row[i];
    return sum;
  }
}

// The first largest element, where NaN counts as larger than any number; `better` turns it into the smallest.
template <typename C, typename F>
int64_t best_of(const C *row, int64_t n, F better) {
  int64_t best = 0;
  for (int64_t i = 1; i < n && row[best] == row[best]; i++)
    if (row[i] != row[i] || better(row[i], row[best])) best = i;
  return best;
}
constexpr auto larger = [](auto a, auto b) { return a > b; };
constexpr auto smaller = [](auto a, auto b) { return a < b; };
constexpr auto farther = [](auto a, auto b) { return std::abs(a) > std::abs(b); };  // from zero
constexpr auto nearer = [](auto a, auto b) { return std::abs(a) < std::abs(b); };

template <typename C>
double variance(const C *row, int64_t n, int64_t correction) {
  const double mean = sum_of(row, n) / static_cast<double>(n);
  double squares = 0;
  for (int64_t i = 0; i < n; i++) squares += (row[i] - mean) * (row[i] - mean);
  return squares / std::max(0.0, static_cast<double>(n - correction));
}

template <typename C>
double log_sum_exp(const C *row, int64_t n) {
  double largest = -std::numeric_limits<double>::infinity();
  if (n > 0) largest = row[best_of(row, n, larger)];
  const double shift = std::isinf(largest) ? 0 : largest;
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += std::exp(row[i] - shift);
  return std::log(sum) + shift;
}

template <typename C>
void softmax_of(const C *row, int64_t n, C *results) {
  if (n == 0) return;
  const C largest = row[best_of(row, n, larger)];
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += results[i] = static_cast<C>(std::exp(row[i] - largest));
  for (int64_t i = 0; i < n; i++) results[i] = static_cast<C>(results[i] / sum);
}

template <typename C>
void log_softmax_of(const C *row, int64_t n, C *results) {
  if (n == 0) return;
  const C largest = row[best_of(row, n, larger)];
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += std::exp(row[i] - largest);
  for (int64_t i = 0; i < n; i++) results[i] = static_cast<C>(row[i] - largest - std::log(sum));
}

// ---- Shapes of operators --------------------------------------------------------------------------------------------

const std::vector<int64_t> &dims_of(Ints dims) {
  if (dims == nullptr) throw Refusal{kNullArgument, "dim is null"};
  return dims->values;
}

// The common part: checks the shape of `out`, then computes in the kind of `dtype`.
template <typename F>
Kernel reduce(const aclTensor &self, const std::vector<int64_t> &dims, bool keepdim, const aclTensor &out,
              aclDataType dtype, F f, bool needs_elements = false) {
  const std::vector<bool> reduced = axes(dims, self.shape.size());
  require_shape(out, "out", reduced_shape(self.shape, reduced, keepdim));
  require(!needs_elements || count(pick(self.shape, reduced, true)) > 0 || count(out.shape) == 0,
          "self: shape " + text(self.shape) + " has no element to choose from");
  return by_kind(dtype, [&](auto c) {
    using C = decltype(c);
    return reduce_rows<C>(self, reduced, keepdim, out, [f](const C *row, int64_t n) { return f(row, n); });
  });
}

// `dtype` is the one that the caller asked for: the operator converts to it first, and `out` must have it.
Kernel sum(In self, const std::vector<int64_t> &dims, bool keepdim, aclDataType dtype, Out out) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out");
  require_dtype(y, "out", dtype);
  require_cast(x.dtype, y);
  return reduce(x, dims, keepdim, y, dtype, [](const auto *row, int64_t n) { return sum_of(row, n); });
}

Kernel mean(In self, const std::vector<int64_t> &dims, bool keepdim, aclDataType dtype, Out out) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out", kFloats | kDouble);
  require_dtype(y, "out", dtype);
  return reduce(x, dims, keepdim, y, dtype, [](const auto *row, int64_t n) {
    return static_cast<double>(sum_of(row, n)) / static_cast<double>(n);
  });
}

Kernel product(In self, const std::vector<int64_t> &dims, bool keepdim, aclDataType dtype, Out out) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out");
  require_dtype(y, "out", dtype);
  return reduce(x, dims, keepdim, y, dtype, [](const auto *row, int64_t n) {
    Wide<std::decay_t<decltype(*row)>> result = 1;
    for (int64_t i = 0; i < n; i++) result *= row[i];
    return result;
  });
}

template <typename F>
Kernel extreme(In self, const std::vector<int64_t> &dims, bool keepdim, Out out, F better) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out");
  require_dtype(y, "out", x.dtype);
  return reduce(x, dims, keepdim, y, x.dtype,
                [better](const auto *row, int64_t n) { return row[best_of(row, n, better)]; }, true);
}

template <typename F>
Kernel arg_extreme(In self, int64_t dim, bool keepdim, Out out, F better) {
  const aclTensor &x = tensor(self, "self", kNumbers), &y = tensor(out, "out", kIndex);
  return reduce(x, {dim}, keepdim, y, x.dtype,
                [better](const auto *row, int64_t n) { return best_of(row, n, better); }, true);
}

template <typename F>
Kernel extreme_and_index(In self, int64_t dim, bool keepdim, Out out, Out indices, F better) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(indices, "indices", kIndex);
  require_shape(y, "indices", tensor(out, "out").shape);
  return in_turn({extreme(self, {dim}, keepdim, out, better),
                  reduce(x, {dim}, keepdim, y, x.dtype,
                         [better](const auto *row, int64_t n) { return best_of(row, n, better); }, true)});
}

Kernel all(In self, Ints dims, bool keepdim, Out out) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out", kBool | dtypes({ACL_UINT8}));
  return reduce(x, dims_of(dims), keepdim, y, x.dtype, [](const auto *row, int64_t n) {
    return static_cast<int64_t>(std::all_of(row, row + n, [](auto v) { return v != 0; }));
  });
}

Kernel any(In self, Ints dims, bool keepdim, Out out) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out", kBool | dtypes({ACL_UINT8}));
  return reduce(x, dims_of(dims), keepdim, y, x.dtype, [](const auto *row, int64_t n) {
    return static_cast<int64_t>(std::any_of(row, row + n, [](auto v) { return v != 0; }));
  });
}

template <typename F>
Kernel spread(In self, Ints dims, bool keepdim, Out out, F f) {
  const aclTensor &x = tensor(self, "self", kFloats | kDouble), &y = tensor(out, "out", kFloats | kDouble);
  require_dtype(y, "out", x.dtype);
  return reduce(x, dims_of(dims), keepdim, y, x.dtype, f);
}

Kernel log_sum_exp(In self, Ints dims, bool keepdim, Out out) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out", kFloats);
  require_cast(floating(x.dtype), y);
  return reduce(x, dims_of(dims), keepdim, y, floating(x.dtype),
                [](const auto *row, int64_t n) { return log_sum_exp(row, n); });
}

template <typename F>
Kernel along(In self, int64_t dim, Out out, Dtypes allowed, F f) {
  const aclTensor &x = tensor(self, "self", allowed), &y = tensor(out, "out", allowed);
  require_shape(y, "out", x.shape);
  const size_t d = axis(dim, x.shape.size());
  return by_kind(y.dtype, [&](auto c) {
    using C = decltype(c);
    return transform_rows<C, 1>({x}, d, y, [f](const auto &rows, int64_t n, C *results) { f(rows[0], n, results); });
  });
}

template <typename F>
Kernel softmax(In self, int64_t dim, Out out, F f) {
  require_cast(tensor(self, "self").dtype, tensor(out, "out"));
  return along(self, dim, out, kFloats | kDouble, f);
}

// (grad - the sum of grad times output) times output, in each row.
Kernel softmax_backward(In grad, In output, int64_t dim, Out out) {
  const aclTensor &g = tensor(grad, "gradOutput", kFloatsAndDouble), &o = tensor(output, "output"),
                  &y = tensor(out, "out", kFloatsAndDouble);
  require_dtype(o, "output", g.dtype);
  require_shape(o, "output", g.shape);
  require_shape(y, "out", g.shape);
  const size_t d = axis(dim, g.shape.size());
  return by_precision(g.dtype, [&](auto c) {
    using C = decltype(c);
    return transform_rows<C, 2>({g, o}, d, y, [](const auto &rows, int64_t n, C *results) {
      double sum = 0;
      for (int64_t i = 0; i < n; i++) sum += double(rows[0][i]) * double(rows[1][i]);
      for (int64_t i = 0; i < n; i++) results[i] = static_cast<C>((double(rows[0][i]) - sum) * double(rows[1][i]));
    });
  });
}

// As on this SoC: a norm of another order than these is an error.
Kernel vector_norm(In self, Num order, Ints dims, bool keepdim, aclDataType dtype, Out out) {
  const aclTensor &x = tensor(self, "self", kFloats), &y = tensor(out, "out", kFloats);
  const auto p = value<float>(scalar(order, "ord"));
  require_dtype(y, "out", dtype);
  require(dtype == x.dtype || dtype == ACL_FLOAT, "dtype: " + name_of(dtype) + " for " + name_of(x.dtype));
  const bool infinite = std::isinf(p) || p == 2147483648.0f || p == -2147483648.0f;
  require(infinite || p == 0 || p == 1 || p == 2 || p == 3, "ord: " + std::to_string(p) + " is not supported");
  return reduce(x, dims_of(dims), keepdim, y, ACL_FLOAT, [p, infinite](const auto *row, int64_t n) {
    if (n == 0) return 0.0;
    if (infinite) return std::abs(double(row[p > 0 ? best_of(row, n, farther) : best_of(row, n, nearer)]));
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
      const double size = std::abs(double(row[i]));
      if (p == 0) sum += size != 0;
      else sum += p == 1 ? size : p == 2 ? size * size : size * size * size;
    }
    return p == 2 ? std::sqrt(sum) : p == 3 ? std::cbrt(sum) : sum;
  });
}

Kernel cumsum(In self, int64_t dim, aclDataType dtype, Out out) {
  require_dtype(tensor(out, "out"), "out", dtype);
  require_cast(tensor(self, "self").dtype, *out);
  return along(self, dim, out, kAll, [](const auto *row, int64_t n, auto *results) {
    Wide<std::decay_t<decltype(*row)>> sum = 0;
    for (int64_t i = 0; i < n; i++) results[i] = static_cast<std::decay_t<decltype(*row)>>(sum += row[i]);
  });
}

// Tensors of different shape or dtype are not equal; NaN equals nothing.
Kernel equal(In self, In other, Out out) {
  const aclTensor &a = tensor(self, "self"), &b = tensor(other, "other"), &y = tensor(out, "out", kBool);
  require(count(y.shape) == 1, "out: shape " + text(y.shape) + ", expected one element");
  return [=] {
    bool same = a.shape == b.shape && a.dtype == b.dtype;
    if (same) {
      by_kind(a.dtype, [&](auto c) {
        using C = decltype(c);
        const std::vector<bool> whole(a.shape.size(), true);
        Rows<C> left(a, whole), right(b, whole);
        const C *x = left.at(0);
        same = std::equal(x, x + left.length(), right.at(0));
      });
    }
    *resolve(y) = static_cast<std::byte>(same);
  };
}

}  // namespace

// ---- The operators --------------------------------------------------------------------------------------------------

ACLNN(aclnnReduceSum, (In self, Ints dims, bool keepdim, aclDataType dtype, Out out),
      sum(self, dims_of(dims), keepdim, dtype, out))
ACLNN(aclnnMean, (In self, Ints dims, bool keepdim, aclDataType dtype, Out out),
      mean(self, dims_of(dims), keepdim, dtype, out))
ACLNN(aclnnProd, (In self, aclDataType dtype, Out out), product(self, {}, false, dtype, out))
ACLNN(aclnnProdDim, (In self, int64_t dim, bool keepdim, aclDataType dtype, Out out),
      product(self, {dim}, keepdim, dtype, out))
ACLNN(aclnnMax, (In self, Out out), extreme(self, {}, false, out, larger))
ACLNN(aclnnMin, (In self, Out out), extreme(self, {}, false, out, smaller))
ACLNN(aclnnAmax, (In self, Ints dims, bool keepdim, Out out), extreme(self, dims_of(dims), keepdim, out, larger))
ACLNN(aclnnAmin, (In self, Ints dims, bool keepdim, Out out), extreme(self, dims_of(dims), keepdim, out, smaller))
ACLNN(aclnnMaxDim, (In self, int64_t dim, bool keepdim, Out out, Out indices),
      extreme_and_index(self, dim, keepdim, out, indices, larger))
ACLNN(aclnnMinDim, (In self, int64_t dim, bool keepdim, Out out, Out indices),
      extreme_and_index(self, dim, keepdim, out, indices, smaller))
ACLNN(aclnnArgMax, (In self, int64_t dim, bool keepdim, Out out), arg_extreme(self, dim, keepdim, out, larger))
ACLNN(aclnnArgMin, (In self, int64_t dim, bool keepdim, Out out), arg_extreme(self, dim, keepdim, out, smaller))
ACLNN(aclnnAll, (In self, Ints dims, bool keepdim, Out out), all(self, dims, keepdim, out))
ACLNN(aclnnAny, (In self, Ints dims, bool keepdim, Out out), any(self, dims, keepdim, out))
ACLNN(aclnnVarCorrection, (In self, Ints dims, int64_t correction, bool keepdim, Out out),
      spread(self, dims, keepdim, out, [=](const auto *row, int64_t n) { return variance(row, n, correction); }))
ACLNN(aclnnStd, (In self, Ints dims, int64_t correction, bool keepdim, Out out),
      spread(self, dims, keepdim, out,
             [=](const auto *row, int64_t n) { return std::sqrt(variance(row, n, correction)); }))
ACLNN(aclnnLogSumExp, (In self, Ints dims, bool keepdim, Out out), log_sum_exp(self, dims, keepdim, out))
ACLNN(aclnnSoftmax, (In self, int64_t dim, Out out),
      softmax(self, dim, out, [](const auto *row, int64_t n, auto *results) { softmax_of(row, n, results); }))
ACLNN(aclnnLogSoftmax, (In self, int64_t dim, Out out),
      softmax(self, dim, out, [](const auto *row, int64_t n, auto *results) { log_softmax_of(row, n, results); }))
ACLNN(aclnnSoftmaxBackward, (In grad, In output, int64_t dim, Out out), softmax_backward(grad, output, dim, out))
ACLNN(aclnnLinalgVectorNorm, (In self, Num order, Ints dims, bool keepdim, aclDataType dtype, Out out),
      vector_norm(self, order, dims, keepdim, dtype, out))
ACLNN(aclnnCumsum, (In self, int64_t dim, aclDataType dtype, Out out), cumsum(self, dim, dtype, out))
ACLNN(aclnnEqual, (In self, In other, Out out), equal(self, other, out))

}  // namespace opapi
