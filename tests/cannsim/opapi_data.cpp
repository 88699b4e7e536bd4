// Operators that make, move, join, select and draw elements.
#include "opapi.h"

namespace opapi {
namespace {

// ---- Make and copy --------------------------------------------------------------------------------------------------

Kernel inplace_copy(Out self, In source) {
  const aclTensor &to = tensor(self, "selfRef"), &from = tensor(source, "src");
  require_fits(from, "src", to.shape);
  return copy(to, from);
}

Kernel cast(In self, aclDataType dtype, Out out) {
  const aclTensor &from = tensor(self, "self"), &to = tensor(out, "out");
  require_dtype(to, "out", dtype);
  require_shape(to, "out", from.shape);
  return copy(to, from);
}

Kernel fill(Out self, const aclScalar &number) {
  const aclTensor &to = tensor(self, "selfRef");
  return by_kind(to.dtype, [&](auto c) {
    using C = decltype(c);
    return map<C, 0>(to, {}, [v = value<C>(number)] { return v; });
  });
}

Kernel fill(Out self, In number) {
  const aclTensor &from = tensor(number, "value");
  require(count(from.shape) == 1 && from.shape.size() <= 1,
          "value: shape " + text(from.shape) + ", expected one element");
  return copy(tensor(self, "selfRef"), from);
}

aclScalar whole(int64_t number) {
  aclScalar scalar{ACL_INT64, {}};
  std::memcpy(scalar.bytes, &number, sizeof number);
  return scalar;
}

// Integers are counted in integers.
template <typename C>
Kernel arange(const aclScalar &start, const aclScalar &end, const aclScalar &step, const aclTensor &y) {
  const auto first = value<C>(start), last = value<C>(end), stride = value<C>(step);
  require(stride != 0, "step is zero");
  require(first == last || (last > first) == (stride > 0), "end lies before start");
  const double length = std::ceil((double(last) - double(first)) / double(stride));
  require_shape(y, "out", {static_cast<int64_t>(length)});
  return [=] {
    std::byte *base = resolve(y);
    const auto bytes = static_cast<int64_t>(size_of(y.dtype));
    for (int64_t i = 0; i < y.shape[0]; i++) {
      const C element = first + static_cast<C>(i) * stride;
      storer<C>(y.dtype)(&element, 1, base + i * y.strides[0] * bytes, 1);
    }
  };
}

Kernel arange(Num start, Num end, Num step, Out out) {
  const aclScalar &from = scalar(start, "start"), &to = scalar(end, "end"), &by = scalar(step, "step");
  const aclTensor &y = tensor(out, "out", kFloatsAndDouble | kIndex);
  if (is_floating(y.dtype)) return arange<double>(from, to, by, y);
  return arange<int64_t>(from, to, by, y);
}

// ---- Join and repeat ------------------------------------------------------------------------------------------------

const std::vector<const aclTensor *> &list_of(Tensors list) {
  if (list == nullptr) throw Refusal{kNullArgument, "tensors is null"};
  require(!list->tensors.empty(), "tensors: empty list");
  return list->tensors;
}

Kernel join(std::vector<aclTensor> parts, size_t dim, const aclTensor &out) {
  std::vector<Kernel> copies;
  int64_t start = 0;
  aclDataType dtype = parts.front().dtype;
  for (const aclTensor &part : parts) {
    Shape expected = out.shape;
    require(part.shape.size() == expected.size(), "tensors: of different rank");
    expected[dim] = part.shape[dim];
    require_shape(part, "tensors", expected);
    require(start + part.shape[dim] <= out.shape[dim], "out: shape " + text(out.shape) + " is too small");
    copies.push_back(copy(narrow(out, dim, start, part.shape[dim]), part));
    start += part.shape[dim];
    dtype = promote(dtype, part.dtype);
  }
  require(start == out.shape[dim], "out: shape " + text(out.shape) + " is too large");
  require_cast(dtype, out);
  return in_turn(std::move(copies));
}

Kernel cat(Tensors list, int64_t dim, Out out) {
  const aclTensor &y = tensor(out, "out");
  require(!y.shape.empty(), "out: a scalar cannot be joined");
  std::vector<aclTensor> parts;
  for (In part : list_of(list)) {
    parts.push_back(tensor(part, "tensors"));
    require(part->format == y.format, "tensors: of another storage format than out");
  }
  return join(std::move(parts), axis(dim, y.shape.size()), y);
}

Kernel stack(Tensors list, int64_t dim, Out out) {
  const aclTensor &y = tensor(out, "out");
  const size_t d = axis(dim, y.shape.size());
  std::vector<aclTensor> parts;
  for (In part : list_of(list)) {
    require(d <= tensor(part, "tensors").shape.size(), "tensors: of different rank");
    parts.push_back(unsqueeze(*part, d));
  }
  require(!y.shape.empty(), "out: a scalar cannot hold a stack");
  return join(std::move(parts), d, y);
}

// The output seen with two dimensions for each of its own: which repetition, and where in it.
Kernel repeat(In self, Ints repeats, Out out) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out");
  if (repeats == nullptr) throw Refusal{kNullArgument, "repeats is null"};
  const std::vector<int64_t> &times = repeats->values;
  require(times.size() >= x.shape.size(), "repeats: fewer than the dimensions of self");
  require_dtype(y, "out", x.dtype);
  const size_t added = times.size() - x.shape.size();
  Shape expected, shape, from, to;
  for (size_t d = 0; d < times.size(); d++) expected.push_back(times[d] * (d < added ? 1 : x.shape[d - added]));
  require_shape(y, "out", expected);
  for (size_t d = 0; d < times.size(); d++) {
    const int64_t length = d < added ? 1 : x.shape[d - added];
    shape.insert(shape.end(), {times[d], length});
    from.insert(from.end(), {0, d < added ? 0 : x.strides[d - added]});
    to.insert(to.end(), {y.strides[d] * length, y.strides[d]});
  }
  aclTensor source = x, target = y;
  source.shape = target.shape = shape;
  source.strides = from;
  target.strides = to;
  return copy(target, source);
}

// One class of `out` after another, along the new dimension.
Kernel one_hot(In self, int64_t depth, In on_value, In off_value, int64_t dim, Out out) {
  const aclTensor &x = tensor(self, "self", kIndex | dtypes({ACL_UINT8})), &y = tensor(out, "out");
  const aclTensor &on = tensor(on_value, "onValue"), &off = tensor(off_value, "offValue");
  require(count(on.shape) == 1 && count(off.shape) == 1, "onValue and offValue must have one element");
  require(on.dtype == y.dtype && off.dtype == y.dtype, "onValue and offValue must have the dtype of out");
  const size_t d = axis(dim, x.shape.size() + 1, "axis");
  Shape expected = x.shape;
  expected.insert(expected.begin() + static_cast<ptrdiff_t>(d), depth);
  require_shape(y, "out", expected);
  std::vector<Kernel> classes;
  for (int64_t c = 0; c < depth; c++)
    classes.push_back(map<double, 3>(narrow(y, d, c, 1), {unsqueeze(x, d), on, off}, [c](double v, double a, double b) {
      return v == static_cast<double>(c) ? a : b;
    }));
  return in_turn(std::move(classes));
}

// ---- Select ---------------------------------------------------------------------------------------------------------

// An index checked against the dimension that it selects from, counted from the end when negative.
int64_t checked_index(int64_t index, int64_t size) {
  if (index < -size || index >= size)
    throw DeviceFault("index " + std::to_string(index) + " is out of bounds for a dimension of size " +
                      std::to_string(size));
  return index < 0 ? index + size : index;
}

// f of every element of a view, in row-major order.
template <typename C, typename F>
std::vector<int64_t> read(const aclTensor &view, F f) {
  std::vector<int64_t> values;
  const std::byte *base = resolve(view);
  const auto bytes = static_cast<int64_t>(size_of(view.dtype));
  const Loader<C> load = loader<C>(view.dtype);
  const Space<1> space(view.shape, {view.strides});
  space.each_run([&](const auto &offset, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      C scratch;
      values.push_back(f(*load(base + (offset[0] + i * space.step()[0]) * bytes, 1, 1, &scratch)));
    }
  });
  return values;
}

