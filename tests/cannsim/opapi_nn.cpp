// What neural networks are made of: activations and their derivatives, losses, batch normalisation.
//
// As on hardware most of it takes FLOAT, FLOAT16 and BFLOAT16 and computes in float.
#include "opapi.h"

namespace opapi {
namespace {

// ---- Activations ----------------------------------------------------------------------------------------------------

// Unlike std::max and std::min these propagate NaN.
constexpr auto at_least = [](auto x, auto low) { return x != x || x > low ? x : low; };
constexpr auto at_most = [](auto x, auto high) { return x != x || x < high ? x : high; };

constexpr auto silu_of = [](auto x) { return x / (1 + std::exp(-x)); };
constexpr auto mish_of = [](auto x) { return x * std::tanh(std::log1p(std::exp(x))); };
constexpr auto hard_swish_of = [](float x) { return x * at_most(at_least(x + 3, 0.0f), 6.0f) / 6; };
constexpr auto hard_sigmoid_of = [](float x) { return at_most(at_least(x + 3, 0.0f), 6.0f) / 6; };
constexpr auto log_sigmoid_of = [](float x) { return std::min(x, 0.0f) - std::log1p(std::exp(-std::abs(x))); };

// What the kernel Gelu of CANN computes for both values of PyTorch's `approximate`: the approximation by tanh.
constexpr auto gelu_of = [](float x) {
  const double inner = 0.79788456080286535588 * (double(x) + 0.044715 * double(x) * double(x) * double(x));
  return static_cast<float>(0.5 * double(x) * (1 + std::tanh(inner)));
};

Kernel gelu(In self, int64_t approximate, Out out) {
  require(approximate == 0 || approximate == 1, "approximate: " + std::to_string(approximate) + " is neither 0 nor 1");
  if (approximate == 1) return activation(self, out, kFloats, gelu_of);
  return activation(self, out, kFloats, [](auto x) {
    using C = decltype(x);
    return C(0.5) * x * (1 + std::erf(x * C(0.70710678118654752440)));
  });
}

template <typename F>
Kernel on_integers_too(In self, Out out, Dtypes allowed, F f) {
  const aclTensor &x = tensor(self, "self", allowed), &y = tensor(out, "out");
  require_shape(y, "out", x.shape);
  require_dtype(y, "out", x.dtype);
  return by_kind(x.dtype, [&](auto c) { return map<decltype(c), 1>(y, {x}, f); });
}

Kernel relu(In self, Out out) {
  return on_integers_too(self, out, kFloats | dtypes({ACL_INT8, ACL_UINT8, ACL_INT32, ACL_INT64}),
                         [](auto x) { return at_least(x, decltype(x){0}); });
}

Kernel hardtanh(In self, Num min, Num max, Out out) {
  const aclScalar &low = scalar(min, "clipValueMin"), &high = scalar(max, "clipValueMax");
  const aclDataType dtype = tensor(self, "self", kNumbers).dtype;
  return on_integers_too(self, out, kNumbers, [=](auto x) {
    using C = decltype(x);
    return at_most(at_least(x, rounded<C>(low, dtype)), rounded<C>(high, dtype));
  });
}

Kernel threshold(In self, Num limit, Num replacement, Out out) {
  const aclScalar &t = scalar(limit, "threshold"), &v = scalar(replacement, "value");
  return on_integers_too(self, out, kFloats | kInts, [=](auto x) {
    using C = decltype(x);
    return x <= value<C>(t) ? value<C>(v) : x;
  });
}

Kernel hard_sigmoid(In self, Out out) {
  return activation(self, out, kFloats | dtypes({ACL_INT32}), hard_sigmoid_of);
}

Kernel elu(In self, Num alpha, Num scale, Num input_scale, Out out) {
  const auto a = value<double>(scalar(alpha, "alpha")), s = value<double>(scalar(scale, "scale")),
             i = value<double>(scalar(input_scale, "inputScale"));
  return activation(self, out, kFloatsAndDouble, [=](auto x) {
    using C = decltype(x);
    return x > 0 ? x * C(s) : std::expm1(x * C(i)) * C(a * s);
  });
}

Kernel celu(In self, Num alpha, Out out) {
  const auto a = value<float>(scalar(alpha, "alpha"));
  require(a != 0, "alpha is zero");
  return activation(self, out, kFloats, [a](auto x) { return x > 0 ? x : std::expm1(x / a) * a; });
}

Kernel leaky_relu(In self, Num slope, Out out) {
  const auto s = value<double>(scalar(slope, "negativeSlope"));
  return activation(self, out, kFloatsAndDouble, [s](auto x) { return x > 0 ? x : x * decltype(x)(s); });
}

// With `training` the slopes are drawn, which is not simulated.
Kernel rrelu(In self, In noise, Num lower, Num upper, bool training, Out out) {
  require(!training, "training: only evaluation is simulated");
  tensor(noise, "noise", kFloatsAndDouble);
  const auto s = (value<double>(scalar(lower, "lower")) + value<double>(scalar(upper, "upper"))) / 2;
  return activation(self, out, kFloatsAndDouble, [s](auto x) { return x > 0 ? x : x * decltype(x)(s); });
}

Kernel softplus(In self, Num beta, Num limit, Out out) {
  const auto b = value<float>(scalar(beta, "beta")), t = value<float>(scalar(limit, "threshold"));
  return activation(self, out, kFloats, [=](auto x) { return x * b > t ? x : std::log1p(std::exp(x * b)) / b; });
}

Kernel hard_shrink(In self, Num lambd, Out out) {
  const auto l = value<float>(scalar(lambd, "lambd"));
  return activation(self, out, kFloats, [l](auto x) { return x >= -l && x <= l ? 0 : x; });
}

Kernel soft_shrink(In self, Num lambd, Out out) {
  const auto l = value<float>(scalar(lambd, "lambd"));
  require(l >= 0, "lambd is negative");
  return activation(self, out, kFloats, [l](auto x) { return x > l ? x - l : x < -l ? x + l : x * 0; });
}

// CANN leaves `buffer`, which PyTorch hands over empty, as it is.
Kernel log_sigmoid(In self, Out out, Out buffer) {
  tensor(buffer, "buffer", kFloats);
  return activation(self, out, kFloats, log_sigmoid_of);
}

// The first half of `self` times the sigmoid of the second.
Kernel glu(In self, int64_t dim, Out out) {
  const aclTensor &x = tensor(self, "self", kFloatsAndDouble), &y = tensor(out, "out", kFloatsAndDouble);
  require(!x.shape.empty(), "self: a scalar cannot be halved");
  const size_t d = axis(dim, x.shape.size());
  require(x.shape[d] % 2 == 0, "self: shape " + text(x.shape) + " cannot be halved along " + std::to_string(dim));
  const int64_t half = x.shape[d] / 2;
  const aclTensor first = narrow(x, d, 0, half), second = narrow(x, d, half, half);
  require_shape(y, "out", first.shape);
  require_cast(x.dtype, y);
  return by_precision(x.dtype, [&](auto c) {
    return map<decltype(c), 2>(y, {first, second}, [](auto a, auto b) { return a / (1 + std::exp(-b)); });
  });
}

// ---- Derivatives of activations -------------------------------------------------------------------------------------

Kernel tanh_backward(In grad, In output, Out grad_input) {
  const aclTensor &g = tensor(grad, "gradOutput", kFloatsAndDouble), &o = tensor(output, "output"),
                  &y = tensor(grad_input, "gradInput");
  require_dtype(o, "output", g.dtype);
  require_dtype(y, "gradInput", g.dtype);
  require_shape(y, "gradInput", broadcast(g.shape, o.shape));
  return by_precision(g.dtype, [&](auto c) {
    return map<decltype(c), 2>(y, {g, o}, [](auto gradient, auto t) { return gradient * (1 - t * t); });
  });
}

// No gradient where the activation is flat.
Kernel hardtanh_backward(In grad, In self, Num min, Num max, Out out) {
  const auto low = value<float>(scalar(min, "min")), high = value<float>(scalar(max, "max"));
  const aclTensor &g = tensor(grad, "gradOutput", kFloats), &x = tensor(self, "self", kFloats),
                  &y = tensor(out, "out", kFloats);
  require_shape(x, "self", g.shape);
  require_shape(y, "out", g.shape);
  require_cast(promote(g.dtype, x.dtype), y);
  return map<float, 2>(y, {g, x}, [=](float gradient, float v) { return v > low && v < high ? gradient : 0; });
}

Kernel threshold_backward(In grad, In self, Num limit, Out out) {
  constexpr Dtypes allowed = kFloats | dtypes({ACL_INT8, ACL_UINT8, ACL_INT32, ACL_INT64});
  const aclTensor &g = tensor(grad, "gradOutput", allowed), &x = tensor(self, "self"), &y = tensor(out, "out");
  require_dtype(x, "self", g.dtype);
  require_dtype(y, "out", g.dtype);
  require_shape(y, "out", broadcast(g.shape, x.shape));
  return by_kind(g.dtype, [&](auto c) {
    using C = decltype(c);
    return map<C, 2>(y, {g, x}, [t = value<C>(scalar(limit, "threshold"))](C gradient, C input) {
      return input <= t ? C{0} : gradient;
    });
  });
}

// `self_or_result` is the activation's input, or what it made of it in place.
Kernel elu_backward(In grad, Num alpha, Num scale, Num input_scale, bool is_result, In self_or_result, Out out) {
  const auto a = value<float>(scalar(alpha, "alpha")), s = value<float>(scalar(scale, "scale")),
             i = value<float>(scalar(input_scale, "inputScale"));
  const aclTensor &g = tensor(grad, "gradOutput", kFloats), &x = tensor(self_or_result, "selfOrResult"),
                  &y = tensor(out, "gradInput", kFloatsAndDouble);
  require(!is_result || a >= 0, "alpha is negative: the input cannot be told from the result");
  require_dtype(x, "selfOrResult", g.dtype);
  require_shape(x, "selfOrResult", g.shape);
  require_shape(y, "gradInput", g.shape);
  require_cast(g.dtype, y);
  return map<float, 2>(y, {g, x}, [=](float gradient, float v) {
    if (v > 0) return gradient * s;
    return is_result ? gradient * i * (v + a * s) : gradient * i * (a * s) * std::exp(v * i);
  });
}

// ---- Losses ---------------------------------------------------------------------------------------------------------

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

void require_reduction(int64_t reduction) {
  require(reduction >= kNone && reduction <= kSum, "reduction: " + std::to_string(reduction) + " is not 0, 1 or 2");
}

// In the kernel: the sum or the mean of f(elements of each input) over `shape`.
template <typename F, size_t... K>
void write_total(const aclTensor &out, const Shape &shape, const std::vector<aclTensor> &inputs, int64_t reduction, F f,
                 std::index_sequence<K...>) {
  double sum = 0;
  each_block<float>(shape, inputs, [&](const float *const *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum += f(x[K][i]...);
  });
  const auto result = static_cast<float>(reduction == kSum ? sum : sum / static_cast<double>(count(shape)));
  storer<float>(out.dtype)(&result, 1, resolve(out), 1);
}

// The mean or the sum of f(self, target), or each of them.
template <typename F>
Kernel loss(In self, In target, int64_t reduction, Out out, F f) {
  const aclTensor &x = tensor(self, "self", kFloats), &t = tensor(target, "target", kFloats),
                  &y = tensor(out, "out", kFloats);
  require_reduction(reduction);
  require_cast(promote(x.dtype, t.dtype), y);
  const Shape shape = broadcast(x.shape, t.shape);
  require_shape(y, "out", reduction == kNone ? shape : Shape{});
  if (reduction == kNone) return map<float, 2>(y, {x, t}, f);
  return [=] { write_total(y, shape, {x, t}, reduction, f, std::make_index_sequence<2>{}); };
}

// `f` is the derivative of one element's loss with respect to `self`.
template <typename F>
Kernel loss_backward(In grad, In self, In target, int64_t reduction, Out out, F f) {
  const aclTensor &g = tensor(grad, "gradOutput", kFloats), &x = tensor(self, "self", kFloats),
                  &t = tensor(target, "target", kFloats), &y = tensor(out, "out", kFloats);
  require_reduction(reduction);
  require_shape(y, "out", broadcast(g.shape, broadcast(x.shape, t.shape)));
  require_cast(promote(g.dtype, promote(x.dtype, t.dtype)), y);
  const float factor = reduction == kMean ? 1.0f / static_cast<float>(count(y.shape)) : 1.0f;
  return map<float, 3>(y, {g, x, t}, [f, factor](float gradient, float a, float b) {
    return f(a, b) * factor * gradient;
  });
}

constexpr auto squared = [](float a, float b) { return (a - b) * (a - b); };
constexpr auto squared_derivative = [](float a, float b) { return 2 * (a - b); };

// Squared below `beta`, absolute above it.
auto smooth(float beta) {
  require(beta >= 0, "beta is negative");
  return [beta](float a, float b) {
    const float distance = std::abs(a - b);
    return distance < beta ? 0.5f * distance * distance / beta : distance - 0.5f * beta;
  };
}
auto smooth_derivative(float beta) {
  require(beta >= 0, "beta is negative");
  return [beta](float a, float b) {
    const float difference = a - b;
    if (std::abs(difference) < beta) return difference / beta;
    return static_cast<float>((difference > 0) - (difference < 0));
  };
}

float cross_entropy_of(float logit, float label, float of_positives) {
  const float log_weight = (of_positives - 1) * label + 1;
  return (1 - label) * logit - log_weight * log_sigmoid_of(logit);
}

// The weight and that of the positives are 1 where there is none.
Kernel cross_entropy_with_logits(In self, In target, In weight, In pos_weight, int64_t reduction, Out out) {
  const aclTensor &x = tensor(self, "self", kFloats), &t = tensor(target, "target", kFloats),
                  &y = tensor(out, "out", kFloats);
  require_reduction(reduction);
  require_shape(t, "target", x.shape);
  require_shape(y, "out", reduction == kNone ? x.shape : Shape{});
  require(t.dtype == x.dtype && y.dtype == x.dtype, "target and out must have the dtype of self");
  aclTensor w = x, p = x;  // stand-ins, not read, where there is no weight
  if (weight) w = tensor(weight, "weight", kFloats);
  if (pos_weight) p = tensor(pos_weight, "posWeight", kFloats);
  require_fits(w, "weight", x.shape);
  require_fits(p, "posWeight", x.shape);
  const bool weighted = weight != nullptr, positive = pos_weight != nullptr;
  const auto f = [=](float logit, float label, float factor, float of_positives) {
    return cross_entropy_of(logit, label, positive ? of_positives : 1) * (weighted ? factor : 1);
  };
  if (reduction == kNone) return map<float, 4>(y, {x, t, w, p}, f);
  return [=] { write_total(y, x.shape, {x, t, w, p}, reduction, f, std::make_index_sequence<4>{}); };
}

// ---- Batch normalisation --------------------------------------------------------------------------------------------

struct Moments {
  double mean = 0, variance = 0;  // the variance of the batch itself, not the estimate for its population
  int64_t count = 0;
};

Moments moments(const aclTensor &view) {
  Moments found;
  found.count = count(view.shape);
  const auto average = [&](auto f) {
    double sum = 0;
    each_block<float>(view.shape, {view}, [&](const float *const *x, int64_t n) {
      for (int64_t i = 0; i < n; i++) sum += f(double(x[0][i]));
    });
    return sum / static_cast<double>(found.count);
  };
  found.mean = average([](double x) { return x; });
  found.variance = average([&](double x) { return (x - found.mean) * (x - found.mean); });
  return found;
}

float read_element(const aclTensor &vector, int64_t position) {
  float number;
  const std::byte *base = resolve(vector) + position * vector.strides[0] * int64_t(size_of(vector.dtype));
  return *loader<float>(vector.dtype)(base, 1, 1, &number);
}

void write_element(const aclTensor &vector, int64_t position, double number) {
  const auto narrowed = static_cast<float>(number);
  std::byte *base = resolve(vector) + position * vector.strides[0] * int64_t(size_of(vector.dtype));
  storer<float>(vector.dtype)(&narrowed, 1, base, 1);
}

struct BatchNorm {
  aclTensor x, y;
  std::optional<aclTensor> weight, bias, running_mean, running_var, save_mean, save_invstd;
  bool training;
  double momentum, eps;

