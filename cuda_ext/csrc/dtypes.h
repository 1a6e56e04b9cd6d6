// Dtype codes of the wire format, and the grids that a value can be rounded to.
#pragma once

#include <cstdint>

#include "portability.h"

namespace megatron_sparse {

enum Dtype : int { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

MS_INLINE int64_t dtype_bytes(int dtype) {
  return dtype == kFp32 ? 4 : 2;
}

// A grid is a set of floating-point values: `drop_bits` of fp32's mantissa are cut, magnitudes
// under `fixed_below` (fp32 bits) are multiples of 2^-24, the largest is `max_bits` (fp32 bits).
enum class Grid : int {
  kFp32 = 0,
  kBf16 = 1,
  kFp16 = 2,
  kBf16AndFp16 = 3  // what both can hold: bf16's mantissa in fp16's range
};

template <Grid G>
struct GridTraits;
template <>
struct GridTraits<Grid::kFp32> {
  static constexpr uint32_t drop_bits = 0, fixed_below = 0, max_bits = 0x7f7fffffu;
};
template <>
struct GridTraits<Grid::kBf16> {
  static constexpr uint32_t drop_bits = 16, fixed_below = 0, max_bits = 0x7f7f0000u;
};
template <>
struct GridTraits<Grid::kFp16> {
  static constexpr uint32_t drop_bits = 13, fixed_below = 113u << 23, max_bits = 0x477fe000u;
};
template <>
struct GridTraits<Grid::kBf16AndFp16> {
  static constexpr uint32_t drop_bits = 16, fixed_below = 110u << 23, max_bits = 0x477f0000u;
};

// The grid of values stored as `stored` and sent as `wire`.
MS_INLINE constexpr Grid grid_of(int stored, int wire) {
  if (stored == kFp32) return static_cast<Grid>(wire);
  if (wire == kFp32 || wire == stored) return static_cast<Grid>(stored);
  return Grid::kBf16AndFp16;
}

}  // namespace megatron_sparse