std::vector<int64_t> read_integers(const aclTensor &view) {
  return read<int64_t>(view, [](int64_t v) { return v; });
}

Shape dense_strides(const Shape &shape) {
  Shape strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

// out[i] = self[i with the strides given, plus table[i]]: what Gather, IndexSelect and Index have in common.
void select(const aclTensor &self, const Shape &self_strides, const std::vector<int64_t> &table,
            const Shape &table_strides, const aclTensor &out) {
  const std::byte *from = resolve(self);
  std::byte *to = resolve(out);
  const size_t bytes = size_of(self.dtype);
  const Space<3> space(out.shape, {out.strides, self_strides, table_strides});
  const auto &step = space.step();
  space.each_run([&](const auto &offset, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      const int64_t source = offset[1] + i * step[1] + table[static_cast<size_t>(offset[2] + i * step[2])];
      std::memcpy(to + (offset[0] + i * step[0]) * int64_t(bytes), from + source * int64_t(bytes), bytes);
    }
  });
}

Kernel gather(In self, int64_t dim, In index, Out out) {
  aclTensor x = tensor(self, "self"), at = tensor(index, "index"), y = tensor(out, "out");
  require_dtype(y, "out", x.dtype);
  require_shape(y, "out", at.shape);
  if (count(at.shape) == 0) return [] {};
  tensor(index, "index", kIndex);
  if (x.shape.empty()) x = unsqueeze(x, 0);
  if (at.shape.empty()) at = unsqueeze(at, 0), y = unsqueeze(y, 0);
  require(at.shape.size() == x.shape.size(),
          "index: shape " + text(at.shape) + " has another rank than " + text(x.shape));
  const size_t d = axis(dim, x.shape.size());
  for (size_t k = 0; k < x.shape.size(); k++)
    require(k == d || at.shape[k] <= x.shape[k], "index: shape " + text(at.shape) + " exceeds " + text(x.shape));
  return [=] {
    std::vector<int64_t> table = read_integers(at);
    for (int64_t &entry : table) entry = checked_index(entry, x.shape[d]) * x.strides[d];
    Shape strides = x.strides;
    strides[d] = 0;
    select(x, strides, table, dense_strides(at.shape), y);
  };
}

