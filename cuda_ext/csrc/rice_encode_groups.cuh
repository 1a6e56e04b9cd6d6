// Groups of 128 values, each coded by a warp, of which every lane has four neighbours.
#pragma once

#include "rice_levels.h"
#include "scan.cuh"

namespace megatron_sparse {

constexpr int kLaneValues = kRiceGroup / 32;
template <int BITS>
constexpr int kGroupWords = 1 + BITS * (kRiceGroup / kPlane);

// Of 4-bit numbers, of which each lane has four neighbours (number i in bits 4 i to 4 i + 3), the
// word of plane lane % 4 of the lane's set of 32. Called by a whole warp.
__device__ __forceinline__ uint32_t gather_planes(uint32_t numbers) {
  const uint32_t lane = threadIdx.x % 32, pair = lane & 1, half = lane >> 1 & 1,
                 set = lane >> 2 & 1;
  // Bit 4 i + p becomes 4 p + i, which then is the lane's half of byte p.
  uint32_t swapped = (numbers ^ numbers >> 3) & 0x0a0au;
  numbers ^= swapped ^ swapped << 3;
  swapped = (numbers ^ numbers >> 6) & 0x00ccu;
  numbers ^= swapped ^ swapped << 6;
  numbers = (numbers | numbers << 8) & 0x00ff00ffu;
  numbers = (numbers | numbers << 4) & 0x0f0f0f0fu;
  numbers <<= 4 * pair;
  numbers |= __shfl_xor_sync(kAllLanes, numbers, 1);
  // Bytes of two planes, then of one: the lower lane's come first.
  uint32_t other = __shfl_xor_sync(kAllLanes, numbers, 2);
  numbers = __byte_perm(numbers, other, (0x5140u + 0x2222u * pair) ^ 0x4444u * half);
  other = __shfl_xor_sync(kAllLanes, numbers, 4);
  return __byte_perm(numbers, other, (0x5410u + 0x2222u * half) ^ 0x4444u * set);
}

// Stores words of planes that gather_planes returned for bits `first_plane` on of b-bit numbers, in
// sets of b words.
__device__ __forceinline__ void store_planes(uint32_t word, int first_plane, int bits, int count,
                                             uint32_t* words) {
  const int lane = threadIdx.x % 32, set = lane / 8;
  const int plane = first_plane + (lane & 1) * 2 + (lane >> 1 & 1);
  if (lane % 8 < 4 && plane < bits && set * kPlane < count) words[set * bits + plane] = word;
}

// Called by a whole warp: writes the words of a group of `count` values (0.0 behind the last), and
// replaces these by what the levels lose. WHOLE: of a record without indices.
template <int BITS, bool WHOLE>
__device__ __forceinline__ void quantise_group(float (&x)[kLaneValues], int count,
                                               uint32_t* words) {
  using L = ScalarLanes;
  const int lane = threadIdx.x % 32;
  uint32_t high = 0, low = ~uint32_t{0};
  float a[kLaneValues];
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    const uint32_t magnitude = L::as_bits(x[i]) & kMagnitude;
    a[i] = L::as_float(magnitude);
    high = max(high, magnitude);
    if (kLaneValues * lane + i < count) low = min(low, magnitude);
  }
  high = __reduce_max_sync(kAllLanes, high);
  uint32_t levels_word;
  if constexpr (WHOLE) {
    levels_word = whole_levels<BITS>(high);
  } else {
    low = __reduce_min_sync(kAllLanes, low);
    float sum = 0;
    if constexpr (fits_mean(BITS)) {
      // The tree of the specification: lanes, from the farthest on, and then neighbours.
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) a[i] = warp_sum(a[i]);
      sum = (a[0] + a[2]) + (a[1] + a[3]);
    }
    levels_word = entry_levels<BITS>(high, low, sum, count);
  }
  uint32_t low_numbers = 0, high_numbers = 0;
  if (levels_word == kNanLevels) {
    for (float& each : x) each = 0;
  } else {
    const Levels levels = levels_from(levels_word);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const CodedValue coded = code_value<BITS>(levels, x[i]);
      x[i] = coded.rest;
      low_numbers |= (coded.code & 15) << 4 * i;
      high_numbers |= coded.code >> 4 << 4 * i;
    }
  }
  if (lane == 0) words[0] = levels_word;
  store_planes(gather_planes(low_numbers), 0, BITS, count, words + 1);
  if constexpr (BITS > 4) store_planes(gather_planes(high_numbers), 4, BITS, count, words + 1);
}

}  // namespace megatron_sparse