  void train_channel(int64_t c, Moments *seen) const {
    *seen = moments(narrow(x, 1, c, 1));
    write_element(*save_mean, c, seen->mean);
    write_element(*save_invstd, c, 1 / std::sqrt(seen->variance + eps));
    const auto update = [&](const std::optional<aclTensor> &running, double number) {
      if (running) write_element(*running, c, (1 - momentum) * read_element(*running, c) + momentum * number);
    };
    const auto n = static_cast<double>(seen->count);
    update(running_mean, seen->mean);
    update(running_var, seen->variance * n / (n - 1));
  }

  void operator()() const {
    if (count(x.shape) == 0) return;
    for (int64_t c = 0; c < x.shape[1]; c++) {
      Moments used;
      if (training) train_channel(c, &used);
      else used = {read_element(*running_mean, c), read_element(*running_var, c), 0};
      const double scale = (weight ? read_element(*weight, c) : 1) / std::sqrt(used.variance + eps);
      const double shift = bias ? read_element(*bias, c) : 0;
      map<float, 1>(narrow(y, 1, c, 1), {narrow(x, 1, c, 1)}, [=, mean = used.mean](float v) {
        return static_cast<float>((v - mean) * scale + shift);
      })();
    }
  }
};

Kernel batch_norm(In input, In weight, In bias, Out running_mean, Out running_var, bool training, double momentum,
                  double eps, Out output, Out save_mean, Out save_invstd) {
  const aclTensor &x = tensor(input, "input", kFloats), &y = tensor(output, "output", kFloats);
  require(x.shape.size() >= 2, "input: shape " + text(x.shape) + ", expected two dimensions at least");
  require(x.shape.size() != 5 || x.format == ACL_FORMAT_NCDHW, "input: five dimensions need the format NCDHW");
  require(x.format == y.format, "output: of another storage format than input");
  require_shape(y, "output", x.shape);
  require_cast(x.dtype, y);
  const auto channels = [&](auto argument, const char *name) -> std::optional<aclTensor> {
    if (argument == nullptr) return std::nullopt;
    const aclTensor &vector = tensor(argument, name, kFloats);
    require_shape(vector, name, {x.shape[1]});
    return vector;
  };
  BatchNorm kernel{x, y, channels(weight, "weight"), channels(bias, "bias"), channels(running_mean, "runningMean"),
                   channels(running_var, "runningVar"), {}, {}, training, momentum, eps};
  if (training) {
    if (save_mean == nullptr || save_invstd == nullptr) throw Refusal{kNullArgument, "saveMean or saveInvstd is null"};
    kernel.save_mean = channels(save_mean, "saveMean");
    kernel.save_invstd = channels(save_invstd, "saveInvstd");
  } else {
    require(kernel.running_mean && kernel.running_var, "runningMean and runningVar are needed in evaluation");
  }
  return kernel;
}

}  // namespace

// ---- The operators --------------------------------------------------------------------------------------------------

// aclnnX(self, numbers, out) and aclnnInplaceX(self, numbers)
#define ACTIVATION(NAME, NUMBERS, OUT, ...)                                                            \
  ACLNN(aclnn##NAME, (In self OPAPI_UNPACK NUMBERS, OUT out), __VA_ARGS__)                             \
  ACLNN(aclnnInplace##NAME, (Out self OPAPI_UNPACK NUMBERS), [&](Out out) { return __VA_ARGS__; }(self))

ACTIVATION(Relu, (), Out, relu(self, out))
ACTIVATION(Elu, (, Num alpha, Num scale, Num input_scale), Out, elu(self, alpha, scale, input_scale, out))
ACTIVATION(Celu, (, Num alpha), Out, celu(self, alpha, out))
ACTIVATION(LeakyRelu, (, Num slope), Out, leaky_relu(self, slope, out))
ACTIVATION(Hardtanh, (, Num min, Num max), Out, hardtanh(self, min, max, out))
ACTIVATION(Hardsigmoid, (), Out, hard_sigmoid(self, out))
ACTIVATION(Hardswish, (), Out, activation(self, out, kFloats, hard_swish_of))
ACTIVATION(Mish, (), Out, activation(self, out, kFloats, mish_of))
ACTIVATION(Threshold, (, Num limit, Num number), Out, threshold(self, limit, number, out))
ACLNN(aclnnRReluWithNoise,
      (In self, In noise, Num lower, Num upper, bool training, int64_t, int64_t, Out out),
      rrelu(self, noise, lower, upper, training, out))
ACLNN(aclnnInplaceRReluWithNoise, (Out self, In noise, Num lower, Num upper, bool training, int64_t, int64_t),
      rrelu(self, noise, lower, upper, training, self))
ACLNN(aclnnSilu, (In self, Out out), activation(self, out, kFloats, silu_of))
ACLNN(aclnnGelu, (In self, Out out), gelu(self, 1, out))
ACLNN(aclnnGeluV2, (In self, int64_t approximate, Out out), gelu(self, approximate, out))
ACLNN(aclnnSoftplus, (In self, Num beta, Num limit, Out out), softplus(self, beta, limit, out))
ACLNN(aclnnHardshrink, (In self, Num lambd, Out out), hard_shrink(self, lambd, out))
ACLNN(aclnnSoftshrink, (In self, Num lambd, Out out), soft_shrink(self, lambd, out))
ACLNN(aclnnLogSigmoidForward, (In self, Out out, Out buffer), log_sigmoid(self, out, buffer))
ACLNN(aclnnGlu, (In self, int64_t dim, Out out), glu(self, dim, out))

ACLNN(aclnnTanhBackward, (In grad, In output, Out grad_input), tanh_backward(grad, output, grad_input))
ACLNN(aclnnHardtanhBackward, (In grad, In self, Num min, Num max, Out out),
      hardtanh_backward(grad, self, min, max, out))
ACLNN(aclnnThresholdBackward, (In grad, In self, Num limit, Out out), threshold_backward(grad, self, limit, out))
ACLNN(aclnnEluBackward,
      (In grad, Num alpha, Num scale, Num input_scale, bool is_result, In self_or_result, Out out),
      elu_backward(grad, alpha, scale, input_scale, is_result, self_or_result, out))

ACLNN(aclnnMseLoss, (In self, In target, int64_t reduction, Out out), loss(self, target, reduction, out, squared))
ACLNN(aclnnMseLossBackward, (In grad, In self, In target, int64_t reduction, Out out),
      loss_backward(grad, self, target, reduction, out, squared_derivative))
ACLNN(aclnnSmoothL1Loss, (In self, In target, int64_t reduction, float beta, Out out),
      loss(self, target, reduction, out, smooth(beta)))
ACLNN(aclnnSmoothL1LossBackward, (In grad, In self, In target, int64_t reduction, float beta, Out out),
      loss_backward(grad, self, target, reduction, out, smooth_derivative(beta)))
ACLNN(aclnnBinaryCrossEntropyWithLogits,
      (In self, In target, In weight, In pos_weight, int64_t reduction, Out out),
      cross_entropy_with_logits(self, target, weight, pos_weight, reduction, out))

ACLNN(aclnnBatchNorm,
      (In input, In weight, In bias, Out running_mean, Out running_var, bool training, double momentum, double eps,
       Out output, Out save_mean, Out save_invstd),
      batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, output, save_mean,
                 save_invstd))

}  // namespace opapi
