// Wrong data with a report of success: what CANNSIM_CORRUPT asks for.
#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace cannsim {
namespace {

// Where the exponent of a floating-point type lies.
struct Layout {
  size_t bytes;
  unsigned exponent_at;  // its lowest bit
  unsigned exponent_bits;

  uint64_t exponent(uint64_t bits) const { return bits >> exponent_at & largest(); }
  uint64_t largest() const { return (uint64_t{1} << exponent_bits) - 1; }  // of infinities and NaN
  uint64_t bias() const { return largest() >> 1; }
  uint64_t magnitude(uint64_t bits) const { return bits & ((uint64_t{1} << (exponent_at + exponent_bits)) - 1); }
};

constexpr Layout kFloat32{4, 23, 8};

const Layout *layout_of(aclDataType dtype) {
  static constexpr Layout float64{8, 52, 11}, float16{2, 10, 5}, bfloat16{2, 7, 8};
  switch (dtype) {
    case ACL_FLOAT: return &kFloat32;
    case ACL_DOUBLE: return &float64;
    case ACL_FLOAT16: return &float16;
    case ACL_BF16: return &bfloat16;
    default: return nullptr;
  }
}

size_t bytes_of(aclDataType dtype) {
  switch (dtype) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL: return 1;
    case ACL_INT16:
    case ACL_UINT16:
    case ACL_FLOAT16:
    case ACL_BF16: return 2;
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_FLOAT: return 4;
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_DOUBLE:
    case ACL_COMPLEX64: return 8;
    case ACL_COMPLEX128: return 16;
    default: throw std::runtime_error("CANNSIM_CORRUPT: elements of data type " + std::to_string(dtype));
  }
}

// One element: a number of the region's type, or a word of a copy.
size_t element_bytes(const Region &region) {
  if (region.dtype != ACL_DT_UNDEFINED) return bytes_of(region.dtype);
  return region.bytes % 4 == 0 ? 4 : 1;
}

uint64_t read(const std::byte *from, size_t bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, from, std::min(bytes, sizeof bits));
  return bits;
}

void flip(std::byte *where, unsigned bit) { where[bit / 8] ^= static_cast<std::byte>(1u << bit % 8); }

// Flips a bit of the exponent of the largest finite number, so that the error is to be seen: the lowest, which halves
// or doubles the number, or, where that would make no difference worth mention, the highest.
void flip_exponent(const Region &region, const std::vector<size_t> &elements, const Layout &layout) {
  size_t chosen = elements.front();
  uint64_t largest = 0;
  for (const size_t element : elements) {
    const uint64_t bits = read(region.start + element, layout.bytes);
    if (layout.exponent(bits) == layout.largest() || layout.magnitude(bits) <= largest) continue;
    largest = layout.magnitude(bits);
    chosen = element;
  }
  const uint64_t exponent = layout.exponent(read(region.start + chosen, layout.bytes));
  const bool small = exponent + 10 < layout.bias();
  flip(region.start + chosen, small ? layout.exponent_at + layout.exponent_bits - 1 : layout.exponent_at);
}

// Nobody knows what a copy moves: words that look like numbers of float32 are taken for such.
void flip_in_copy(const Region &region) {
  if (element_bytes(region) != kFloat32.bytes) return flip(region.start, 0);
  std::vector<size_t> floats;
  const size_t *integer = nullptr;
  for (const size_t &word : region.elements) {
    const uint64_t bits = read(region.start + word, kFloat32.bytes);
    const uint64_t exponent = kFloat32.exponent(bits);
    if (exponent > 63 && exponent < 191) floats.push_back(word);
    if (bits != 0 && integer == nullptr) integer = &word;
  }
  if (!floats.empty()) return flip_exponent(region, floats, kFloat32);
  if (integer != nullptr) return flip(region.start + *integer, 0);
  flip(region.start, 30);  // of a zero: 2.0 as a float32
}

void flip_bit(const Region &region) {
  if (region.elements.empty()) return;
  if (region.dtype == ACL_DT_UNDEFINED) return flip_in_copy(region);
  const Layout *const layout = layout_of(region.dtype);
  if (layout == nullptr) return flip(region.start + region.elements.front(), 0);
  flip_exponent(region, region.elements, *layout);
}

// Exchanges the first element with the first one that differs from it.
void swap_elements(const Region &region) {
  if (region.elements.empty()) return;
  const size_t bytes = element_bytes(region);
  std::byte *const first = region.start + region.elements.front();
  for (const size_t element : region.elements) {
    std::byte *const other = region.start + element;
    if (std::memcmp(first, other, bytes) == 0) continue;
    std::swap_ranges(first, first + bytes, other);
    return;
  }
}

void clear(const Region &region) {
  const size_t bytes = element_bytes(region);
  for (const size_t element : region.elements) std::memset(region.start + element, 0, bytes);
}

// The offsets of all elements of a view from its first, in bytes.
std::vector<size_t> offsets(const aclTensor &view, size_t bytes) {
  std::vector<size_t> found = {0};
  for (size_t d = 0; d < view.shape.size(); ++d) {
    std::vector<size_t> next;
    for (const size_t base : found) {
      for (int64_t i = 0; i < view.shape[d]; ++i) next.push_back(base + static_cast<size_t>(i * view.strides[d]) * bytes);
    }
    found.swap(next);
  }
  return found;
}

}  // namespace

std::vector<Region> copied_to(void *start, size_t bytes) {
  Region region;
  region.start = static_cast<std::byte *>(start);
  region.bytes = bytes;
  const size_t step = element_bytes(region);
  for (size_t at = 0; at < bytes; at += step) region.elements.push_back(at);
  return {region};
}

std::vector<Region> regions_of(const std::vector<aclTensor> &outputs) {
  std::vector<Region> regions;
  for (const aclTensor &output : outputs) {
    const size_t bytes = bytes_of(output.dtype);
    Region region;
    region.dtype = output.dtype;
    region.elements = offsets(output, bytes);
    if (region.elements.empty()) continue;
    region.bytes = *std::max_element(region.elements.begin(), region.elements.end()) + bytes;
    const auto *const first = static_cast<const std::byte *>(output.data) + static_cast<size_t>(output.offset) * bytes;
    region.start = static_cast<std::byte *>(alias(first, region.bytes));
    if (region.start == nullptr) throw std::runtime_error("CANNSIM_CORRUPT: the output is not live device memory");
    regions.push_back(std::move(region));
  }
  if (outputs.empty()) throw std::runtime_error("CANNSIM_CORRUPT: this operator does not say what it writes");
  return regions;
}

void deliver(Corruption corruption, const std::vector<Region> &regions, const std::function<void()> &task) {
  std::vector<std::vector<std::byte>> before;
  for (const Region &region : regions) before.emplace_back(region.start, region.start + region.bytes);
  task();
  // A flipped bit or an exchange is in one place; a result that is missing is missing as a whole.
  switch (corruption) {
    case Corruption::none: break;
    case Corruption::bit:
      if (!regions.empty()) flip_bit(regions.front());
      break;
    case Corruption::swap:
      if (!regions.empty()) swap_elements(regions.front());
      break;
    case Corruption::zero:
      for (const Region &region : regions) clear(region);
      break;
    case Corruption::stale:
      for (size_t i = 0; i < regions.size(); ++i) {
        std::copy(before[i].begin(), before[i].end(), regions[i].start);
      }
      break;
  }
}

}  // namespace cannsim
