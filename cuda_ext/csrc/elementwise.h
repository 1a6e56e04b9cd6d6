// The arithmetic of one element, written once for CUDA threads and CPU vectors (L is ScalarLanes or
// VectorLanes). Everything is integer arithmetic or exact, so all of them agree bit for bit; the
// sums and products that do round are single IEEE operations (compile without contraction).
#pragma once

#include "counter_hash.h"
#include "dtypes.h"
#include "limit.h"

namespace megatron_sparse {

inline constexpr uint32_t kMagnitude = 0x7fffffffu;
inline constexpr uint32_t kInfinity = 0x7f800000u;
inline constexpr uint32_t kNan = 0x7fc00000u;
inline constexpr float kTwoTo24 = 16777216.0f;

// Raw bits of dtype D as fp32, exactly.
template <class L, int D>
MS_INLINE typename L::F widen(typename L::U raw) {
  using U = typename L::U;
  if constexpr (D == kFp32) return L::as_float(raw);
  if constexpr (D == kBf16) return L::as_float(raw << 16);
  if constexpr (D == kFp16) {
    const U sign = (raw & 0x8000u) << 16, magnitude = raw & 0x7fffu;
    const U normal = (magnitude << 13) + (112u << 23);
    // A subnormal is a whole number of 2^-24; as integers, no denormal operand slows this down.
    const U subnormal = L::as_bits(L::to_float(magnitude) * (1.0f / kTwoTo24));
    const U special = (magnitude << 13) | kInfinity;
    const U finite = L::select(magnitude < 0x400u, subnormal, normal);
    return L::as_float(sign | L::select(magnitude < 0x7c00u, finite, special));
  }
}

// fp32 bits of a value that dtype D holds exactly (or Inf or NaN), as D's raw bits.
template <class L, int D>
MS_INLINE typename L::U store_bits(typename L::U bits) {
  using U = typename L::U;
  if constexpr (D == kFp32) return bits;
  if constexpr (D == kBf16) return bits >> 16;
  if constexpr (D == kFp16) {
    const U sign = (bits >> 16) & 0x8000u, magnitude = bits & kMagnitude;
    const U normal = (magnitude - (112u << 23)) >> 13;
    const U small = L::select(magnitude < (113u << 23), magnitude, U{});
    const U subnormal = L::to_integer(L::as_float(small) * kTwoTo24);
    const U finite = L::select(magnitude < (113u << 23), subnormal, normal);
    const U special = L::select(magnitude > kInfinity, U{} + 0x7e00u, U{} + 0x7c00u);
    return sign | L::select(magnitude < kInfinity, finite, special);
  }
}

// Rounds the magnitude `u` (fp32 bits of a finite value) to grid G: stochastically, up with the
// probability of the part cut off, or to nearest even. Without SATURATE, what rounds above the
// grid's largest value becomes Inf.
template <class L, Grid G, bool STOCHASTIC, bool SATURATE>
MS_INLINE typename L::U round_magnitude(typename L::U u, typename L::U random) {
  using U = typename L::U;
  using F = typename L::F;
  using T = GridTraits<G>;
  if constexpr (G == Grid::kFp32) return u;
  constexpr uint32_t cut = (1u << T::drop_bits) - 1;
  U rounded;
  if constexpr (STOCHASTIC) {
    rounded = u + (random & cut);
  } else {
    rounded = u + (cut >> 1) + ((u >> T::drop_bits) & 1u);
  }
  rounded &= ~cut;
  const U limit = U{} + (SATURATE ? T::max_bits : kInfinity);
  rounded = L::select(rounded > T::max_bits, limit, rounded);
  if constexpr (T::fixed_below != 0) {
    const U small = L::select(u < T::fixed_below, u, U{});
    const F scaled = L::as_float(small) * kTwoTo24;  // exact
    const U whole = L::to_integer(scaled);
    const F rest = scaled - L::to_float(whole);
    U up;
    if constexpr (STOCHASTIC) {
      const F chance = L::to_float(random >> 8) * (1.0f / kTwoTo24);
      up = L::select(chance < rest, U{} + 1u, U{});
    } else {
      up = L::select(rest == 0.5f, whole & 1u, L::select(rest > 0.5f, U{} + 1u, U{}));
    }
    const U fixed = L::as_bits(L::to_float(whole + up) * (1.0f / kTwoTo24));
    rounded = L::select(u < T::fixed_below, fixed, rounded);
  }
  return rounded;
}

// What is left of an element, as raw bits of the residual's dtype.
template <class L, int RESIDUAL, bool STOCHASTIC>
MS_INLINE typename L::U residual_of(typename L::F left, const PruneSeeds& seeds, uint32_t high,
                                    typename L::U low) {
  using U = typename L::U;
  U rest = L::as_bits(left);
  if constexpr (RESIDUAL == kBf16) {
    U random = {};
    if constexpr (STOCHASTIC) random = hash_bits(hash_seed_at(seeds.residual, high), low);
    rest = (rest & ~kMagnitude) |
           round_magnitude<L, Grid::kBf16, STOCHASTIC, true>(rest & kMagnitude, random);
  }
  return store_bits<L, RESIDUAL>(rest);
}

// The result of pruning one element, as raw bits of the two buffers' dtypes.
template <class L>
struct Pruned {
  typename L::U grad;
  typename L::U residual;
  typename L::M nonzero;
};

// x = g + e; drop = |x| <= threshold, but for the ties that are drawn (limit.h);
// out = drop ? 0 : round(x); e' = drop ? leak x : x - out. SPECIAL: x may be NaN, or tie.
template <class L, int GRAD, int RESIDUAL, Grid G, bool STOCHASTIC, bool SPECIAL = true>
MS_INLINE Pruned<L> prune_element(typename L::U grad_raw, typename L::U residual_raw,
                                  const Limit& limit, float leak, const PruneSeeds& seeds,
                                  uint32_t high, typename L::U low) {
  using U = typename L::U;
  using F = typename L::F;
  using M = typename L::M;
  const F x = widen<L, GRAD>(grad_raw) + widen<L, RESIDUAL>(residual_raw);
  const U bits = L::as_bits(x), magnitude = bits & kMagnitude, sign = bits & ~kMagnitude;
  M drop = L::as_float(magnitude) <= limit.threshold;  // false for NaN: it is kept and travels
  // Rarely: with a continuous distribution a sample ties with nothing but itself.
  if (SPECIAL && L::any_tie(L::as_float(magnitude), limit)) {
    const U bits_of_tie = hash_bits(hash_seed_at(seeds.tie, high), low);
    const F draw = L::to_float(bits_of_tie >> 8) * (1.0f / kTwoTo24);
    const M drawn = (L::as_float(magnitude) == limit.threshold) & (draw < limit.chance);
    drop = L::select(drawn, M{}, drop);
  }
  const auto finite = magnitude < kInfinity;

  U random = {};
  if constexpr (G != Grid::kFp32 && STOCHASTIC) {
    random = hash_bits(hash_seed_at(seeds.value, high), low);
  }
  const U rounded = round_magnitude<L, G, STOCHASTIC, true>(magnitude, random);
  // Use one NaN on all machines: they differ in which operand's payload survives an addition.
  const U special = SPECIAL ? L::select(magnitude > kInfinity, U{} + kNan, bits) : bits;
  // An fp32 value is not rounded, so it is `special` if it is finite, too.
  const U kept = G == Grid::kFp32 ? special : L::select(finite, sign | rounded, special);
  const U out = L::select(drop, U{}, kept);

  F remainder = {};  // fp32 values are not rounded
  if constexpr (G != Grid::kFp32) remainder = L::select(finite, x - L::as_float(kept), F{});
  const F left = L::select(drop, x * leak, remainder);
  const U rest = residual_of<L, RESIDUAL, STOCHASTIC>(left, seeds, high, low);
  return {store_bits<L, GRAD>(out), rest, (out & kMagnitude) != 0u};
}

// fp32 value bits as the raw bits of dtype D, to nearest even, overflowing to Inf as torch does;
// every NaN becomes the same one.
template <class L, int D>
MS_INLINE typename L::U convert_bits(typename L::U bits) {
  using U = typename L::U;
  const U magnitude = bits & kMagnitude;
  const U rounded = round_magnitude<L, static_cast<Grid>(D), false, false>(magnitude, U{});
  const U sign = bits & ~kMagnitude;
  const U special = L::select(magnitude > kInfinity, U{} + kNan, bits);
  return store_bits<L, D>(L::select(magnitude < kInfinity, sign | rounded, special));
}

}  // namespace megatron_sparse
