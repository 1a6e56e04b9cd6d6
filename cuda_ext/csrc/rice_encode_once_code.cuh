// Codes the entries of a chunk that lies in a block's shared memory, for rice_encode_once.cuh:
// lists them, codes groups of 128, and puts what the levels lose back into the chunk.
#pragma once

#include "rice_encode_kernel.cuh"
#include "rice_encode_whole.cuh"

namespace megatron_sparse {

constexpr int kOnceElements = 1 << kMostOnceSpan;
// A third of the elements and more: where gaps have remainders, all entries are listed at once.
constexpr int kOnceListed = 22 * kRiceGroup;
static_assert(3 * kOnceListed > kOnceElements);

// A slot's chunk, with what applies to its elements.
struct OncePlace {
  int64_t slot;
  ChunkPlace chunk;
  Limit limit;
  bool one_range;  // whether the limit is that of all elements
  bool whole;      // whether all elements are sent
};

// A block's shared memory.
struct OnceMemory {
  __align__(16) float x[kOnceElements];  // what is sent; then the residual
  // As in ChunkMemory.
  __align__(16) uint32_t behind[kListBegin + kOnceListed];
  uint32_t unary[kOnceElements / 32 + 1];  // zeros between two chunks
  OncePlace places[3];                     // of this chunk and the next two, in turn
  unsigned entries[2][kRiceWarps];         // of this chunk's warps and the next one's, in turn
  unsigned bits[kRiceWarps];               // of the unary part
  unsigned stay;                           // entries that a limit leaves
  bool ends;                               // whether the segment's last one is among them
};

// Numbers of a block's warps, added up.
struct WarpSums {
  unsigned before;  // this warp
  unsigned all;
};

__device__ __forceinline__ WarpSums add_warps(const unsigned* of_warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned of_lane = lane < kRiceWarps ? of_warps[lane] : 0;
  return {__reduce_add_sync(kAllLanes, lane < warp ? of_lane : 0),
          __reduce_add_sync(kAllLanes, of_lane)};
}

// How many groups of 128 elements of a chunk each of the 8 warps has.
__device__ __forceinline__ int groups_of_warp(const RiceArguments& rice) {
  return 1 << (rice.log2_span - 10);
}

// The number of the lane's word of 32 neighbours in the chunk.
__device__ __forceinline__ int word_of(const RiceArguments& rice) {
  return static_cast<int>(threadIdx.x) / 32 * 4 * groups_of_warp(rice) + threadIdx.x % 32;
}

// A chunk's entries, as a lane sees them.
struct Kept {
  uint32_t word;     // of 32 elements
  WarpSums entries;  // how many
};

// Called by a whole warp, whose lanes have a bit for each of their elements: those of 32
// neighbours. Lane w returns the warp's word w.
__device__ __forceinline__ uint32_t words_of(uint32_t bits) {
  const uint32_t lane = threadIdx.x % 32;
  // Eight lanes exchange nibbles, then pairs, then fours: lane l has the l-th of each of them.
  uint32_t other = __shfl_xor_sync(kAllLanes, bits, 1);
  bits = lane & 1 ? (bits & 0xf0f0f0f0u) | (other >> 4 & 0x0f0f0f0fu)
                  : (bits & 0x0f0f0f0fu) | (other << 4 & 0xf0f0f0f0u);
  other = __shfl_xor_sync(kAllLanes, bits, 2);
  bits = __byte_perm(bits, other, lane & 2 ? 0x3715u : 0x6240u);
  other = __shfl_xor_sync(kAllLanes, bits, 4);
  bits = __byte_perm(bits, other, lane & 4 ? 0x3276u : 0x5410u);
  return __shfl_sync(kAllLanes, bits, lane % 4 * 8 + lane / 4);
}

// Called by a whole block: lists the entries of a lane's word, whose elements are `at` and those
// behind it. The first one of the warp is number `at_warp` of the list. Without ALL, those that are
// not below its end, or were listed before, with numbers below 0, are left out.
template <bool ALL>
__device__ __forceinline__ void list_entries(uint32_t word, int at, int at_warp, uint32_t* listed) {
  const int own = __popc(word);
  for (int k = at_warp + warp_inclusive_sum(own) - own; word != 0; ++k) {
    const int gap = __ffs(static_cast<int>(word)) - 1;
    at += gap + 1;
    word = word >> gap >> 1;
    if (ALL || static_cast<unsigned>(k) < kOnceListed) listed[k] = at;
  }
}

// Called by a whole block: sets the bits of the unary part, of which it returns the number, from
// all entries of the chunk.
__device__ __forceinline__ uint32_t set_unary(OnceMemory& memory, int entries, int r) {
  constexpr int kEach = kOnceListed / kRiceThreads;  // neighbours of a thread
  static_assert(kEach % 2 == 1, "lanes read from all banks");
  const int from = kEach * threadIdx.x, count = entries - from;
  const uint32_t* behind = memory.behind + kListBegin + from;
  uint32_t places[kEach] = {}, bits = 0;
  if (count > 0) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      places[k] = bits + ((behind[k] - behind[k - 1] - 1) >> r);
      if (k < count) bits = places[k] + 1;
    }
  }
  const uint32_t inclusive = warp_inclusive_sum(bits);
  if (threadIdx.x % 32 == 31) memory.bits[threadIdx.x / 32] = inclusive;
  __syncthreads();
  const WarpSums sums = add_warps(memory.bits);
  const uint32_t before = sums.before + inclusive - bits;
  if (count > 0) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32_t place = before + places[k];
      if (k < count) atomicOr(&memory.unary[place / 32], uint32_t{1} << place % 32);
    }
  }
  return sums.all;
}