enum ScatterMode : int64_t { kReplace = 0, kAdd = 1, kMultiply = 2 };

// The loop of a scatter, in the kernel: `y` is changed where `at` says along `dim`.
template <typename C>
void scatter_into(const aclTensor &y, size_t dim, const aclTensor &at, const aclTensor *src, C number, int64_t mode) {
  const std::vector<int64_t> table = read_integers(at);
  const auto bytes = static_cast<int64_t>(size_of(y.dtype));
  std::byte *to = resolve(y);
  const std::byte *from = src != nullptr ? resolve(*src) : nullptr;
  const Loader<C> load = loader<C>(y.dtype);
  const Storer<C> store = storer<C>(y.dtype);
  Shape strides = y.strides;
  strides[dim] = 0;
  const Space<3> space(at.shape, {strides, src != nullptr ? src->strides : strides, dense_strides(at.shape)});
  space.each_run([&](const auto &offset, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      const auto place = [&](size_t k) { return offset[k] + i * space.step()[k]; };
      const int64_t row = checked_index(table[static_cast<size_t>(place(2))], y.shape[dim]);
      std::byte *target = to + (place(0) + row * y.strides[dim]) * bytes;
      C before, given = number;
      const C held = *load(target, 1, 1, &before);
      if (from != nullptr) given = *load(from + place(1) * bytes, 1, 1, &given);
      const C after = mode == kAdd ? held + given : mode == kMultiply ? held * given : given;
      store(&after, 1, target, 1);
    }
  });
}

// out = self, but for the elements that `index` names along `dim`, which get those of `src`, or the number.
Kernel scatter(In self, int64_t dim, In index, In src, Num number, int64_t mode, Out out) {
  aclTensor x = tensor(self, "self"), at = tensor(index, "index", kIndex), y = tensor(out, "out");
  aclTensor source = number == nullptr ? tensor(src, "src") : aclTensor{};
  const aclScalar given = number == nullptr ? whole(0) : scalar(number, "value");
  require(mode >= kReplace && mode <= kMultiply, "reduce: " + std::to_string(mode) + " is not 0, 1 or 2");
  require_dtype(y, "out", x.dtype);
  require_shape(y, "out", x.shape);
  const Kernel first = copy(y, x);
  if (count(at.shape) == 0) return first;

  require(at.shape.size() == x.shape.size(), "index: of another rank than self");
  if (number == nullptr) {
    require_dtype(source, "src", x.dtype);
    require(source.shape.size() == x.shape.size(), "src: of another rank than self");
  }
  if (x.shape.empty()) {
    for (aclTensor *view : {&at, &source, &y}) *view = unsqueeze(*view, 0);
  }
  const size_t d = axis(dim, y.shape.size());
  for (size_t k = 0; k < y.shape.size(); k++) {
    const bool fits = k == d || at.shape[k] <= y.shape[k];
    require(fits, "index: shape " + text(at.shape) + " exceeds " + text(y.shape));
    require(number != nullptr || at.shape[k] <= source.shape[k],
            "index: shape " + text(at.shape) + " exceeds " + text(source.shape));
  }
  return by_kind(y.dtype, [&](auto c) -> Kernel {
    const auto constant = rounded<decltype(c)>(given, y.dtype);
    return [=, from_tensor = number == nullptr] {
      first();
      scatter_into(y, d, at, from_tensor ? &source : nullptr, constant, mode);
    };
  });
}

