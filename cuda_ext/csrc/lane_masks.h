// One bit for each vector lane: from comparisons to bits, and moving lanes by them.
// Included once for each instruction set, like vector_lanes.h.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "vector_lanes.h"

namespace megatron_sparse {
namespace MS_ISA {

#if defined(__AVX2__)
inline constexpr bool kPackIsCheap = true;
#else
inline constexpr bool kPackIsCheap = false;
#endif

// Up to this many bits a word's elements are handled one by one, without a branch for each.
inline constexpr int kFewBits = 2;

inline constexpr uint32_t kAllLanes = (uint32_t{1} << MS_WIDTH) - 1;

// One bit for each lane of `raw` that has any of `bits`.
MS_INLINE uint32_t lanes_with(VectorLanes::U raw, uint32_t bits) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(raw),
                                _mm512_set1_epi32(static_cast<int>(bits)));
#elif defined(__AVX2__)
  const VectorLanes::M any = (raw & bits) != 0u;
  return _mm256_movemask_ps(reinterpret_cast<__m256>(any));
#else
  uint32_t mask = 0;
  for (int lane = 0; lane < MS_WIDTH; ++lane) {
    mask |= static_cast<uint32_t>((raw[lane] & bits) != 0) << lane;
  }
  return mask;
#endif
}

// One bit for each of MS_WIDTH 64-bit words, of any alignment, that is not zero.
MS_INLINE uint32_t nonzero_words(const void* words) {
#if defined(__AVX512F__)
  const __m512i* from = static_cast<const __m512i*>(words);
  const __m512i low = _mm512_loadu_si512(from), high = _mm512_loadu_si512(from + 1);
  return static_cast<uint32_t>(_mm512_test_epi64_mask(low, low)) |
         static_cast<uint32_t>(_mm512_test_epi64_mask(high, high)) << 8;
#elif defined(__AVX2__)
  const __m256i* from = static_cast<const __m256i*>(words);
  const auto zero_words = [](const __m256i* at) {
    const __m256i zero = _mm256_cmpeq_epi64(_mm256_loadu_si256(at), _mm256_setzero_si256());
    return static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(zero)));
  };
  return ~(zero_words(from) | zero_words(from + 1) << 4) & kAllLanes;
#else
  uint64_t each[MS_WIDTH];
  std::memcpy(each, words, sizeof each);
  uint32_t mask = 0;
  for (int lane = 0; lane < MS_WIDTH; ++lane) {
    mask |= static_cast<uint32_t>(each[lane] != 0) << lane;
  }
  return mask;
#endif
}

// All ones in the lanes that `mask` names, zero in the others.
MS_INLINE VectorLanes::M lanes_of(uint32_t mask) {
  using U = VectorLanes::U;
  U bit;
  for (int lane = 0; lane < MS_WIDTH; ++lane) bit[lane] = uint32_t{1} << lane;
  return ((U{} + mask) & bit) != 0u;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Row m of `pack` holds the positions of the set bits of m; of `spread`, for each bit, how many set
// bits are below it.
struct PermuteTable {
  uint8_t pack[256][8];
  uint8_t spread[256][8];
  constexpr PermuteTable() : pack{}, spread{} {
    for (int mask = 0; mask < 256; ++mask) {
      int count = 0;
      for (int bit = 0; bit < 8; ++bit) {
        spread[mask][bit] = static_cast<uint8_t>(count);
        if (mask >> bit & 1) pack[mask][count++] = static_cast<uint8_t>(bit);
      }
    }
  }
};
inline constexpr PermuteTable kPermute;

MS_INLINE VectorLanes::U permute(VectorLanes::U u, const uint8_t* order) {
  const __m128i row = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(order));
  return reinterpret_cast<VectorLanes::U>(
      _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(u), _mm256_cvtepu8_epi32(row)));
}
#endif

