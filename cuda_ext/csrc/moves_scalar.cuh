// The arithmetic of moves for one number, or two in a word, and where the sections of a record lie.
// moves_lanes.h is the same arithmetic in the CPU's vector lanes.
#pragma once

#include <cuda_runtime.h>

#include "moves.h"
#include "raw_type.cuh"
#include "record.h"

namespace megatron_sparse {

inline constexpr int kStepWords = 3 * kStates;  // that a step of rans, 32 numbers, takes at most
inline constexpr int kTableEntries = kContexts * kMaxSymbols;

template <int D>
using MovesRaw = typename RawType<D>::type;

// Numbers of 16 bits are moved to the upper half, where the arithmetic of 32 bits wraps as that of
// 16 bits does.
template <int D>
MS_INLINE uint32_t ordered_high(uint32_t bits) {
  const uint32_t high = D == kFp32 ? bits : bits << 16;
  const uint32_t negative = static_cast<uint32_t>(static_cast<int32_t>(high) >> 31);
  const uint32_t flipped = high ^ (negative | 0x80000000u);
  return D == kFp32 ? flipped : flipped & 0xffff0000u;
}

// The number of a lane, mirrored if its bit of the word of `down` is set.
template <int D>
MS_INLINE uint32_t mirrored(uint32_t bits, uint32_t down, int lane) {
  return bits ^ (down >> lane & 1u) << sign_bit(D);
}

// The move as 0, -1, 1, -2, ... -> 0, 1, 2, 3, ...
template <int D>
MS_INLINE uint32_t zigzag_of(uint32_t old_bits, uint32_t new_bits) {
  const uint32_t move = ordered_high<D>(new_bits) - ordered_high<D>(old_bits);
  const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(move) >> 31);
  return D == kFp32 ? (move << 1) ^ sign : ((move >> 15) ^ sign) & 0xffffu;
}

template <int D>
MS_INLINE uint32_t moved_by(uint32_t old_bits, uint32_t z) {
  const uint32_t move = (z >> 1) ^ (0u - (z & 1u));
  const uint32_t integer = ordered_high<D>(old_bits) + (D == kFp32 ? move : move << 16);
  const uint32_t positive = static_cast<uint32_t>(static_cast<int32_t>(integer) >> 31);
  const uint32_t bits = integer ^ (~positive | 0x80000000u);
  return D == kFp32 ? bits : bits >> 16;
}

// All bits of a half word that is negative.
__device__ __forceinline__ uint32_t signs_of_halves(uint32_t pair) {
#ifdef __CUDA_ARCH__
  uint32_t signs;  // no intrinsic has this mode of prmt
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(pair));
  return signs;
#else
  return (pair >> 15 & 0x00010001u) * 0xffffu;
#endif
}

__device__ __forceinline__ uint32_t ordered_pair(uint32_t bits) {
  return bits ^ (signs_of_halves(bits) | 0x80008000u);
}

// The same for two numbers of 16 bits in a word.
__device__ __forceinline__ uint32_t zigzag_pair(uint32_t old_bits, uint32_t new_bits) {
  const uint32_t move = __vsub2(ordered_pair(new_bits), ordered_pair(old_bits));
  return __vadd2(move, move) ^ signs_of_halves(move);
}

__device__ __forceinline__ uint32_t moved_pair(uint32_t old_bits, uint32_t z) {
  const uint32_t move = (z >> 1 & 0x7fff7fffu) ^ (z & 0x00010001u) * 0xffffu;
  const uint32_t integers = __vadd2(ordered_pair(old_bits), move);
  return ~(integers ^ (signs_of_halves(integers) & 0x7fff7fffu));
}

template <int D>
MS_INLINE uint32_t exponent_of(uint32_t bits) {
  return bits >> mantissa_bits(D) & exponent_mask(D);
}

// The number of the frequency table.
template <int D>
MS_INLINE uint32_t context_of(uint32_t bits, uint32_t base) {
  const int above = static_cast<int>(exponent_of<D>(bits)) - static_cast<int>(base);
  return static_cast<uint32_t>(above < 0 ? 0 : above < kContexts ? above : kContexts - 1);
}

// Of the table of chunk offsets, padded.
MS_INLINE int64_t offset_table_bytes(int64_t chunks) {
  return pad16(4 * (chunks + 1));
}

// Numbers [first, first + 16 / sizeof(Raw)) of an array of `count`; zeros behind its end. The array
// may lie anywhere.
template <class Raw>
__device__ __forceinline__ uint4 vector_of(const Raw* from, int64_t first, int64_t count) {
  constexpr int kItems = 16 / sizeof(Raw), kPerWord = 4 / sizeof(Raw);
  const Raw* at = from + first;
  if (first + kItems <= count && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
    return *reinterpret_cast<const uint4*>(at);
  }
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (first + i < count) {
      words[i / kPerWord] |= static_cast<uint32_t>(at[i]) << i % kPerWord * (32 / kPerWord);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// The mixed words of a vector whose first word has the number `first` in the body.
__device__ __forceinline__ uint32_t mix_vector(const uint4& v, uint32_t first) {
  return mix_word(v.x, first) + mix_word(v.y, first + 1) + mix_word(v.z, first + 2) +
         mix_word(v.w, first + 3);
}

}  // namespace megatron_sparse