Kernel index_select(In self, int64_t dim, In index, Out out) {
  aclTensor x = tensor(self, "self"), y = tensor(out, "out");
  const aclTensor &at = tensor(index, "index", kIndex);
  require_dtype(y, "out", x.dtype);
  require(at.shape.size() <= 1, "index: shape " + text(at.shape) + ", expected one dimension");
  if (x.shape.empty()) x = unsqueeze(x, 0);
  if (y.shape.empty()) y = unsqueeze(y, 0);
  const size_t d = axis(dim, x.shape.size());
  Shape expected = x.shape;
  expected[d] = count(at.shape);
  require_shape(y, "out", expected);
  return [=] {
    std::vector<int64_t> table = read_integers(at);
    for (int64_t &entry : table) entry = checked_index(entry, x.shape[d]) * x.strides[d];
    Shape strides = x.strides, along(x.shape.size(), 0);
    strides[d] = 0;
    along[d] = 1;
    select(x, strides, table, along, y);
  };
}

// self[indices]: torch_npu hands over an index of shape [0] for each dimension that is taken whole.
Kernel index(In self, Tensors indices, Out out) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out");
  require_dtype(y, "out", x.dtype);
  std::vector<aclTensor> chosen;
  std::vector<size_t> dims;
  Shape common;
  for (size_t d = 0; d < list_of(indices).size(); d++) {
    const aclTensor &at = tensor(indices->tensors[d], "indices");
    if (at.shape == Shape{0} && (y.shape.empty() || count(y.shape) != 0)) continue;
    require(in(at.dtype, kIndex), "indices: dtype " + name_of(at.dtype) + " is not simulated");
    common = chosen.empty() ? at.shape : broadcast(common, at.shape);
    chosen.push_back(at);
    dims.push_back(d);
  }
  require(indices->tensors.size() <= x.shape.size(), "indices: more than the dimensions of self");
  require(!chosen.empty(), "indices: none given");
  // The indexed dimensions go where the first one was, or to the front unless they are neighbours.
  const size_t front = dims.back() - dims.front() + 1 == dims.size() ? dims.front() : 0;
  Shape expected, strides, along;
  for (size_t d = 0; d < x.shape.size(); d++) {
    if (std::find(dims.begin(), dims.end(), d) != dims.end()) continue;
    expected.push_back(x.shape[d]);
    strides.push_back(x.strides[d]);
    along.push_back(0);
  }
  const auto insert = [front](Shape &into, const Shape &values) {
    into.insert(into.begin() + static_cast<ptrdiff_t>(front), values.begin(), values.end());
  };
  insert(expected, common);
  insert(strides, Shape(common.size(), 0));
  insert(along, dense_strides(common));
  require_shape(y, "out", expected);
  return [=] {
    std::vector<int64_t> table(static_cast<size_t>(count(common)), 0);
    for (size_t k = 0; k < chosen.size(); k++) {
      aclTensor at = chosen[k];
      at.strides = expand(at, common);
      at.shape = common;
      const std::vector<int64_t> values = read_integers(at);
      for (size_t i = 0; i < table.size(); i++)
        table[i] += checked_index(values[i], x.shape[dims[k]]) * x.strides[dims[k]];
    }
    select(x, strides, table, along, y);
  };
}

