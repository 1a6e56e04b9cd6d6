// Adds a Rice record's part of a tile of 4096 elements; by a whole block.
//
// A chunk has one tile or more. For each of them the block reads the chunk's index words from the
// begin on, as far as the tile reaches, 256 at a time. First each thread counts the entries of a
// word and adds the remainders of a set of 32 entries. From the sums before them follows between
// which elements a word's entries lie. Then each thread lists the places of the entries of its
// word, if one may be in the tile. At last each warp takes 128 entries at a time: a lane has one of
// each 32, so that planes are the same for all lanes.
//
// Encoders take chunks of about 1024 to 2048 entries, so the words before the tile are few. It is
// right, but slow, for long chunks that are full.
//
// Bytes an element at density d, of 2^s elements a chunk, for each record: values as other formats;
// of the index words, which have i bytes an element, up to i max(1, 2^(s - 12) / 2), mostly from
// the L2 cache.
#pragma once

#include <type_traits>

#include "rice_decode.cuh"

namespace megatron_sparse {

constexpr int kSumThreads = 256;
constexpr int kSumWarps = kSumThreads / 32;
constexpr int kGroupSets = kRiceGroup / kPlane;

// A block's shared memory. A round is the words that its threads take at once.
struct RiceMemory {
  RiceChunk chunks[kSumWarps];   // of as many records
  int ones_of_warp[kSumWarps];   // entries of a warp's words
  int rests_of_warp[kSumWarps];  // sum of a warp's remainders
  int rests[kSumThreads + 1];    // sums before each set, of the same warp
  int rests_before[kSumThreads + 1];
  unsigned first, last;               // entries that may be in the tile
  uint16_t places[32 * kSumThreads];  // of the entries of a round, in the round's words
};

// Lane i gets a word whose bit l is bit i of lane l's word.
__device__ __forceinline__ uint32_t transpose_bits(uint32_t word) {
  const int lane = threadIdx.x % 32;
  uint32_t other = __shfl_xor_sync(kAllLanes, word, 16);
  word = __byte_perm(word, other, lane & 16 ? 0x3276 : 0x5410);
  other = __shfl_xor_sync(kAllLanes, word, 8);
  word = __byte_perm(word, other, lane & 8 ? 0x3715 : 0x6240);
  uint32_t low = 0x0f0f0f0fu;  // bits that a lane without bit `distance` keeps
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2, low ^= low << distance) {
    other = __shfl_xor_sync(kAllLanes, word, distance);
    const bool upper = (lane & distance) != 0;
    const uint32_t kept = upper ? ~low : low;
    other = __funnelshift_l(other, other, upper ? 32 - distance : distance);
    word = (word & kept) | (other & ~kept);
  }
  return word;
}

// A group of quantised values; docs/wire-format.md. Held by a warp, of which a lane has its own
// value of each set.
struct QuantisedGroup {
  uint32_t scale, words;

  __device__ __forceinline__ void load(const RiceChunk& chunk, int group) {
    const uint32_t* from = chunk.values + group * (1 + kGroupSets * chunk.bits);
    const int lane = threadIdx.x % 32, sets = min(kGroupSets, chunk.sets() - group * kGroupSets);
    scale = from[0];
    words = lane < sets * chunk.bits ? from[1 + lane] : 0;
  }

  // Apart from `load`, so that several groups are loaded at a time.
  __device__ __forceinline__ void decode(int bits, float (&value)[kGroupSets]) const {
    const float base = ScalarLanes::as_float(scale & 0xffff0000u);
    const float step = ScalarLanes::as_float(scale << 16);
    const uint32_t mask = (1u << (bits - 1)) - 1;
    uint32_t code = transpose_bits(words);
#pragma unroll
    for (int s = 0; s < kGroupSets; ++s, code >>= bits) {
      // Compiled without contraction (sources.py); the product is exact anyway.
      const float level = base + static_cast<float>(code & mask) * step;
      const uint32_t sign = code << (32 - bits) & 0x80000000u;
      value[s] = ScalarLanes::as_float(ScalarLanes::as_bits(level) | sign);
    }
  }
};

// The same of raw values.
template <int VALUE>
struct RawGroup {
  float loaded[kGroupSets];

