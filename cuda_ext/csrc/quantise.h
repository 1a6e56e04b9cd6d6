// Groups of fp32 numbers in few bits with a common scale: the layout of a record behind its header,
// and the arithmetic of one number; for host and device. docs/quantised.md specifies both.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace megatron_sparse {

inline constexpr uint8_t kFormatQuantised = 7;
inline constexpr int kGroup = 128;                      // numbers with a common scale
inline constexpr uint16_t kNanScale = 0x7fc0;           // of a group that holds NaN or Inf
inline constexpr uint32_t kLeastRefused = 0x7f000000u;  // 2^127: counts as Inf
inline constexpr int64_t kMaxQuantised = int64_t{1} << 34;

struct QuantisedSubHeader {
  uint32_t checksum;  // of all words of the record behind it
  uint32_t group;
  uint64_t zeros;
};
static_assert(sizeof(QuantisedSubHeader) == 16, "the wire format has no compiler padding");

// The largest code; the least one is its negative.
MS_INLINE constexpr int32_t code_limit(int bits) {
  return (1 << (bits - 1)) - 1;
}

MS_INLINE constexpr int64_t group_code_bytes(int bits) {
  return kGroup * bits / 8;
}

MS_INLINE constexpr int64_t groups_of(int64_t numel) {
  return (numel + kGroup - 1) / kGroup;
}

// A scale is bf16: the upper half of an fp32 number.
MS_INLINE float scale_value(uint16_t scale) {
  return ScalarLanes::as_float(static_cast<uint32_t>(scale) << 16);
}

// The scale of a group whose largest magnitude has these bits: magnitude / limit, to nearest even.
MS_INLINE uint16_t group_scale(uint32_t largest, int bits) {
  if (largest >= kLeastRefused) return kNanScale;
  const uint32_t exact =
      ScalarLanes::as_bits(ScalarLanes::as_float(largest) / static_cast<float>(code_limit(bits)));
  return static_cast<uint16_t>((exact + 0x7fffu + (exact >> 16 & 1u)) >> 16);
}

// Whether a scale can come from group_scale.
MS_INLINE bool is_scale(uint16_t scale) {
  return scale < kLeastRefused >> 16 || scale == kNanScale;
}

// Numbers are divided by this instead of the scale: a scale of zero gives codes of zero.
MS_INLINE float divisor_of(uint16_t scale) {
  return scale == 0 ? ScalarLanes::as_float(0x7f800000u) : scale_value(scale);
}

// The quotient of a number and its group's divisor as a code: to nearest even, within the limit.
// Only a subnormal scale lets a quotient exceed the limit, by half of it at most.
MS_INLINE int32_t code_of(float quotient, int32_t limit) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: its last mantissa bit is worth 1
  const int32_t code = static_cast<int32_t>(ScalarLanes::as_bits(quotient + kRounder)) -
                       static_cast<int32_t>(0x4b400000);
  return code < -limit ? -limit : code > limit ? limit : code;
}

}  // namespace megatron_sparse
