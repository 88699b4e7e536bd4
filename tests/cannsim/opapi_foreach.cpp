// Operators on lists of tensors: what torch.optim launches once for all parameters.
#include "opapi.h"

namespace opapi {
namespace {

constexpr Dtypes kFloatsAndInt32 = kFloats | dtypes({ACL_INT32});

using Views = std::vector<aclTensor>;

// The tensors of a list, all of them of one dtype.
Views views(Tensors list, const char *name, Dtypes allowed) {
  if (list == nullptr) throw Refusal{kNullArgument, std::string(name) + " is null"};
  require(!list->tensors.empty(), std::string(name) + ": empty list");
  Views result;
  for (In element : list->tensors) {
    result.push_back(tensor(element, name, allowed));
    require_dtype(result.back(), name, result.front().dtype);
  }
  return result;
}

// Another list, that has a tensor of the same dtype and shape for each of `model`.
Views like(const Views &model, Tensors list, const char *name) {
  const Views result = views(list, name, kAll);
  require(result.size() == model.size(), std::string(name) + ": " + std::to_string(result.size()) +
                                             " tensors, expected " + std::to_string(model.size()));
  for (size_t i = 0; i < model.size(); i++) {
    require_dtype(result[i], name, model[i].dtype);
    require_shape(result[i], name, model[i].shape);
  }
  return result;
}

// The same for the list that the kernel writes.
Views outputs_like(const Views &model, Tensors list) {
  Views result = like(model, list, "out");
  for (const aclTensor &output : result) writes(output);
  return result;
}

// Which dtypes a number may have beside tensors of `dtype`.
float number_beside(aclDataType dtype, const aclScalar &number, const char *name) {
  Dtypes allowed = dtypes({ACL_FLOAT, ACL_DOUBLE});
  if (dtype == ACL_FLOAT16) allowed = dtypes({ACL_FLOAT16, ACL_DOUBLE});
  if (dtype == ACL_INT32) allowed = dtypes({ACL_INT32, ACL_INT64});
  require(in(number.dtype, allowed),
          std::string(name) + ": dtype " + name_of(number.dtype) + " beside " + name_of(dtype));
  return value<float>(number);
}

template <typename C, size_t N, typename F>
Kernel for_each(const Views &out, const std::array<Views, N> &inputs, F f) {
  std::vector<Kernel> kernels;
  for (size_t i = 0; i < out.size(); i++) {
    std::array<aclTensor, N> operands;
    for (size_t k = 0; k < N; k++) operands[k] = inputs[k][i];
    kernels.push_back(map<C, N>(out[i], operands, f));
  }
  return in_turn(std::move(kernels));
}

template <typename F>
Kernel with_scalar(Tensors x, Num number, Tensors out, F f) {
  const Views a = views(x, "x", kFloatsAndInt32), y = outputs_like(a, out);
  const aclDataType dtype = a.front().dtype;
  const aclScalar &s = scalar(number, "scalar");
  const float b = number_beside(dtype, s, "scalar");
  if (dtype != ACL_INT32) return for_each<float, 1>(y, {a}, [f, b](float v) { return f(v, b); });
  return for_each<int64_t, 1>(y, {a}, [f, b = value<int64_t>(s)](int64_t v) { return f(v, b); });
}

// f(x1, x2, x3, number) for lists of floating tensors.
template <typename F>
Kernel combined(Tensors x1, Tensors x2, Tensors x3, Num number, Tensors out, F f) {
  const Views a = views(x1, "x1", kFloats), b = like(a, x2, "x2"), c = like(a, x3, "x3"), y = outputs_like(a, out);
  const float s = number_beside(a.front().dtype, scalar(number, "scalar"), "scalar");
  return for_each<float, 3>(y, {a, b, c}, [f, s](float u, float v, float w) { return f(u, v, w, s); });
}

Kernel lerp(Tensors x1, Tensors x2, Num weight, Tensors out) {
  const Views a = views(x1, "x1", kFloats), b = like(a, x2, "x2"), y = outputs_like(a, out);
  const aclScalar &number = scalar(weight, "weight");
  require(in(number.dtype, dtypes({ACL_FLOAT, ACL_DOUBLE})), "weight: dtype " + name_of(number.dtype));
  const auto w = value<float>(number);
  return for_each<float, 2>(y, {a, b}, [w](float u, float v) {
    return std::abs(w) < 0.5f ? u + w * (v - u) : v - (v - u) * (1 - w);
  });
}

// An element of a vector, as a scalar.
aclTensor element(aclTensor vector, int64_t position) {
  vector.offset += position * vector.strides[0];
  vector.shape.clear();
  vector.strides.clear();
  return vector;
}

// One element of `scalars`, which is in device memory, for each tensor.
Kernel addcdiv_list(Tensors x1, Tensors x2, Tensors x3, In scalars, Tensors out) {
  const Views a = views(x1, "x1", kFloats), b = like(a, x2, "x2"), c = like(a, x3, "x3"), y = outputs_like(a, out);
  const aclTensor &s = tensor(scalars, "scalars", kFloats);
  require_shape(s, "scalars", {static_cast<int64_t>(a.size())});
  std::vector<Kernel> kernels;
  for (size_t i = 0; i < y.size(); i++)
    kernels.push_back(map<float, 4>(y[i], {a[i], b[i], c[i], element(s, static_cast<int64_t>(i))},
                                    [](float u, float v, float w, float factor) { return u + factor * (v / w); }));
  return in_turn(std::move(kernels));
}

Kernel div_list(Tensors x, Nums scalars, Tensors out) {
  const Views a = views(x, "x", kFloats), y = outputs_like(a, out);
  if (scalars == nullptr) throw Refusal{kNullArgument, "scalars is null"};
  require(scalars->scalars.size() == a.size(), "scalars: one for each tensor expected");
  std::vector<Kernel> kernels;
  for (size_t i = 0; i < y.size(); i++) {
    const aclScalar &number = scalars->scalars[i];
    require(is_floating(number.dtype), "scalars: dtype " + name_of(number.dtype));
    kernels.push_back(map<float, 1>(y[i], {a[i]}, [d = value<float>(number)](float v) { return v / d; }));
  }
  return in_turn(std::move(kernels));
}

Kernel sqrt(Tensors x, Tensors out) {
  const Views a = views(x, "x", kFloats);
  return for_each<float, 1>(outputs_like(a, out), {a}, [](float v) { return std::sqrt(v); });
}

Kernel norm(Tensors x, Num order, Tensors out) {
  const Views a = views(x, "x", kFloats), y = views(out, "out", kFloats);
  const aclScalar &number = scalar(order, "scalar");
  require(in(number.dtype, dtypes({ACL_FLOAT, ACL_DOUBLE, ACL_INT64})), "scalar: dtype " + name_of(number.dtype));
  const auto p = value<double>(number);
  require(p == 1 || p == 2, "scalar: only the norms 1 and 2 are simulated");
  require(y.size() == a.size(), "out: one tensor for each of x expected");
  for (const aclTensor &result : y) {
    require_dtype(result, "out", a.front().dtype);
    writes(result);
    require(count(result.shape) == 1, "out: shape " + text(result.shape) + ", expected one element");
  }
  return [=] {
    for (size_t i = 0; i < a.size(); i++) {
      double sum = 0;
      each_block<float>(a[i].shape, {a[i]}, [&](const float *const *block, int64_t n) {
        for (int64_t k = 0; k < n; k++) {
          const double element = block[0][k];
          sum += p == 1 ? std::abs(element) : element * element;
        }
      });
      const auto result = static_cast<float>(p == 1 ? sum : std::sqrt(sum));
      storer<float>(y[i].dtype)(&result, 1, resolve(y[i]), 1);
    }
  };
}

constexpr auto addcmul = [](float x, float a, float b, float factor) { return x + factor * (a * b); };
constexpr auto addcdiv = [](float x, float a, float b, float factor) { return x + factor * (a / b); };

}  // namespace

// ---- The operators --------------------------------------------------------------------------------------------------

ACLNN(aclnnForeachAddScalarV2, (Tensors x, Num number, Tensors out),
      with_scalar(x, number, out, [](auto a, auto b) { return a + b; }))
ACLNN(aclnnForeachMulScalarV2, (Tensors x, Num number, Tensors out),
      with_scalar(x, number, out, [](auto a, auto b) { return a * b; }))
ACLNN(aclnnForeachAddcmulScalarV2, (Tensors x1, Tensors x2, Tensors x3, Num number, Tensors out),
      combined(x1, x2, x3, number, out, addcmul))
ACLNN(aclnnForeachAddcdivScalarV2, (Tensors x1, Tensors x2, Tensors x3, Num number, Tensors out),
      combined(x1, x2, x3, number, out, addcdiv))
ACLNN(aclnnForeachAddcdivScalarList, (Tensors x1, Tensors x2, Tensors x3, In scalars, Tensors out),
      addcdiv_list(x1, x2, x3, scalars, out))
ACLNN(aclnnForeachDivScalarList, (Tensors x, Nums scalars, Tensors out), div_list(x, scalars, out))
ACLNN(aclnnForeachLerpScalar, (Tensors x1, Tensors x2, Num weight, Tensors out), lerp(x1, x2, weight, out))
ACLNN(aclnnForeachNorm, (Tensors x, Num order, Tensors out), norm(x, order, out))
ACLNN(aclnnForeachSqrt, (Tensors x, Tensors out), sqrt(x, out))

}  // namespace opapi
