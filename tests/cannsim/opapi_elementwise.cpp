// Operators that work element by element: arithmetic, comparison, logic, functions of the reals.
//
// `kNumbers` and the like state which dtypes an operator takes on this SoC.
#include "opapi.h"

namespace opapi {
namespace {

// ---- Functions ------------------------------------------------------------------------------------------------------

// Integer overflow wraps, as in PyTorch.
template <typename C, typename F>
C wrapping(C a, C b, F f) {
  if constexpr (std::is_integral_v<C>) return static_cast<C>(f(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
  else return f(a, b);
}
constexpr auto add = [](auto a, auto b) { return wrapping(a, b, [](auto x, auto y) { return x + y; }); };
constexpr auto sub = [](auto a, auto b) { return wrapping(a, b, [](auto x, auto y) { return x - y; }); };
constexpr auto mul = [](auto a, auto b) { return wrapping(a, b, [](auto x, auto y) { return x * y; }); };
constexpr auto neg = [](auto x) { return sub(decltype(x){0}, x); };

// Unlike std::max and std::min these propagate NaN.
constexpr auto maximum = [](auto a, auto b) { return a != a || a > b ? a : b; };
constexpr auto minimum = [](auto a, auto b) { return a != a || a < b ? a : b; };

template <typename C>
void refuse_zero([[maybe_unused]] C divisor) {
  if constexpr (std::is_integral_v<C>)
    if (divisor == 0) throw DeviceFault("integer division by zero");
}

constexpr auto floor_divide = [](auto a, auto b) {
  using C = decltype(a);
  refuse_zero(b);
  if constexpr (std::is_integral_v<C>) {
    if (b == -1) return sub(C{0}, a);  // the quotient of the lowest number would trap
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
  } else {
    if (b == 0) return a / b;
    const C rest = std::fmod(a, b);
    const C quotient = (a - rest) / b - (rest != 0 && (b < 0) != (rest < 0) ? 1 : 0);
    if (quotient == 0) return std::copysign(C{0}, a / b);
    const C below = std::floor(quotient);
    return quotient - below > C{0.5} ? below + 1 : below;
  }
};
constexpr auto fmod = [](auto a, auto b) {
  using C = decltype(a);
  refuse_zero(b);
  if constexpr (std::is_integral_v<C>) return b == -1 ? C{0} : a % b;
  else return std::fmod(a, b);
};
constexpr auto remainder = [](auto a, auto b) {  // takes the sign of the divisor, as in Python
  const auto rest = fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
};
constexpr auto power = [](auto base, auto exponent) {
  using C = decltype(base);
  if constexpr (std::is_integral_v<C>) {
    if (exponent < 0) return base == 1 ? C{1} : base == -1 ? (exponent % 2 ? C{-1} : C{1}) : C{0};
    C result = 1;
    for (; exponent != 0; exponent >>= 1, base = mul(base, base))
      if (exponent & 1) result = mul(result, base);
    return result;
  } else {
    return std::pow(base, exponent);
  }
};

constexpr auto sigmoid = [](auto x) { return 1 / (1 + std::exp(-x)); };

// ---- Shapes of operators --------------------------------------------------------------------------------------------

constexpr int64_t kFloor = 2, kTrunc = 1;  // the rounding modes of DivMod

// `out` has the dtype of `self`.
template <typename F>
Kernel unary(In self, Out out, Dtypes allowed, F f) {
  const aclTensor &x = tensor(self, "self", allowed), &y = tensor(out, "out");
  require_shape(y, "out", x.shape);
  require_dtype(y, "out", x.dtype);
  return by_kind(x.dtype, [&](auto c) { return map<decltype(c), 1>(y, {x}, f); });
}

// A function of the reals: integers become FLOAT.
template <typename F>
Kernel real(In self, Out out, F f) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out");
  require_shape(y, "out", x.shape);
  require_cast(floating(x.dtype), y);
  if (floating(x.dtype) == ACL_DOUBLE) return map<double, 1>(y, {x}, f);
  return map<float, 1>(y, {x}, f);
}

// Whether an element is zero, finite or the like: a double tells that of every dtype.
template <typename F>
Kernel predicate(In self, Out out, Dtypes results, F f) {
  const aclTensor &x = tensor(self, "self"), &y = tensor(out, "out", results);
  require_shape(y, "out", x.shape);
  return map<double, 1>(y, {x}, f);
}

template <typename F>
Kernel logical(In self, In other, Out out, F f) {
  const aclTensor &a = tensor(self, "self"), &b = tensor(other, "other"), &y = tensor(out, "out");
  require_shape(y, "out", broadcast(a.shape, b.shape));
  return map<double, 2>(y, {a, b}, f);
}

// A boolean result is stored in whatever dtype `out` has, so that comparisons work in place.
enum class Result { kPromoted, kReal, kBoolean };

aclDataType result_type(Result result, aclDataType promoted, const aclTensor &out) {
  if (result == Result::kBoolean) return promoted;
  if (result == Result::kReal) promoted = floating(promoted);
  require_cast(promoted, out);
  return promoted;
}

template <Result result = Result::kPromoted, typename F>
Kernel binary(In self, In other, Out out, Dtypes allowed, F f) {
  const aclTensor &a = tensor(self, "self", allowed), &b = tensor(other, "other", allowed), &y = tensor(out, "out");
  require_shape(y, "out", broadcast(a.shape, b.shape));
  return by_kind(result_type(result, promote(a.dtype, b.dtype), y),
                 [&](auto c) { return map<decltype(c), 2>(y, {a, b}, f); });
}

// How an operator of CANN uses a number: as an element of a tensor, rounded to its dtype; the same, but as a FLOAT
// beside BFLOAT16; or as the DOUBLE or INT64 that it is, to which it brings the tensor.
enum class Number { kRounded, kFloatBesideBFloat16, kExact };

aclDataType dtype_of_number(Number number, aclDataType promoted, const aclScalar &scalar) {
  if (number == Number::kExact) return promote(promoted, scalar.dtype);
  return number == Number::kFloatBesideBFloat16 && promoted == ACL_BF16 ? ACL_FLOAT : promoted;
}

template <Result result = Result::kPromoted, Number number = Number::kRounded, typename F>
Kernel with_scalar(In self, Num other, Out out, Dtypes allowed, F f) {
  const aclTensor &a = tensor(self, "self", allowed), &y = tensor(out, "out");
  const aclScalar &b = scalar(other, "other");
  require(in(promote(a, b), allowed), "other: dtype " + name_of(b.dtype) + " beside " + name_of(a.dtype));
  require_shape(y, "out", a.shape);
  const aclDataType dtype = dtype_of_number(number, result_type(result, promote(a, b), y), b);
  return by_kind(dtype, [&](auto c) {
    using C = decltype(c);
    return map<C, 1>(y, {a}, [f, n = rounded<C>(b, dtype)](auto x) { return f(x, n); });
  });
}

// The 1 that PyTorch passes by default is an integer even when the tensors are BOOL.
void require_alpha(const aclScalar &alpha, aclDataType dtype) {
  require(can_cast(alpha.dtype, dtype) || (dtype == ACL_BOOL && !is_floating(alpha.dtype)),
          "alpha: dtype " + name_of(alpha.dtype) + " beside " + name_of(dtype));
}

// self + alpha * other and its like. `f` gets the product.
template <typename F>
Kernel scaled(In self, In other, Num alpha, Out out, Dtypes allowed, F f) {
  const aclScalar &factor = scalar(alpha, "alpha");
  const aclTensor &a = tensor(self, "self", allowed), &b = tensor(other, "other", allowed);
  require_alpha(factor, promote(a.dtype, b.dtype));
  return binary(self, other, out, allowed, [f, factor](auto x, auto y) {
    return f(x, mul(value<decltype(y)>(factor), y));
  });
}

template <typename F>
Kernel scaled(In self, Num other, Num alpha, Out out, Dtypes allowed, F f) {
  const aclScalar &factor = scalar(alpha, "alpha");
  require_alpha(factor, promote(tensor(self, "self", allowed), scalar(other, "other")));
  return with_scalar(self, other, out, allowed, [f, factor](auto x, auto y) {
    return f(x, mul(value<decltype(y)>(factor), y));
  });
}

void require_rounding(int64_t mode) {
  require(mode == kTrunc || mode == kFloor, "mode: " + std::to_string(mode) + " is neither 1 (trunc) nor 2 (floor)");
}

// Rounding towards zero divides in FLOAT16, BFLOAT16 or, whatever else the operands are, FLOAT, and rounds the quotient
// twice: to that dtype and to a whole number.
auto truncated_quotient(aclDataType dtype) {
  const auto [load, store] = std::pair(loader<float>(dtype), storer<float>(dtype));
  return [load = load, store = store](float a, float b) {
    const float quotient = a / b;
    alignas(float) std::byte stored[sizeof(float)];
    float scratch;
    store(&quotient, 1, stored, 1);
    return std::trunc(*load(stored, 1, 1, &scratch));
  };
}

aclDataType dtype_of_quotient(aclDataType dtype) { return in(dtype, kFloats) ? dtype : ACL_FLOAT; }

Kernel divide_trunc(In self, In other, Out out) {
  const aclTensor &a = tensor(self, "self", kNumbers), &b = tensor(other, "other", kNumbers), &y = tensor(out, "out");
  require_shape(y, "out", broadcast(a.shape, b.shape));
  const aclDataType dtype = promote(a.dtype, b.dtype);
  require_cast(dtype, y);
  return map<float, 2>(y, {a, b}, truncated_quotient(dtype_of_quotient(dtype)));
}

Kernel divide_trunc(In self, Num other, Out out) {
  const aclTensor &a = tensor(self, "self", kNumbers), &y = tensor(out, "out");
  const aclScalar &b = scalar(other, "other");
  require_shape(y, "out", a.shape);
  require_cast(promote(a, b), y);
  const aclDataType dtype = dtype_of_quotient(a.dtype);
  return map<float, 1>(y, {a}, [f = truncated_quotient(dtype), n = rounded<float>(b, dtype)](float x) {
    return f(x, n);
  });
}

constexpr auto divide = [](auto a, auto b) { return a / b; };
constexpr Result kPromoted = Result::kPromoted, kReal = Result::kReal, kBoolean = Result::kBoolean;
constexpr Number kRounded = Number::kRounded, kWide = Number::kFloatBesideBFloat16, kExact = Number::kExact;

Kernel div_mod(In self, In other, int64_t mode, Out out) {
  if (mode == 0) return binary<kReal>(self, other, out, kAll, divide);
  require_rounding(mode);
  if (mode == kFloor) return binary(self, other, out, kNumbers, floor_divide);
  return divide_trunc(self, other, out);
}

Kernel div_mods(In self, Num other, int64_t mode, Out out) {
  if (mode == 0) return with_scalar<kReal, kWide>(self, other, out, kAll, divide);
  require_rounding(mode);
  if (mode == kFloor) return with_scalar<kPromoted, kExact>(self, other, out, kNumbers, floor_divide);
  return divide_trunc(self, other, out);
}

// NaN bounds make every element NaN. A missing bound is no bound.
Kernel clamp(In self, Num min, Num max, Out out) {
  require(min != nullptr || max != nullptr, "min and max are both null");
  if (max == nullptr) return with_scalar(self, min, out, kNumbers, maximum);
  if (min == nullptr) return with_scalar(self, max, out, kNumbers, minimum);
  const aclTensor &x = tensor(self, "self", kNumbers), &y = tensor(out, "out", kNumbers);
  const aclScalar &low = scalar(min, "min"), &high = scalar(max, "max");
  require_shape(y, "out", x.shape);
  aclTensor widened = x;  // torch.result_type of all three
  widened.dtype = promote(x, low);
  widened.dtype = promote(widened, high);
  const aclDataType dtype = widened.dtype;
  require_cast(dtype, y);
  return by_kind(dtype, [&](auto c) {
    using C = decltype(c);
    return map<C, 1>(y, {x}, [low = rounded<C>(low, dtype), high = rounded<C>(high, dtype)](C v) {
      return minimum(maximum(v, low), high);
    });
  });
}

Kernel clamp(In self, In min, In max, Out out) {
  require(min != nullptr || max != nullptr, "min and max are both null");
  if (max == nullptr) return binary(self, min, out, kNumbers, maximum);
  if (min == nullptr) return binary(self, max, out, kNumbers, minimum);
  const aclTensor &x = tensor(self, "self", kNumbers), &low = tensor(min, "min", kNumbers),
                  &high = tensor(max, "max", kNumbers), &y = tensor(out, "out", kNumbers);
  require_shape(y, "out", broadcast(x.shape, broadcast(low.shape, high.shape)));
  const aclDataType dtype = promote(x.dtype, promote(low.dtype, high.dtype));
  require_cast(dtype, y);
  return by_kind(dtype, [&](auto c) {
    return map<decltype(c), 3>(y, {x, low, high},
                               [](auto v, auto lowest, auto highest) { return minimum(maximum(v, lowest), highest); });
  });
}

constexpr auto is_zero = [](double x) { return x == 0; };
constexpr auto both_hold = [](double a, double b) { return a != 0 && b != 0; };
constexpr auto one_holds = [](double a, double b) { return a != 0 || b != 0; };
constexpr auto they_differ = [](double a, double b) { return (a != 0) != (b != 0); };

constexpr Dtypes kBits = kInts | kBool;

Kernel bitwise_not(In self, Out out) {
  const aclTensor &x = tensor(self, "self", kBits), &y = tensor(out, "out");
  require_shape(y, "out", x.shape);
  require_dtype(y, "out", x.dtype);
  return map<int64_t, 1>(y, {x}, [flag = x.dtype == ACL_BOOL](int64_t v) { return flag ? v == 0 : ~v; });
}

template <typename F>
Kernel bitwise(In self, In other, Out out, F f) {
  const aclTensor &a = tensor(self, "self", kBits), &b = tensor(other, "other", kBits), &y = tensor(out, "out");
  require_shape(y, "out", broadcast(a.shape, b.shape));
  require_cast(promote(a.dtype, b.dtype), y);
  return map<int64_t, 2>(y, {a, b}, f);
}

template <typename F>
Kernel bitwise(In self, Num other, Out out, F f) {
  const aclTensor &a = tensor(self, "self", kBits), &y = tensor(out, "out");
  const aclScalar &b = scalar(other, "other");
  require(in(b.dtype, kBits), "other: dtype " + name_of(b.dtype) + " beside " + name_of(a.dtype));
  require_shape(y, "out", a.shape);
  require_cast(promote(a, b), y);
  return map<int64_t, 1>(y, {a}, [f, n = rounded<int64_t>(b, promote(a, b))](int64_t v) { return f(v, n); });
}
constexpr auto bit_and = [](int64_t a, int64_t b) { return a & b; };
constexpr auto bit_or = [](int64_t a, int64_t b) { return a | b; };
constexpr auto bit_xor = [](int64_t a, int64_t b) { return a ^ b; };

// self + number * (tensor1 * tensor2) and the like.
template <typename F>
Kernel combine(In self, In tensor1, In tensor2, Num number, Out out, Dtypes allowed, F f) {
  const aclTensor &x = tensor(self, "self", allowed), &a = tensor(tensor1, "tensor1", allowed),
                  &b = tensor(tensor2, "tensor2", allowed), &y = tensor(out, "out");
  const aclScalar &factor = scalar(number, "value");
  require_shape(y, "out", broadcast(x.shape, broadcast(a.shape, b.shape)));
  const aclDataType dtype = promote(x.dtype, promote(a.dtype, b.dtype));
  require_cast(dtype, y);
  return by_kind(dtype, [&](auto c) {
    using C = decltype(c);
    return map<C, 3>(y, {x, a, b}, [f, n = value<C>(factor)](C u, C v, C w) { return f(u, v, w, n); });
  });
}
constexpr auto addcmul = [](auto x, auto a, auto b, auto number) { return x + number * (a * b); };
constexpr auto addcdiv = [](auto x, auto a, auto b, auto number) { return x + number * (a / b); };

Kernel is_close(In self, In other, double rtol, double atol, bool equal_nan, Out out) {
  return binary<kBoolean>(self, other, out, kAll, [=](auto a, auto b) {
    if (a == b || (equal_nan && a != a && b != b)) return true;
    const double difference = std::abs(static_cast<double>(a) - static_cast<double>(b));
    return std::isfinite(difference) && difference <= atol + std::abs(rtol * static_cast<double>(b));
  });
}

Kernel where(In condition, In self, In other, Out out) {
  const aclTensor &c = tensor(condition, "condition", kBool | dtypes({ACL_UINT8})), &a = tensor(self, "self"),
                  &b = tensor(other, "other"), &y = tensor(out, "out");
  require_shape(y, "out", broadcast(c.shape, broadcast(a.shape, b.shape)));
  const aclDataType dtype = promote(a.dtype, b.dtype);
  require_dtype(y, "out", dtype);
  return by_kind(dtype, [&](auto k) {
    return map<decltype(k), 3>(y, {c, a, b}, [](auto chosen, auto x, auto z) { return chosen != 0 ? x : z; });
  });
}

constexpr Dtypes kFilled = kFloats | kBool | dtypes({ACL_INT8, ACL_INT32, ACL_INT64});

Kernel masked_fill(Out self, In mask, const aclScalar &number) {
  const aclTensor &x = tensor(self, "self", kFilled), &m = tensor(mask, "mask", kBool);
  require_fits(m, "mask", x.shape);
  return by_kind(x.dtype, [&](auto c) {
    using C = decltype(c);
    return map<C, 2>(x, {x, m}, [v = rounded<C>(number, x.dtype)](C old, C chosen) { return chosen != 0 ? v : old; });
  });
}

Kernel masked_fill(Out self, In mask, In number) {
  const aclTensor &x = tensor(self, "self", kFilled), &m = tensor(mask, "mask", kBool),
                  &v = tensor(number, "value", kFilled);
  require_fits(m, "mask", x.shape);
  require_shape(v, "value", {});
  return by_kind(x.dtype, [&](auto c) {
    return map<decltype(c), 3>(x, {x, m, v}, [](auto old, auto chosen, auto n) { return chosen != 0 ? n : old; });
  });
}

}  // namespace

// ---- The operators --------------------------------------------------------------------------------------------------

// The function gets a name, so that all forms of an operator are instantiated from one type.

#define UNARY(NAME, ALLOWED, F) ACLNN(aclnn##NAME, (In self, Out out), unary(self, out, ALLOWED, F))

// aclnnX(self, out) and aclnnInplaceX(self)
#define REAL(NAME, ...)                                                      \
  constexpr auto NAME##Function = __VA_ARGS__;                               \
  ACLNN(aclnn##NAME, (In self, Out out), real(self, out, NAME##Function))    \
  ACLNN(aclnnInplace##NAME, (Out self), real(self, self, NAME##Function))
#define ROUNDING(NAME, ...)                                                                            \
  constexpr auto NAME##Function = __VA_ARGS__;                                                         \
  ACLNN(aclnn##NAME, (In self, Out out), activation(self, out, kFloatsAndDouble, NAME##Function))      \
  ACLNN(aclnnInplace##NAME, (Out self), activation(self, self, kFloatsAndDouble, NAME##Function))

// A tensor and a tensor, a tensor and a number, and both in place, named aclnnX<TENSOR> and aclnnX<SCALAR>.
#define BINARY(NAME, TENSOR, SCALAR, RESULT, NUMBER, ALLOWED, ...)                                                    \
  constexpr auto NAME##Function = __VA_ARGS__;                                                                        \
  ACLNN(aclnn##NAME##TENSOR, (In self, In other, Out out),                                                            \
        binary<RESULT>(self, other, out, ALLOWED, NAME##Function))                                                    \
  ACLNN(aclnn##NAME##SCALAR, (In self, Num other, Out out),                                                           \
        with_scalar<RESULT, NUMBER>(self, other, out, ALLOWED, NAME##Function))                                       \
  ACLNN(aclnnInplace##NAME##TENSOR, (Out self, In other),                                                             \
        binary<RESULT>(self, other, self, ALLOWED, NAME##Function))                                                   \
  ACLNN(aclnnInplace##NAME##SCALAR, (Out self, Num other),                                                            \
        with_scalar<RESULT, NUMBER>(self, other, self, ALLOWED, NAME##Function))
#define SCALED(NAME, ALLOWED, F)                                                                                      \
  ACLNN(aclnn##NAME, (In self, In other, Num alpha, Out out), scaled(self, other, alpha, out, ALLOWED, F))            \
  ACLNN(aclnn##NAME##s, (In self, Num other, Num alpha, Out out), scaled(self, other, alpha, out, ALLOWED, F))        \
  ACLNN(aclnnInplace##NAME, (Out self, In other, Num alpha), scaled(self, other, alpha, self, ALLOWED, F))            \
  ACLNN(aclnnInplace##NAME##s, (Out self, Num other, Num alpha), scaled(self, other, alpha, self, ALLOWED, F))

SCALED(Add, kAll, add)
SCALED(Sub, kNumbers, sub)
BINARY(Mul, , s, kPromoted, kWide, kAll, mul)
BINARY(Div, , s, kReal, kWide, kAll, divide)
BINARY(FloorDivide, , s, kPromoted, kExact, kNumbers, floor_divide)
ACLNN(aclnnDivMod, (In self, In other, int mode, Out out), div_mod(self, other, mode, out))
ACLNN(aclnnDivMods, (In self, Num other, int mode, Out out), div_mods(self, other, mode, out))
ACLNN(aclnnInplaceDivMod, (Out self, In other, int mode), div_mod(self, other, mode, self))
ACLNN(aclnnInplaceDivMods, (Out self, Num other, int mode), div_mods(self, other, mode, self))
BINARY(Fmod, Tensor, Scalar, kPromoted, kExact, kNumbers, fmod)
BINARY(Remainder, TensorTensor, TensorScalar, kPromoted, kRounded, kNumbers, remainder)
BINARY(Pow, TensorTensor, TensorScalar, kPromoted, kRounded, kNumbers, power)
ACLNN(aclnnAddV3, (Num self, In other, Num alpha, Out out),
      with_scalar(other, self, out, kAll, [f = scalar(alpha, "alpha")](auto x, auto y) {
        return add(y, mul(value<decltype(x)>(f), x));
      }))
ACLNN(aclnnRsubs, (In self, Num other, Num alpha, Out out),
      with_scalar(self, other, out, kNumbers, [f = scalar(alpha, "alpha")](auto x, auto y) {
        return sub(y, mul(value<decltype(x)>(f), x));
      }))
ACLNN(aclnnRsub, (In self, In other, Num alpha, Out out), scaled(other, self, alpha, out, kNumbers, sub))
ACLNN(aclnnRemainderScalarTensor, (Num self, In other, Out out),
      with_scalar(other, self, out, kNumbers, [](auto x, auto y) { return remainder(y, x); }))
ACLNN(aclnnPowScalarTensor, (Num self, In other, Out out),
      with_scalar(other, self, out, kNumbers, [](auto x, auto y) { return power(y, x); }))
ACLNN(aclnnMaximum, (In self, In other, Out out), binary(self, other, out, kAll, maximum))
ACLNN(aclnnMinimum, (In self, In other, Out out), binary(self, other, out, kAll, minimum))

ACLNN(aclnnClamp, (In self, Num min, Num max, Out out), clamp(self, min, max, out))
ACLNN(aclnnClampMin, (In self, Num min, Out out), clamp(self, min, nullptr, out))
ACLNN(aclnnClampMax, (In self, Num max, Out out), clamp(self, nullptr, max, out))
ACLNN(aclnnInplaceClampMax, (Out self, Num max), clamp(self, nullptr, max, self))
ACLNN(aclnnClampTensor, (In self, In min, In max, Out out), clamp(self, min, max, out))
ACLNN(aclnnClampMinTensor, (In self, In min, Out out), clamp(self, min, nullptr, out))
ACLNN(aclnnClampMaxTensor, (In self, In max, Out out), clamp(self, nullptr, max, out))
ACLNN(aclnnInplaceClampMinTensor, (Out self, In min), clamp(self, min, nullptr, self))
ACLNN(aclnnInplaceClampMaxTensor, (Out self, In max), clamp(self, nullptr, max, self))

BINARY(Eq, Tensor, Scalar, kBoolean, kRounded, kAll, [](auto a, auto b) { return a == b; })
BINARY(Ne, Tensor, Scalar, kBoolean, kRounded, kAll, [](auto a, auto b) { return a != b; })
BINARY(Lt, Tensor, Scalar, kBoolean, kRounded, kAll, [](auto a, auto b) { return a < b; })
BINARY(Le, Tensor, Scalar, kBoolean, kRounded, kAll, [](auto a, auto b) { return a <= b; })
BINARY(Gt, Tensor, Scalar, kBoolean, kRounded, kAll, [](auto a, auto b) { return a > b; })
BINARY(Ge, Tensor, Scalar, kBoolean, kRounded, kAll, [](auto a, auto b) { return a >= b; })
#define BITWISE(NAME, F)                                                                                      \
  ACLNN(aclnn##NAME##Tensor, (In self, In other, Out out), bitwise(self, other, out, F))                              \
  ACLNN(aclnn##NAME##Scalar, (In self, Num other, Out out), bitwise(self, other, out, F))
#define BITWISE_IN_PLACE(NAME, F)                                                                                     \
  ACLNN(aclnnInplace##NAME##Tensor, (Out self, In other), bitwise(self, other, self, F))                              \
  ACLNN(aclnnInplace##NAME##Scalar, (Out self, Num other), bitwise(self, other, self, F))
BITWISE(BitwiseAnd, bit_and)
BITWISE(BitwiseOr, bit_or)
BITWISE(BitwiseXor, bit_xor)
BITWISE_IN_PLACE(BitwiseAnd, bit_and)
BITWISE_IN_PLACE(BitwiseXor, bit_xor)
ACLNN(aclnnBitwiseNot, (In self, Out out), bitwise_not(self, out))

ACLNN(aclnnLogicalAnd, (In self, In other, Out out), logical(self, other, out, both_hold))
ACLNN(aclnnInplaceLogicalAnd, (Out self, In other), logical(self, other, self, both_hold))
ACLNN(aclnnLogicalOr, (In self, In other, Out out), logical(self, other, out, one_holds))
ACLNN(aclnnInplaceLogicalOr, (Out self, In other), logical(self, other, self, one_holds))
ACLNN(aclnnLogicalXor, (In self, In other, Out out), logical(self, other, out, they_differ))
ACLNN(aclnnLogicalNot, (In self, Out out), predicate(self, out, kAll, is_zero))
ACLNN(aclnnInplaceLogicalNot, (Out self), predicate(self, self, kAll, is_zero))
ACLNN(aclnnIsFinite, (In self, Out out), predicate(self, out, kBool, [](double x) { return std::isfinite(x); }))
ACLNN(aclnnIsClose, (In self, In other, double rtol, double atol, bool equal_nan, Out out),
      is_close(self, other, rtol, atol, equal_nan, out))

UNARY(Neg, kNumbers, neg)
UNARY(Abs, kNumbers, [](auto x) { return x < 0 ? neg(x) : x == 0 ? decltype(x){0} : x; })
ROUNDING(Ceil, [](auto x) { return std::ceil(x); })
ROUNDING(Floor, [](auto x) { return std::floor(x); })
ACLNN(aclnnTrunc, (In self, Out out), activation(self, out, kFloatsAndDouble, [](auto x) { return std::trunc(x); }))
UNARY(Round, kFloats | kDouble | kInts, [](auto x) { return std::nearbyint(x); })  // ties to even
UNARY(Sign, kAll, [](auto x) { return (x > 0) - (x < 0); })

REAL(Exp, [](auto x) { return std::exp(x); })
REAL(Expm1, [](auto x) { return std::expm1(x); })
REAL(Log, [](auto x) { return std::log(x); })
REAL(Log1p, [](auto x) { return std::log1p(x); })
REAL(Sqrt, [](auto x) { return std::sqrt(x); })
REAL(Rsqrt, [](auto x) { return 1 / std::sqrt(x); })
REAL(Reciprocal, [](auto x) { return 1 / x; })
REAL(Sin, [](auto x) { return std::sin(x); })
REAL(Cos, [](auto x) { return std::cos(x); })
REAL(Erf, [](auto x) { return std::erf(x); })
REAL(Tanh, [](auto x) { return std::tanh(x); })
REAL(Atanh, [](auto x) { return std::atanh(x); })
REAL(Sigmoid, sigmoid)

ACLNN(aclnnAddcmul, (In self, In tensor1, In tensor2, Num number, Out out),
      combine(self, tensor1, tensor2, number, out, kNumbers, addcmul))
ACLNN(aclnnInplaceAddcmul, (Out self, In tensor1, In tensor2, Num number),
      combine(self, tensor1, tensor2, number, self, kNumbers, addcmul))
ACLNN(aclnnAddcdiv, (In self, In tensor1, In tensor2, Num number, Out out),
      combine(self, tensor1, tensor2, number, out, kFloatsAndDouble, addcdiv))
ACLNN(aclnnInplaceAddcdiv, (Out self, In tensor1, In tensor2, Num number),
      combine(self, tensor1, tensor2, number, self, kFloatsAndDouble, addcdiv))
ACLNN(aclnnSWhere, (In condition, In self, In other, Out out), where(condition, self, other, out))
ACLNN(aclnnInplaceMaskedFillScalar, (Out self, In mask, Num value), masked_fill(self, mask, scalar(value, "value")))
ACLNN(aclnnInplaceMaskedFillTensor, (Out self, In mask, In value), masked_fill(self, mask, value))

}  // namespace opapi
