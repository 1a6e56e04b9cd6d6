// One value of any dtype, as fp32.
#pragma once

#include "elementwise.h"
#include "lanes.h"

namespace megatron_sparse {

MS_INLINE float load_as_float(const void* base, int dtype, int64_t element) {
  if (dtype == kFp32) return static_cast<const float*>(base)[element];
  const uint32_t raw = static_cast<const uint16_t*>(base)[element];
  return dtype == kBf16 ? widen<ScalarLanes, kBf16>(raw) : widen<ScalarLanes, kFp16>(raw);
}

// fp32 bits of |x|, which order as the magnitudes do; NaN counts as infinite.
MS_INLINE uint32_t magnitude_bits(float x) {
  const uint32_t bits = ScalarLanes::as_bits(x) & kMagnitude;
  return bits < kInfinity ? bits : kInfinity;
}

// A threshold below `largest`, the largest sample: otherwise equal gradients would never be sent.
// Fp32 bits.
MS_INLINE uint32_t break_tie(uint32_t threshold, uint32_t largest) {
  return largest == threshold && threshold > 0 ? threshold - 1 : threshold;
}

// How many of `count` > 0 samples must be greater than the threshold.
MS_INLINE int64_t threshold_rank(float density, int64_t count) {
  const double share = static_cast<double>(density) * static_cast<double>(count);
  const int64_t wanted = static_cast<int64_t>(share);
  const int64_t most = count - 1, least = wanted < 1 ? 1 : wanted;
  return least < most ? least : most;
}

}  // namespace megatron_sparse
