// One value of any dtype, as fp32.
#pragma once

#include "counter_hash.h"
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

// How many of `count` samples are to be sent; not a whole number.
MS_INLINE double wanted_samples(float density, int64_t count) {
  return static_cast<double>(density) * static_cast<double>(count);
}

// The descending rank, from 0, of the sample that is the threshold.
MS_INLINE int64_t threshold_rank(double wanted, int64_t count) {
  const int64_t rank = static_cast<int64_t>(wanted);
  return rank < count - 1 ? rank : count - 1;
}

// The chance of what equals a threshold (fp32 bits) that `above` samples exceed and `equal` samples
// equal, so that `wanted` samples are sent on average: 0 to 1, for above <= wanted <= above +
// equal. Zeros are never sent and infinity always is; neither has a chance.
MS_INLINE float tie_chance(uint32_t threshold, double wanted, int64_t above, int64_t equal) {
  if (threshold == 0 || threshold == kInfinity) return 0;
  return static_cast<float>((wanted - static_cast<double>(above)) / static_cast<double>(equal));
}

// The chance of the sample that ties with nothing but itself is drawn here, once for its range: it
// becomes 0 or 1. The range's key decides, so the selection does not depend on the element's place
// in a bucket, nor on how the gradient is cut into buckets.
MS_INLINE float settle_single(float chance, int64_t equal, int64_t key) {
  if (equal != 1) return chance;
  const HashSeed seed = hash_seed(static_cast<uint64_t>(key), kDrawTie);
  const float draw = static_cast<float>(hash_at(seed, 0) >> 8) * (1.0f / kTwoTo24);
  return draw < chance ? 1.0f : 0.0f;
}

}  // namespace megatron_sparse
