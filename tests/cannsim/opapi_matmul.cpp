// Matrix products: FLOAT, FLOAT16 and BFLOAT16, accumulated in float. A row of the result has the same bits whether it
// is computed alone or in a batch.
#pragma GCC optimize("O3")
#include "opapi.h"

namespace opapi {
namespace {

// The unit that the inner loop works on: kRows rows of A times a panel of kColumns columns of B, over kDepth of the
// inner dimension before the partial sums are added up, which also keeps rounding errors small.
constexpr int64_t kRows = 4, kColumns = 8, kDepth = 256;
typedef float Lane __attribute__((vector_size(16)));

// B [depth, n] as panels of kColumns columns, each contiguous, padded with zeros.
std::vector<float> pack_panels(const aclTensor &b) {
  const int64_t depth = b.shape[0], n = b.shape[1], panels = (n + kColumns - 1) / kColumns;
  std::vector<float> packed(static_cast<size_t>(panels * depth * kColumns), 0.0f);
  const Loader<float> read = loader<float>(b.dtype);
  const std::byte *base = resolve(b);
  const auto bytes = static_cast<int64_t>(size_of(b.dtype));
  std::vector<float> scratch(static_cast<size_t>(depth));
  for (int64_t j = 0; j < n; j++) {
    const float *column = read(base + j * b.strides[1] * bytes, b.strides[0], depth, scratch.data());
    float *panel = packed.data() + j / kColumns * depth * kColumns + j % kColumns;
    for (int64_t k = 0; k < depth; k++) panel[k * kColumns] = column[k];
  }
  return packed;
}

// sums[r][0..kColumns) += rows[r] * panel, for `depth` elements.
void accumulate(const float *const *rows, const float *panel, int64_t depth, float *const *sums) {
  Lane partial[kRows][2] = {};
  for (int64_t k = 0; k < depth; k++) {
    Lane low, high;
    std::memcpy(&low, panel + k * kColumns, sizeof low);
    std::memcpy(&high, panel + k * kColumns + 4, sizeof high);
    for (int64_t r = 0; r < kRows; r++) {
      partial[r][0] += rows[r][k] * low;
      partial[r][1] += rows[r][k] * high;
    }
  }
  for (int64_t r = 0; r < kRows; r++)
    for (int64_t j = 0; j < kColumns; j++) sums[r][j] += partial[r][j / 4][j % 4];
}

struct Addend {  // beta * matrix, added to alpha times the product
  aclTensor matrix;
  float beta, alpha;
};

// out [m, n] = a [m, depth] * b [depth, n], with an addend whose matrix broadcasts to the shape of `out`.
void multiply(const aclTensor &a, const aclTensor &b, const aclTensor &out, const Addend *addend) {
  const int64_t m = a.shape[0], depth = a.shape[1], n = b.shape[1];
  if (m == 0 || n == 0) return;
  const std::vector<float> panels = pack_panels(b);
  const int64_t width = (n + kColumns - 1) / kColumns * kColumns;
  std::vector<float> inputs(static_cast<size_t>(kRows * depth)), sums(static_cast<size_t>(kRows * width)),
      extra(static_cast<size_t>(n));
  const std::byte *from = resolve(a), *added = nullptr;
  std::byte *to = resolve(out);
  const Loader<float> read = loader<float>(a.dtype);
  const Storer<float> write = storer<float>(out.dtype);
  Loader<float> read_added = nullptr;
  Shape added_strides;
  if (addend != nullptr && addend->beta != 0) {  // with beta 0 not even a NaN in the matrix counts
    added = resolve(addend->matrix);
    read_added = loader<float>(addend->matrix.dtype);
    added_strides = expand(addend->matrix, out.shape);
  }
  const auto at = [](auto *base, const aclTensor &view, int64_t row) {
    return base + row * view.strides[0] * static_cast<int64_t>(size_of(view.dtype));
  };

  for (int64_t i = 0; i < m; i += kRows) {
    const int64_t rows = std::min(kRows, m - i);
    const float *x[kRows];
    for (int64_t r = 0; r < kRows; r++)  // past the last row, the last one again
      x[r] = r < rows ? read(at(from, a, i + r), a.strides[1], depth, inputs.data() + r * depth) : x[rows - 1];
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t k = 0; k < depth; k += kDepth) {
      const float *shifted[kRows];
      for (int64_t r = 0; r < kRows; r++) shifted[r] = x[r] + k;
      for (int64_t j = 0; j < width; j += kColumns) {
        float *cells[kRows];
        for (int64_t r = 0; r < kRows; r++) cells[r] = sums.data() + r * width + j;
        accumulate(shifted, panels.data() + j * depth + k * kColumns, std::min(kDepth, depth - k), cells);
      }
    }
    for (int64_t r = 0; r < rows; r++) {
      float *row = sums.data() + r * width;
      if (addend != nullptr && addend->alpha != 1)
        for (int64_t j = 0; j < n; j++) row[j] *= addend->alpha;
      if (read_added != nullptr) {
        const auto bytes = static_cast<int64_t>(size_of(addend->matrix.dtype));
        const float *c = read_added(added + (i + r) * added_strides[0] * bytes, added_strides[1], n, extra.data());
        for (int64_t j = 0; j < n; j++) row[j] += addend->beta * c[j];
      }
      write(row, n, at(to, out, i + r), out.strides[1]);
    }
  }
}

template <typename Handle>
const aclTensor &matrix(Handle argument, const char *name) {
  const aclTensor &view = tensor(argument, name, kFloats);
  require(view.shape.size() == 2, std::string(name) + ": shape " + text(view.shape) + ", expected two dimensions");
  return view;
}

void require_operands(const aclTensor &a, const aclTensor &b, const aclTensor &out) {
  require(a.shape.back() == b.shape[b.shape.size() - 2],
          "shapes " + text(a.shape) + " and " + text(b.shape) + " cannot be multiplied");
  require(a.dtype == b.dtype, "dtypes " + name_of(a.dtype) + " and " + name_of(b.dtype) + " differ");
  require(out.dtype == a.dtype || out.dtype == ACL_FLOAT,
          "out: dtype " + name_of(out.dtype) + ", expected " + name_of(a.dtype));
}

Kernel mm(In self, In mat2, Out out) {
  const aclTensor &a = matrix(self, "self"), &b = matrix(mat2, "mat2"), &y = matrix(out, "out");
  require_operands(a, b, y);
  require_shape(y, "out", {a.shape[0], b.shape[1]});
  return [=] { multiply(a, b, y, nullptr); };
}

Kernel addmm(In self, In mat1, In mat2, Num beta, Num alpha, Out out) {
  const aclTensor &c = tensor(self, "self", kFloats), &a = matrix(mat1, "mat1"), &b = matrix(mat2, "mat2"),
                  &y = matrix(out, "out");
  require_operands(a, b, y);
  require_shape(y, "out", {a.shape[0], b.shape[1]});
  require_fits(c, "self", y.shape);
  const Addend addend{c, value<float>(scalar(beta, "beta")), value<float>(scalar(alpha, "alpha"))};
  return [=] { multiply(a, b, y, &addend); };
}

// The view with `rank` dimensions, its first ones broadcast to `batch`.
aclTensor batched(aclTensor view, const Shape &batch) {
  Shape shape = batch;
  shape.insert(shape.end(), view.shape.end() - 2, view.shape.end());
  view.strides = expand(view, shape);
  view.shape = shape;
  return view;
}

// torch.matmul: vectors count as a row on the left and as a column on the right, leading dimensions broadcast.
Kernel matmul(In self, In mat2, Out out, const char *second = "mat2") {
  aclTensor a = tensor(self, "self", kFloats), b = tensor(mat2, second, kFloats), y = tensor(out, "out", kFloats);
  require(!a.shape.empty() && !b.shape.empty(), "self and mat2 must have a dimension at least");
  const bool row = a.shape.size() == 1, column = b.shape.size() == 1;
  if (row) a = unsqueeze(a, 0);
  if (column) b = unsqueeze(b, 1);
  require_operands(a, b, y);
  const Shape batch = broadcast({a.shape.begin(), a.shape.end() - 2}, {b.shape.begin(), b.shape.end() - 2});
  Shape expected = batch;
  if (!row) expected.push_back(a.shape[a.shape.size() - 2]);
  if (!column) expected.push_back(b.shape.back());
  require_shape(y, "out", expected);
  if (row) y = unsqueeze(y, batch.size());
  if (column) y = unsqueeze(y, y.shape.size());
  a = batched(a, batch);
  b = batched(b, batch);
  return [=] {
    const auto leading = [&](const aclTensor &view) { return Shape(view.strides.begin(), view.strides.end() - 2); };
    const Space<3> space(batch, {leading(a), leading(b), leading(y)});
    const auto slice = [](aclTensor view, int64_t offset) {
      view.offset += offset;
      view.shape.erase(view.shape.begin(), view.shape.end() - 2);
      view.strides.erase(view.strides.begin(), view.strides.end() - 2);
      return view;
    };
    space.each_run([&](const auto &offset, int64_t length) {
      for (int64_t i = 0; i < length; i++)
        multiply(slice(a, offset[0] + i * space.step()[0]), slice(b, offset[1] + i * space.step()[1]),
                 slice(y, offset[2] + i * space.step()[2]), nullptr);
    });
  };
}

Kernel ranked_matmul(In self, In mat2, Out out, size_t rank1, size_t rank2, const char *second) {
  const auto require_rank = [](In argument, const char *name, size_t rank) {
    require(tensor(argument, name, kFloats).shape.size() == rank,
            std::string(name) + ": shape " + text(argument->shape) + ", expected rank " + std::to_string(rank));
  };
  require_rank(self, "self", rank1);
  require_rank(mat2, second, rank2);
  return matmul(self, mat2, out, second);
}

}  // namespace

// The trailing int8_t chooses the precision of the cube unit; the simulator always computes in float.
ACLNN(aclnnMm, (In self, In mat2, Out out, int8_t), mm(self, mat2, out))
ACLNN(aclnnAddmm, (In self, In mat1, In mat2, Num beta, Num alpha, Out out, int8_t),
      addmm(self, mat1, mat2, beta, alpha, out))
ACLNN(aclnnInplaceAddmm, (Out self, In mat1, In mat2, Num beta, Num alpha, int8_t),
      addmm(self, mat1, mat2, beta, alpha, self))
ACLNN(aclnnMatmul, (In self, In mat2, Out out, int8_t), matmul(self, mat2, out))
ACLNN(aclnnBatchMatMul, (In self, In mat2, Out out, int8_t), ranked_matmul(self, mat2, out, 3, 3, "mat2"))
ACLNN(aclnnMv, (In self, In vec, Out out, int8_t), ranked_matmul(self, vec, out, 2, 1, "vec"))
ACLNN(aclnnDot, (In self, In other, Out out), ranked_matmul(self, other, out, 1, 1, "tensor"))

}  // namespace opapi