  __device__ __forceinline__ void load(const RiceChunk& chunk, int group) {
    const uint8_t* values = reinterpret_cast<const uint8_t*>(chunk.values);
#pragma unroll
    for (int s = 0; s < kGroupSets; ++s) {
      const int entry = kRiceGroup * group + kPlane * s + threadIdx.x % 32;
      loaded[s] = entry < chunk.entries ? value_at<VALUE>(values, entry) : 0;
    }
  }

  __device__ __forceinline__ void decode(int, float (&value)[kGroupSets]) const {
#pragma unroll
    for (int s = 0; s < kGroupSets; ++s) value[s] = loaded[s];
  }
};

template <int VALUE>
using ValueGroup = std::conditional_t<is_quantised(VALUE), QuantisedGroup, RawGroup<VALUE>>;

// Adds a lane's values of a group to those elements that are below `length`.
template <class Group>
__device__ __forceinline__ void add_group(const Group& group, int bits,
                                          const unsigned (&element)[kGroupSets], unsigned length,
                                          float* sums) {
  float sum[kGroupSets] = {}, value[kGroupSets];
#pragma unroll
  for (int s = 0; s < kGroupSets; ++s) {
    if (element[s] < length) sum[s] = sums[element[s]];
  }
  group.decode(bits, value);
#pragma unroll
  for (int s = 0; s < kGroupSets; ++s) {
    if (element[s] < length) sums[element[s]] = sum[s] + value[s];
  }
}

// Adds a tile of a record without indices. A warp loads several groups before it adds them.
__device__ __forceinline__ void add_all_values(const RiceChunk& chunk, float* sums) {
  constexpr int loads = 2;
  const int lane = threadIdx.x % 32, entries = chunk.entries;
#pragma unroll 1
  for (int first = threadIdx.x / 32; first * kRiceGroup < entries; first += loads * kSumWarps) {
    QuantisedGroup groups[loads];
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int g = first + i * kSumWarps;
      if (g * kRiceGroup < entries) groups[i].load(chunk, g);
    }
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int g = first + i * kSumWarps;
      if (g * kRiceGroup >= entries) break;
      unsigned element[kGroupSets];
#pragma unroll
      for (int s = 0; s < kGroupSets; ++s) element[s] = kRiceGroup * g + kPlane * s + lane;
      add_group(groups[i], chunk.bits, element, entries, sums);
    }
  }
}

