// Moves in vector lanes: ordered integers, zigzag order, symbols.
// Included once for each instruction set, like vector_lanes.h.
#pragma once

#include "lane_masks.h"
#include "moves.h"

namespace megatron_sparse {
namespace MS_ISA {

// Lanes as wide as the numbers: V is unsigned, S signed.
struct Lanes16 {
  using T = uint16_t;
  typedef uint16_t V __attribute__((vector_size(4 * MS_WIDTH)));
  typedef int16_t S __attribute__((vector_size(4 * MS_WIDTH)));
  static constexpr int kBits = 16, kCount = 2 * MS_WIDTH;
};
struct Lanes32 {
  using T = uint32_t;
  using V = VectorLanes::U;
  using S = VectorLanes::M;
  static constexpr int kBits = 32, kCount = MS_WIDTH;
};

// The ordered integer of a bit pattern: negative numbers have all bits flipped, others the sign.
template <class L>
MS_INLINE typename L::V ordered(typename L::V bits) {
  using V = typename L::V;
  const V negative = reinterpret_cast<V>(reinterpret_cast<typename L::S>(bits) >> (L::kBits - 1));
  return bits ^ (negative | static_cast<typename L::T>(typename L::T{1} << (L::kBits - 1)));
}

template <class L>
MS_INLINE typename L::V unordered(typename L::V integers) {
  using V = typename L::V;
  const V positive =
      reinterpret_cast<V>(reinterpret_cast<typename L::S>(integers) >> (L::kBits - 1));
  return integers ^ (~positive | static_cast<typename L::T>(typename L::T{1} << (L::kBits - 1)));
}

// 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
template <class L>
MS_INLINE typename L::V zigzag(typename L::V old_bits, typename L::V new_bits) {
  using V = typename L::V;
  const V move = ordered<L>(new_bits) - ordered<L>(old_bits);
  const V sign = reinterpret_cast<V>(reinterpret_cast<typename L::S>(move) >> (L::kBits - 1));
  return (move + move) ^ sign;
}

template <class L>
MS_INLINE typename L::V apply_move(typename L::V old_bits, typename L::V z) {
  using V = typename L::V;
  const V one = V{} + static_cast<typename L::T>(1);
  return unordered<L>(ordered<L>(old_bits) + ((z >> 1) ^ (V{} - (z & one))));
}

// The same for numbers of dtype D, zero-extended to 32-bit lanes: 16-bit numbers are moved to the
// upper halves, where the arithmetic of 32 bits wraps as that of 16 bits does.
template <int D>
MS_INLINE VectorLanes::U zigzag_wide(VectorLanes::U old_bits, VectorLanes::U new_bits) {
  if constexpr (D == kFp32) {
    return zigzag<Lanes32>(old_bits, new_bits);
  } else {
    using U = VectorLanes::U;
    const auto raised = [](U bits) {
      const U high = bits << 16;
      const U negative = reinterpret_cast<U>(reinterpret_cast<VectorLanes::M>(high) >> 31);
      return high ^ ((negative | 0x80000000u) & 0xffff0000u);
    };
    const U move = raised(new_bits) - raised(old_bits);
    const U sign = reinterpret_cast<U>(reinterpret_cast<VectorLanes::M>(move) >> 31);
    return (move >> 15 & 0xffffu) ^ (sign & 0xffffu);
  }
}

template <int D>
MS_INLINE VectorLanes::U apply_wide(VectorLanes::U old_bits, VectorLanes::U z) {
  if constexpr (D == kFp32) {
    return apply_move<Lanes32>(old_bits, z);
  } else {
    using U = VectorLanes::U;
    using M = VectorLanes::M;
    const U high = old_bits << 16;
    const U negative = reinterpret_cast<U>(reinterpret_cast<M>(high) >> 31);
    const U integer = high ^ (negative | 0x80000000u);  // the lower half is of no account
    const U moved = integer + (((z >> 1) ^ (U{} - (z & 1u))) << 16);
    const U positive = reinterpret_cast<U>(reinterpret_cast<M>(moved) >> 31);
    return (moved ^ (~positive | 0x80000000u)) >> 16;
  }
}

template <int D>
MS_INLINE VectorLanes::U context_of(VectorLanes::U bits, uint32_t base) {
  using L = VectorLanes;
  using M = L::M;
  const M exponent = reinterpret_cast<M>(bits >> mantissa_bits(D) & exponent_mask(D));
  const M above = exponent - static_cast<int32_t>(base);
#if defined(__AVX512F__)
  const __m512i positive =
      _mm512_max_epi32(reinterpret_cast<__m512i>(above), _mm512_setzero_si512());
  return reinterpret_cast<L::U>(_mm512_min_epi32(positive, _mm512_set1_epi32(kContexts - 1)));
#else
  const M positive = L::select(above > 0, above, M{});
  return reinterpret_cast<L::U>(L::select(positive < kContexts - 1, positive, M{} + kContexts - 1));
#endif
}

struct MoveSymbols {
  VectorLanes::U symbol, raw_bits, raw;
};

// The symbols of moves in zigzag order: themselves below 16, then two for each power of two.
template <int D>
MS_INLINE MoveSymbols symbols_of_moves(VectorLanes::U z) {
  using L = VectorLanes;
  using U = L::U;
  const L::M direct = reinterpret_cast<L::M>(z >> 4) == 0;
  MoveSymbols all;
  if constexpr (D == kFp32) {
    // The bit below the highest is cleared, so that the conversion cannot round up to the next
    // power of two; halved, the numbers fit signed integers.
    const U exact = (z & ~(z >> 1)) >> 1;
    const U log2 = (L::as_bits(L::to_float(exact)) >> 23) - 126u;
    all.raw_bits = L::select(direct, U{}, log2 - 1u);
    all.symbol = L::select(direct, z, all.raw_bits * 2u + 8u + (z >> all.raw_bits));
  } else {
    // Exponent and first bit of the mantissa are the symbol, but for a constant.
    const U top = L::as_bits(L::to_float(z)) >> 22;
    all.symbol = L::select(direct, z, top - 246u);
    all.raw_bits = L::select(direct, U{}, (all.symbol >> 1) - 5u);
  }
  const U one = U{} + 1u;
  all.raw = z & ((one << all.raw_bits) - 1u);
  return all;
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