// This and the next fill the front of `out` and then report how much of it counts.
Kernel masked_select(In self, In mask, Out out) {
  const aclTensor &x = tensor(self, "self"), &m = tensor(mask, "mask", kBool), &y = tensor(out, "out");
  require_dtype(y, "out", x.dtype);
  const Shape shape = broadcast(x.shape, m.shape);
  require_shape(y, "out", {count(shape)});
  return [=] {
    const std::byte *values = resolve(x), *chosen = resolve(m);
    std::byte *to = resolve(y);
    const auto bytes = static_cast<int64_t>(size_of(x.dtype));
    int64_t found = 0;
    const Space<2> space(shape, {expand(x, shape), expand(m, shape)});
    space.each_run([&](const auto &offset, int64_t n) {
      for (int64_t i = 0; i < n; i++) {
        if (chosen[offset[1] + i * space.step()[1]] == std::byte{0}) continue;
        std::memcpy(to + found++ * y.strides[0] * bytes, values + (offset[0] + i * space.step()[0]) * bytes,
                    static_cast<size_t>(bytes));
      }
    });
    report_shape(out, {found});
  };
}

// The indices of what is not zero: a row each in [found, rank], a column each in [rank, found] when `transposed`.
Kernel nonzero(In self, Out out, bool transposed) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out", dtypes({ACL_INT64}));
  if (count(y.shape) == 0) return [] {};  // so for a scalar, of which torch_npu knows the answer: the shape stays
  const auto rank = static_cast<int64_t>(x.shape.size());
  require_shape(y, "out", transposed ? Shape{rank, count(x.shape)} : Shape{count(x.shape), rank});
  require(y.strides == dense_strides(y.shape), "out: must be contiguous");
  return [=] {
    const std::vector<int64_t> values =
        by_kind(x.dtype, [&](auto c) { return read<decltype(c)>(x, [](auto v) { return int64_t{v != 0}; }); });
    const int64_t found = std::accumulate(values.begin(), values.end(), int64_t{0});
    const Shape places = dense_strides(x.shape);
    std::byte *to = resolve(y);
    int64_t row = 0;
    for (size_t i = 0; i < values.size(); i++) {
      if (values[i] == 0) continue;
      for (int64_t d = 0; d < rank; d++) {
        const auto dim = static_cast<size_t>(d);
        const int64_t position = static_cast<int64_t>(i) / places[dim] % x.shape[dim];
        const int64_t at = transposed ? d * found + row : row * rank + d;
        std::memcpy(to + at * int64_t{8}, &position, sizeof position);
      }
      row++;
    }
    report_shape(out, transposed ? Shape{rank, found} : Shape{found, rank});
  };
}

// ---- Draw -----------------------------------------------------------------------------------------------------------

// A counter-based generator, as the device's Philox is: a draw depends on seed, offset and position alone. (The numbers
// themselves are not those of the device.)
class Draws {
 public:
  Draws(int64_t seed, int64_t offset) : key_(mix(static_cast<uint64_t>(seed) + mix(static_cast<uint64_t>(offset)))) {}

  double uniform(uint64_t position) const {  // in [0, 1), 53 bits
    return static_cast<double>(mix(key_ + position * 0x9e3779b97f4a7c15u) >> 11) * 0x1p-53;
  }
  double normal(uint64_t position) const {  // Box-Muller
    const double radius = std::sqrt(-2 * std::log(1 - uniform(2 * position)));
    return radius * std::cos(6.283185307179586 * uniform(2 * position + 1));
  }