// Adds those of a chunk's entries that are in the tile. Returns whether this thread has seen an
// entry or a word that cannot be. Wrong entries are added to elements of the tile, or to none.
template <int VALUE>
__device__ __forceinline__ bool add_entries(const RiceChunk& chunk, RiceMemory& memory,
                                            float* sums) {
  const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const unsigned lanes_before = (1u << lane) - 1, lanes_through = 2 * lanes_before + 1;
  const unsigned all = chunk.entries;
  const int r = chunk.r;
  bool wrong = false;
  int largest = 0;  // element
  // Of the words before: entries, and the remainders of all whole sets of these.
  unsigned entries = 0;
  int rests = 0;
  for (int begin = 0; begin < chunk.words; begin += kSumThreads) {
    if (begin != 0) __syncthreads();  // the round before has been read
    const int at = begin + thread;
    const unsigned first_set = entries / kPlane;
    const uint32_t word = at < chunk.words ? chunk.ones[at] : 0;
    const int here = __popc(word), set = first_set + thread;
    const int rest = set < chunk.sets() ? sum_planes(chunk.planes + set * r, r, kAllLanes) : 0;
    const int ones_through = warp_inclusive_sum(here), rests_through = warp_inclusive_sum(rest);
    memory.rests[thread] = rests_through - rest;
    if (lane == 31) {
      memory.ones_of_warp[warp] = ones_through;
      memory.rests_of_warp[warp] = rests_through;
    }
    if (thread == 0) {
      memory.rests[kSumThreads] = 0;
      memory.first = all;
      memory.last = 0;
    }
    __syncthreads();
    // Lane w has the sums of all before warp w, lane kSumWarps those of all.
    const int ones_of = lane < kSumWarps ? memory.ones_of_warp[lane] : 0;
    const int rests_of = lane < kSumWarps ? memory.rests_of_warp[lane] : 0;
    const int ones_before = entries + warp_inclusive_sum(ones_of) - ones_of;
    const int rests_before = rests + warp_inclusive_sum(rests_of) - rests_of;
    memory.rests_before[thread] = rests_through - rest + __shfl_sync(kAllLanes, rests_before, warp);
    const unsigned entries_after = __shfl_sync(kAllLanes, ones_before, kSumWarps);
    const int all_rests = __shfl_sync(kAllLanes, rests_before, kSumWarps);
    if (thread == 0) memory.rests_before[kSumThreads] = all_rests;
    bool is_behind = false;
    if (at - static_cast<int>(lane) < chunk.words) {
      const auto before_set = [&](unsigned number) {
        return memory.rests[number - first_set] +
               __shfl_sync(kAllLanes, rests_before, (number - first_set) / 32);
      };
      const unsigned entry = __shfl_sync(kAllLanes, ones_before, warp) + ones_through - here;
      const unsigned most = entry + max(here, 1) - 1;
      // The first entry is not below `low`, the last one not above `high`.
      const int low = chunk.element(entry, 32 * at + __ffs(static_cast<int>(word)) - 1) +
                      before_set(entry / kPlane);
      const int high = chunk.element(most, 32 * at + 31 - __clz(static_cast<int>(word))) +
                       before_set(most / kPlane) + (kPlane << r);
      is_behind = here != 0 && low >= chunk.end;
      const bool may_be_in = here != 0 && high >= chunk.begin && (!is_behind || chunk.is_last());
      uint16_t* place = memory.places + (entry - entries);
      for (uint32_t left = may_be_in ? word : 0; left != 0; left &= left - 1) {
        *place++ = static_cast<uint16_t>(32 * thread + __ffs(static_cast<int>(left)) - 1);
      }
      // Words that may be in the tile follow each other, but for words without entries.
      const unsigned in = __ballot_sync(kAllLanes, may_be_in);
      if (may_be_in && (in & lanes_before) == 0) atomicMin(&memory.first, entry);
      if (may_be_in && in >> lane == 1) atomicMax(&memory.last, entry + here);
      wrong |= entry + here > all;
    }
    const bool any_behind = __syncthreads_or(is_behind) != 0;
    const unsigned first = memory.first;
    const unsigned last = min(memory.last, all);
    const int tile_begin = chunk.begin;
    const unsigned length = chunk.end - tile_begin;
#pragma unroll 1
    for (unsigned g = first / kRiceGroup + warp; g * kRiceGroup < last; g += kSumWarps) {
      ValueGroup<VALUE> group;
      group.load(chunk, g);
      unsigned element[kGroupSets];
#pragma unroll
      for (int s = 0; s < kGroupSets; ++s) {
        const unsigned set = kGroupSets * g + s, own = kPlane * set + lane;
        element[s] = 0xffffffffu;
        if (set < first / kPlane || kPlane * set >= last) continue;
        const int sum = memory.rests_before[set - first_set] +
                        sum_planes(chunk.planes + set * r, r, lanes_through);
        if (own - first < last - first) {
          const int found = chunk.element(own, 32 * begin + memory.places[own - entries]) + sum;
          largest = max(largest, found);
          element[s] = found - tile_begin;
        }
      }
      add_group(group, chunk.bits, element, length, sums);
    }
    if (any_behind) break;
    rests = memory.rests_before[entries_after / kPlane - first_set];
    entries = entries_after;
  }
  wrong |= largest >= chunk.numel;
  if (chunk.is_last()) {
    wrong |= entries != all || chunk.ones[chunk.words - 1] == 0 ||
             stray_remainders(chunk.planes, chunk.entries, r) != 0;
  }
  return wrong;
}

// Adds a tile of a record; called by a whole block, as add_entries.
template <int VALUE>
__device__ __forceinline__ bool add_rice_chunk(const RiceChunk& chunk, RiceMemory& memory,
                                               float* sums) {
  if (chunk.words > 0) return add_entries<VALUE>(chunk, memory, sums);
  if (is_quantised(VALUE) && chunk.words < 0) add_all_values(chunk, sums);
  return chunk.entries < 0;
}

}  // namespace megatron_sparse
