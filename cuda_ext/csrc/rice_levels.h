// The quantiser of records of format Rice: the levels of a group, and the codes and values of its
// entries. docs/wire-format.md specifies it to the bit. For host and device; compile without
// contraction.
#pragma once

#include "elementwise.h"
#include "lanes.h"
#include "rice.h"

namespace megatron_sparse {

// The largest number of a code of `bits` bits beside its sign.
MS_INLINE constexpr float top_level(int bits) {
  return static_cast<float>((1 << (bits - 1)) - 1);
}

// Whether the levels of a group with indices depend on its mean.
MS_INLINE constexpr bool fits_mean(int bits) {
  return bits < 4;
}

// The levels of a group in which every element has a value; `high` is the largest magnitude's bits.
template <int BITS>
MS_INLINE uint32_t whole_levels(uint32_t high) {
  if (high >= kLeastRefusedMagnitude) return kNanLevels;
  return bf16_up(ScalarLanes::as_bits(ScalarLanes::as_float(high) / top_level(BITS)));
}

// The levels of a group of `count` entries: base, base + step, ... `high` and `low` are the bits of
// the largest and the least magnitude, `sum` is the tree's, which counts where fits_mean(BITS).
template <int BITS>
MS_INLINE uint32_t entry_levels(uint32_t high, uint32_t low, float sum, int count) {
  using L = ScalarLanes;
  // Factors of the mean excess over the least magnitude.
  constexpr float kBase = BITS == 3 ? 0.35f : 0.6f, kStep = BITS == 3 ? 1.1f : 1.8f;
  if (high >= kLeastRefusedMagnitude) return kNanLevels;
  const float hi = L::as_float(high), lo = L::as_float(low);
  uint32_t base;
  float step;
  if constexpr (!fits_mean(BITS)) {
    base = bf16_down(low);
    step = (hi - L::as_float(base << 16)) / top_level(BITS);
  } else {
    const float spread = sum / static_cast<float>(count) - lo;
    const float wanted = lo + kBase * spread, most = 2 * lo;
    base = bf16_down(L::as_bits(wanted < most ? wanted : most));
    const float even = kStep * spread;
    const float least = (hi * 0.5f - L::as_float(base << 16)) / top_level(BITS);
    step = even > least ? even : least;
    if (!(step > 0)) step = 0;
  }
  const uint32_t up = bf16_up(L::as_bits(step));
  if (L::as_float(base << 16) * 65536.0f < L::as_float(up << 16)) base = 0;
  return base << 16 | up;
}

struct Levels {
  float base, step, divisor;
};

MS_INLINE Levels levels_from(uint32_t word) {
  using L = ScalarLanes;
  const float base = L::as_float(word & 0xffff0000u), step = L::as_float(word << 16);
  return {base, step, step == 0 ? L::as_float(kInfinity) : step};
}

// The value of a code.
template <int BITS>
MS_INLINE float level_value(const Levels& levels, uint32_t code) {
  const int32_t number = static_cast<int32_t>(code & ((1u << (BITS - 1)) - 1));
  const float level = levels.base + static_cast<float>(number) * levels.step;
  return ScalarLanes::as_float(ScalarLanes::as_bits(level) | (code >> (BITS - 1)) << 31);
}

struct CodedValue {
  uint32_t code;
  float rest;  // of the value, behind the level
};

// The nearest level of a finite value.
template <int BITS>
MS_INLINE CodedValue code_value(const Levels& levels, float x) {
  using L = ScalarLanes;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: its last mantissa bit is worth 1
  const uint32_t sign = L::as_bits(x) & ~kMagnitude;
  const float a = L::as_float(L::as_bits(x) & kMagnitude);
  float quotient = (a - levels.base) / levels.divisor;
  quotient = quotient > 0 ? quotient : 0;
  quotient = quotient < top_level(BITS) ? quotient : top_level(BITS);
  const float number = quotient + kRounder - kRounder;
  const float level = levels.base + number * levels.step;
  return {static_cast<uint32_t>(static_cast<int32_t>(number)) | sign >> (32 - BITS),
          x - L::as_float(L::as_bits(level) | sign)};
}

struct RoundedValue {
  uint32_t sent;  // bf16 bits
  float rest;
};

// The bf16 of an element of a segment that is always sent whole. Finite values stay finite.
MS_INLINE RoundedValue round_kept(float x) {
  using L = ScalarLanes;
  const uint32_t bits = L::as_bits(x), magnitude = bits & kMagnitude;
  uint32_t sent = magnitude > kInfinity ? kNan : bits;
  if (magnitude < kInfinity) {
    sent = (bits & ~kMagnitude) | round_magnitude<L, Grid::kBf16, false, true>(magnitude, 0);
  }
  return {sent >> 16, magnitude < kInfinity ? x - L::as_float(sent) : 0};
}

// The bf16 bits of a residual of the bucket's element `index`.
MS_INLINE uint32_t narrow_residual(float rest, HashSeed seed, bool stochastic, uint64_t index) {
  using L = ScalarLanes;
  const uint32_t bits = L::as_bits(rest), magnitude = bits & kMagnitude;
  const uint32_t rounded =
      stochastic ? round_magnitude<L, Grid::kBf16, true, true>(magnitude, hash_at(seed, index))
                 : round_magnitude<L, Grid::kBf16, false, true>(magnitude, 0);
  return ((bits & ~kMagnitude) | rounded) >> 16;
}

}  // namespace megatron_sparse