// The lanes of `u` that `mask` names, packed to the left; the other lanes are undefined.
MS_INLINE VectorLanes::U pack_left(VectorLanes::U u, uint32_t mask) {
#if defined(__AVX512F__)
  // In a register: compressing straight into memory is microcoded, and slow, on some machines.
  return reinterpret_cast<VectorLanes::U>(
      _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), reinterpret_cast<__m512i>(u)));
#elif defined(__AVX2__)
  return permute(u, kPermute.pack[mask]);
#else
  VectorLanes::U packed = {};
  int count = 0;
  for (; mask != 0; mask &= mask - 1) packed[count++] = u[__builtin_ctz(mask)];
  return packed;
#endif
}

// Lane k becomes the sum of lanes 0 to k.
MS_INLINE VectorLanes::U running_sum(VectorLanes::U u) {
#if defined(__AVX512F__)
  const __m512i zero = _mm512_setzero_si512();
  __m512i sum = reinterpret_cast<__m512i>(u);
  sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 15));
  sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 14));
  sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 12));
  return reinterpret_cast<VectorLanes::U>(_mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 8)));
#elif defined(__AVX2__)
  __m256i sum = reinterpret_cast<__m256i>(u);
  sum = _mm256_add_epi32(sum, _mm256_slli_si256(sum, 4));
  sum = _mm256_add_epi32(sum, _mm256_slli_si256(sum, 8));
  // Shifts stay in halves: the upper one lacks the lower one's sum.
  const __m256i lower = _mm256_permute2x128_si256(sum, sum, 0x08);
  return reinterpret_cast<VectorLanes::U>(_mm256_add_epi32(sum, _mm256_shuffle_epi32(lower, 0xff)));
#else
  for (int lane = 1; lane < MS_WIDTH; ++lane) u[lane] += u[lane - 1];
  return u;
#endif
}

// Sets bit p in the lanes that `mask` names; none of them has it.
MS_INLINE VectorLanes::U with_bit(VectorLanes::U u, uint32_t mask, int p) {
#if defined(__AVX512F__)
  const __m512i bit = _mm512_set1_epi32(1 << p), old = reinterpret_cast<__m512i>(u);
  return reinterpret_cast<VectorLanes::U>(
      _mm512_mask_or_epi32(old, static_cast<__mmask16>(mask), old, bit));
#else
  const VectorLanes::U bit = VectorLanes::U{} + (uint32_t{1} << p);
  return u | VectorLanes::select(lanes_of(mask), bit, VectorLanes::U{});
#endif
}

// The bits that are set in any lane.
MS_INLINE uint32_t bits_of_all(VectorLanes::U u) {
#if defined(__AVX512F__)
  return static_cast<uint32_t>(_mm512_reduce_or_epi32(reinterpret_cast<__m512i>(u)));
#elif defined(__AVX2__)
  const __m256i all = reinterpret_cast<__m256i>(u);
  __m128i half = _mm_or_si128(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  half = _mm_or_si128(half, _mm_srli_si128(half, 8));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_or_si128(half, _mm_srli_si128(half, 4))));
#else
  uint32_t any = 0;
  for (int lane = 0; lane < MS_WIDTH; ++lane) any |= u[lane];
  return any;
#endif
}

// The inverse of pack_left: the first lanes of `u` go to the lanes that `mask` names, the others
// become zero.
MS_INLINE VectorLanes::U spread_right(VectorLanes::U u, uint32_t mask) {
#if defined(__AVX512F__)
  return reinterpret_cast<VectorLanes::U>(
      _mm512_maskz_expand_epi32(static_cast<__mmask16>(mask), reinterpret_cast<__m512i>(u)));
#elif defined(__AVX2__)
  return permute(u, kPermute.spread[mask]) & reinterpret_cast<VectorLanes::U>(lanes_of(mask));
#else
  VectorLanes::U spread = {};
  int count = 0;
  for (; mask != 0; mask &= mask - 1) spread[__builtin_ctz(mask)] = u[count++];
  return spread;
#endif
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