 private:
  static uint64_t mix(uint64_t z) {  // the finalizer of SplitMix64
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  uint64_t key_;
};

// f(draws, position) or f(draws, position, a, b) for every element.
template <size_t N, typename F>
Kernel draw(const aclTensor &out, const std::array<aclTensor, N> &inputs, int64_t seed, int64_t offset, F f) {
  return [=] {
    uint64_t position = 0;
    map<double, N>(out, inputs, [=, at = &position, draws = Draws(seed, offset)](auto... x) {
      return static_cast<double>(f(draws, (*at)++, x...));
    })();
  };
}

Kernel normal(double mean, double std, int64_t seed, int64_t offset, Out out) {
  require(std >= 0, "std is negative");
  return draw<0>(tensor(out, "out", kFloats | kDouble), {}, seed, offset, [=](const Draws &draws, uint64_t position) {
    return mean + std * draws.normal(position);
  });
}

aclTensor fitting(In argument, const char *name, const aclTensor &out) {
  const aclTensor &view = tensor(argument, name, kFloats | kDouble);
  require_fits(view, name, out.shape);
  return view;
}

Kernel normal(In mean, In std, int64_t seed, int64_t offset, Out out) {
  const aclTensor &y = tensor(out, "out", kFloats | kDouble);
  return draw<2>(y, {fitting(mean, "mean", y), fitting(std, "std", y)}, seed, offset,
                 [](const Draws &draws, uint64_t at, double m, double s) { return m + s * draws.normal(at); });
}

Kernel normal(In mean, double std, int64_t seed, int64_t offset, Out out) {
  const aclTensor &y = tensor(out, "out", kFloats | kDouble);
  return draw<1>(y, {fitting(mean, "mean", y)}, seed, offset,
                 [std](const Draws &draws, uint64_t position, double m) { return m + std * draws.normal(position); });
}

Kernel normal(double mean, In std, int64_t seed, int64_t offset, Out out) {
  const aclTensor &y = tensor(out, "out", kFloats | kDouble);
  return draw<1>(y, {fitting(std, "std", y)}, seed, offset,
                 [mean](const Draws &draws, uint64_t position, double s) { return mean + s * draws.normal(position); });
}

Kernel uniform(Out self, double from, double to, int64_t seed, int64_t offset) {
  require(from <= to, "from exceeds to");
  return draw<0>(tensor(self, "selfRef", kFloats | kDouble), {}, seed, offset,
                 [=](const Draws &draws, uint64_t position) { return from + (to - from) * draws.uniform(position); });
}

Kernel bernoulli(Out self, const aclScalar &prob, int64_t seed, int64_t offset) {
  const auto p = value<double>(prob);
  require(p >= 0 && p <= 1, "prob is outside [0, 1]");
  return draw<0>(tensor(self, "selfRef"), {}, seed, offset,
                 [p](const Draws &draws, uint64_t position) { return draws.uniform(position) < p; });
}

Kernel bernoulli(Out self, In prob, int64_t seed, int64_t offset) {
  const aclTensor &y = tensor(self, "selfRef");
  return draw<1>(y, {fitting(prob, "prob", y)}, seed, offset,
                 [](const Draws &draws, uint64_t position, double p) { return draws.uniform(position) < p; });
}

// Draws column numbers of a row (or of each row) of weights by inverting the running sum; without replacement, the
// weight of what was drawn becomes zero.
Kernel multinomial(In self, int64_t samples, bool replacement, int64_t seed, int64_t offset, Out out) {
  const aclTensor &p = tensor(self, "self", kFloats | kDouble), &result = tensor(out, "out", dtypes({ACL_INT64}));
  const bool row = p.shape.size() == 1;
  require(row || p.shape.size() == 2, "self: shape " + text(p.shape) + ", expected one or two dimensions");
  require(samples > 0 && (replacement || samples <= p.shape.back()), "numsamples: " + std::to_string(samples));
  Shape expected = p.shape;
  expected.back() = samples;
  require_shape(result, "out", expected);
  const aclTensor x = row ? unsqueeze(p, 0) : p, y = row ? unsqueeze(result, 0) : result;
  return [=] {
    const Draws draws(seed, offset);
    const int64_t columns = x.shape[1];
    std::vector<double> weights(static_cast<size_t>(columns));
    const std::byte *from = resolve(x);
    std::byte *to = resolve(y);
    for (int64_t r = 0; r < x.shape[0]; r++) {
      const std::byte *start = from + r * x.strides[0] * static_cast<int64_t>(size_of(x.dtype));
      const double *loaded = loader<double>(x.dtype)(start, x.strides[1], columns, weights.data());
      if (loaded != weights.data()) std::copy(loaded, loaded + columns, weights.begin());
      for (int64_t s = 0; s < samples; s++) {
        double total = 0;
        for (double weight : weights) total += weight >= 0 ? weight : std::numeric_limits<double>::quiet_NaN();
        if (!(total > 0) || std::isinf(total)) throw DeviceFault("weights are not a distribution");
        double rest = draws.uniform(static_cast<uint64_t>(r * samples + s)) * total;
        int64_t chosen = -1;
        for (int64_t c = 0; c < columns && (chosen < 0 || rest >= 0); c++) {
          if (weights[static_cast<size_t>(c)] == 0) continue;
          chosen = c;
          rest -= weights[static_cast<size_t>(c)];
        }
        if (!replacement) weights[static_cast<size_t>(chosen)] = 0;
        storer<int64_t>(y.dtype)(&chosen, 1, to + (r * y.strides[0] + s * y.strides[1]) * int64_t{8}, 1);
      }
    }
  };
}

}  // namespace

