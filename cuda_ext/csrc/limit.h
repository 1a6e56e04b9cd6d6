// What selects in one range: its threshold, and the chance of what ties with it.
#pragma once

#include "counter_hash.h"

namespace megatron_sparse {

// A magnitude above `threshold` is sent. One that equals it is sent if its draw, a 24-bit hash of
// its index over 2^24, is less than `chance`.
struct Limit {
  float threshold;
  float chance;  // 0 where nothing is sent as a tie
};

// Infinity is never dropped, whatever the threshold; a NaN threshold keeps everything. Zeros never
// tie: with threshold 0 exactly what is not zero is sent.
MS_INLINE Limit limit_of(float threshold, float chance) {
  constexpr float largest = 3.4028234663852886e38f;
  const float clamped = threshold > largest ? largest : threshold;
  return {clamped, clamped > 0 ? chance : 0.0f};
}

// The limit of range r; `chances` is null where nothing is sent as a tie.
MS_INLINE Limit limit_at(const float* thresholds, const float* chances, int64_t r) {
  return limit_of(thresholds[r], chances == nullptr ? 0.0f : chances[r]);
}

// Sends nothing but infinity and NaN.
MS_INLINE Limit drop_finite() {
  return limit_of(3.4028234663852886e38f, 0.0f);
}

// The random bits of one call; those of an element follow from its index.
struct PruneSeeds {
  HashSeed value;
  HashSeed residual;
  HashSeed tie;
};

MS_INLINE PruneSeeds prune_seeds(int64_t key) {
  const uint64_t k = static_cast<uint64_t>(key);
  return {hash_seed(k, kDrawValue), hash_seed(k, kDrawResidual), hash_seed(k, kDrawTie)};
}

}  // namespace megatron_sparse
