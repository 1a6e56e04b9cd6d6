// Moves in vector lanes: ordered integers, zigzag order, symbols.
// Included once for each instruction set, like vector_lanes.h.
#pragma once

#include "lane_masks.h"
#include "moves.h"

namespace megatron_sparse {
namespace MS_ISA {

// The ordered integer of an fp32 bit pattern: negative numbers have all bits flipped, others the
// sign.
MS_INLINE VectorLanes::U ordered(VectorLanes::U bits) {
  using U = VectorLanes::U;
  const U negative = reinterpret_cast<U>(reinterpret_cast<VectorLanes::M>(bits) >> 31);
  return bits ^ (negative | 0x80000000u);
}

MS_INLINE VectorLanes::U unordered(VectorLanes::U integers) {
  using U = VectorLanes::U;
  const U positive = reinterpret_cast<U>(reinterpret_cast<VectorLanes::M>(integers) >> 31);
  return integers ^ (~positive | 0x80000000u);
}

// The same of numbers of dtype D; those of 16 bits are zero-extended and end up in the upper half.
template <int D>
MS_INLINE VectorLanes::U order(VectorLanes::U bits) {
  return D == kFp32 ? ordered(bits) : ordered(bits << 16) & 0xffff0000u;
}

// Moves 0, -1, 1, -2, ... of numbers of dtype D become 0, 1, 2, 3, ... In the upper halves
// the arithmetic of 32 bits wraps as that of 16 bits does.
template <int D>
MS_INLINE VectorLanes::U zigzag(VectorLanes::U old_bits, VectorLanes::U new_bits) {
  using U = VectorLanes::U;
  const U move = order<D>(new_bits) - order<D>(old_bits);
  const U sign = reinterpret_cast<U>(reinterpret_cast<VectorLanes::M>(move) >> 31);
  return D == kFp32 ? (move + move) ^ sign : (move >> 15 & 0xffffu) ^ (sign & 0xffffu);
}

// `yes` in the lanes of the mask.
MS_INLINE VectorLanes::U blend(uint32_t mask, VectorLanes::U yes, VectorLanes::U no) {
#if defined(__AVX512F__)
  return reinterpret_cast<VectorLanes::U>(_mm512_mask_mov_epi32(
      reinterpret_cast<__m512i>(no), static_cast<__mmask16>(mask), reinterpret_cast<__m512i>(yes)));
#else
  return VectorLanes::select(lanes_of(mask), yes, no);
#endif
}

// The signs of those numbers from `at` on that are mirrored: their bits of `down` are set. `at` is
// a multiple of MS_WIDTH.
template <int D>
MS_INLINE VectorLanes::U mirror(const uint32_t* down, int64_t at) {
  constexpr uint32_t kSign = uint32_t{1} << sign_bit(D);
  const uint32_t mask = down[at / 32] >> at % 32 & kAllLanes;
  return blend(mask, VectorLanes::U{} + kSign, VectorLanes::U{});
}

template <int D>
MS_INLINE VectorLanes::U apply_move(VectorLanes::U old_bits, VectorLanes::U z) {
  const VectorLanes::U move = (z >> 1) ^ (VectorLanes::U{} - (z & 1u));
  if constexpr (D == kFp32) return unordered(ordered(old_bits) + move);
  // The lower halves are of no account.
  return unordered(ordered(old_bits << 16) + (move << 16)) >> 16;
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

// The symbols of moves in zigzag order: themselves below 16, then two for each power of two, one
// for each sign.
template <int D>
MS_INLINE MoveSymbols symbols_of_moves(VectorLanes::U z) {
  using L = VectorLanes;
  using U = L::U;
  const L::M direct = reinterpret_cast<L::M>(z >> 4) == 0;
  const U magnitude = z >> 1, one = U{} + 1u;
  // The bit below the highest is cleared, so that the conversion cannot round up to the next power
  // of two.
  const U exact = D == kFp32 ? magnitude & ~(magnitude >> 1) : magnitude;
  // The exponent and the sign are the symbol, but for a constant.
  const U top = (L::as_bits(L::to_float(exact)) >> 22 & ~1u) | (z & 1u);
  MoveSymbols all;
  all.symbol = L::select(direct, z, top - 244u);
  all.raw_bits = L::select(direct, U{}, (all.symbol >> 1) - 5u);
  all.raw = magnitude & ((one << all.raw_bits) - 1u);
  return all;
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