// ---- The operators --------------------------------------------------------------------------------------------------

ACLNN(aclnnInplaceCopy, (Out self, In source), inplace_copy(self, source))
ACLNN(aclnnCast, (In self, aclDataType dtype, Out out), cast(self, dtype, out))
ACLNN(aclnnInplaceZero, (Out self), fill(self, whole(0)))
ACLNN(aclnnInplaceOne, (Out self), fill(self, whole(1)))
ACLNN(aclnnInplaceFillScalar, (Out self, Num value), fill(self, scalar(value, "value")))
ACLNN(aclnnInplaceFillTensor, (Out self, In value), fill(self, value))
ACLNN(aclnnArange, (Num start, Num end, Num step, Out out), arange(start, end, step, out))
ACLNN(aclnnCat, (Tensors tensors, int64_t dim, Out out), cat(tensors, dim, out))
ACLNN(aclnnStack, (Tensors tensors, int64_t dim, Out out), stack(tensors, dim, out))
ACLNN(aclnnRepeat, (In self, Ints repeats, Out out), repeat(self, repeats, out))
ACLNN(aclnnOneHot, (In self, int64_t depth, In on_value, In off_value, int64_t dim, Out out),
      one_hot(self, depth, on_value, off_value, dim, out))
ACLNN(aclnnGather, (In self, int64_t dim, In index, Out out), gather(self, dim, index, out))
ACLNN(aclnnScatterAdd, (In self, int64_t dim, In index, In src, Out out),
      scatter(self, dim, index, src, nullptr, kAdd, out))
ACLNN(aclnnScatter, (In self, int64_t dim, In index, In src, int64_t mode, Out out),
      scatter(self, dim, index, src, nullptr, mode, out))
ACLNN(aclnnScatterValue, (In self, int64_t dim, In index, Num value, int64_t mode, Out out),
      scatter(self, dim, index, nullptr, &scalar(value, "value"), mode, out))
ACLNN(aclnnInplaceScatter, (Out self, int64_t dim, In index, In src, int64_t mode),
      scatter(self, dim, index, src, nullptr, mode, self))
ACLNN(aclnnInplaceScatterValue, (Out self, int64_t dim, In index, Num value, int64_t mode),
      scatter(self, dim, index, nullptr, &scalar(value, "value"), mode, self))
ACLNN(aclnnIndexSelect, (In self, int64_t dim, In index, Out out), index_select(self, dim, index, out))
ACLNN(aclnnIndex, (In self, Tensors indices, Out out), index(self, indices, out))
ACLNN(aclnnMaskedSelect, (In self, In mask, Out out), masked_select(self, mask, out))
ACLNN(aclnnNonzero, (In self, Out out), nonzero(self, out, false))
ACLNN(aclnnNonzeroV2, (In self, Out out), nonzero(self, out, true))
ACLNN(aclnnInplaceNormal, (Out self, float mean, float std, int64_t seed, int64_t offset),
      normal(double(mean), double(std), seed, offset, self))
ACLNN(aclnnNormalFloatFloat, (float mean, float std, int64_t seed, int64_t offset, Out out),
      normal(double(mean), double(std), seed, offset, out))
ACLNN(aclnnNormalTensorTensor, (In mean, In std, int64_t seed, int64_t offset, Out out),
      normal(mean, std, seed, offset, out))
ACLNN(aclnnNormalTensorFloat, (In mean, float std, int64_t seed, int64_t offset, Out out),
      normal(mean, double(std), seed, offset, out))
ACLNN(aclnnNormalFloatTensor, (float mean, In std, int64_t seed, int64_t offset, Out out),
      normal(double(mean), std, seed, offset, out))
ACLNN(aclnnInplaceUniform, (Out self, double from, double to, uint64_t seed, uint64_t offset),
      uniform(self, from, to, int64_t(seed), int64_t(offset)))
ACLNN(aclnnInplaceBernoulli, (Out self, Num prob, int64_t seed, int64_t offset),
      bernoulli(self, scalar(prob, "prob"), seed, offset))
ACLNN(aclnnInplaceBernoulliTensor, (Out self, In prob, int64_t seed, int64_t offset),
      bernoulli(self, prob, seed, offset))
ACLNN(aclnnMultinomial, (In self, int64_t samples, bool replacement, int64_t seed, int64_t offset, Out out),
      multinomial(self, samples, replacement, seed, offset, out))

}  // namespace opapi