// Called by a whole warp: codes a group of listed entries, and leaves in `x` what the levels lose.
template <int BITS>
__device__ __forceinline__ void code_group(float* x, const uint32_t* listed, int count,
                                           uint32_t* words) {
  const int first = kLaneValues * (threadIdx.x % 32);
  const uint4 four = *reinterpret_cast<const uint4*>(listed + first);
  const uint32_t behind[kLaneValues] = {four.x, four.y, four.z, four.w};
  float values[kLaneValues];
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) values[i] = first + i < count ? x[behind[i] - 1] : 0.0f;
  quantise_group<BITS, false>(values, count, words);
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    if (first + i < count) x[behind[i] - 1] = values[i];
  }
}

// Called by a whole block: codes the chunk's entries into `words`. Returns how many words there
// are.
template <int DTYPE>
__device__ __forceinline__ int code_chunk(const RiceArguments& rice, int numel, const Kept& kept,
                                          uint32_t* words, OnceMemory& memory) {
  constexpr int kBits = code_bits(DTYPE);
  const int entries = static_cast<int>(kept.entries.all);
  const int before = static_cast<int>(kept.entries.before);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int word_at = word_of(rice);
  const int r = rice_parameter(numel, entries);
  ChunkHead head = {};
  head.r = r;
  head.index_words = words + value_words(DTYPE, entries);
  uint32_t* unary = head.index_words + r * planes_of(entries);
  uint32_t* listed = memory.behind + kListBegin;
  if (r == 0 && lane < 4 * groups_of_warp(rice)) memory.unary[word_at] = kept.word;
  uint32_t bits = 0;
  for (int from = 0; from < entries; from += kOnceListed) {
    const int count = min(entries - from, kOnceListed);
    if (entries <= kOnceListed) {
      list_entries<true>(kept.word, 32 * word_at, before, listed);
    } else {
      list_entries<false>(kept.word, 32 * word_at, before - from, listed);
    }
    __syncthreads();
    bits = r == 0 ? listed[count - 1] : set_unary(memory, entries, r);
    uint32_t* to = words + (from / kRiceGroup + warp) * kGroupWords<kBits>;
#pragma unroll 1
    for (int first = warp * kRiceGroup; first < count; first += kRiceWarps * kRiceGroup) {
      const int size = min(count - first, kRiceGroup);
      place_remainders(head, listed + first, first, size);
      code_group<kBits>(memory.x, listed + first, size, to);
      to += kRiceWarps * kGroupWords<kBits>;
    }
    __syncthreads();
  }
  const int unary_words = static_cast<int>((bits + 31) / 32);
#pragma unroll 1
  for (int k = threadIdx.x; k < unary_words; k += kRiceThreads) {
    unary[k] = memory.unary[k];
    memory.unary[k] = 0;
  }
  return static_cast<int>(unary + unary_words - words);
}

}  // namespace megatron_sparse
