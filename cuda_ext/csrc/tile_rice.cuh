// Finds a Rice record's part of a tile of 4096 elements, by a warp, and adds it, by a block.
//
// A chunk has one tile or more. For each of them a warp reads the chunk's index words from the
// begin on, as far as the tile reaches, five a lane: it counts their entries, and adds the
// remainders of each set of 32 entries. From the sums before them follow bounds of the elements of
// a lane's entries, and so the words that may hold the tile's entries. Of these the block lists the
// places of all entries, of all records at once if they fit into shared memory, a word for each
// thread; then a warp takes 128 entries at a time, a lane one of each 32, so that planes are the
// same for all lanes.
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

constexpr int kLaneWords = 5;  // that a lane looks at: 31 lanes see most chunks at once
// The most words that may hold a tile's entries, of all lanes with such words: a bit of the unary
// part is at least an element. At each end a set may reach two words beyond the tile.
constexpr int kMostTileWords = ((kTileWords + 4) / kLaneWords + 2) * kLaneWords;
constexpr int kMostTileGroups = kMostTileWords / kGroupSets + 2;
constexpr int kMostPlaces = 8192;  // at a time: 8 chunks' at 24 %
static_assert(32 * kMostTileWords <= kMostPlaces);
constexpr int kMostRoundSets = 32 * (kLaneWords + 1);

// A block's shared memory, for as many records as warps.
struct RiceMemory {
  RiceChunk chunks[kSumWarps];
  uint16_t entries_before[kSumWarps][kMostTileWords];  // before each word, in the words
  uint4 bases[kSumWarps][kMostTileGroups];  // of sets, from a group's first on; RiceChunk
  union {
    uint32_t bases_seen[kSumWarps][kMostRoundSets];  // of each set of the words at hand
    // Of the entries of several chunks, in their words. Whole groups are read, which begin before
    // the first place and end behind the last one.
    uint16_t places[kRiceGroup + kMostPlaces + kRiceGroup];
  };
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
    const int own = lane & distance;
    const uint32_t kept = low << own;
    other = __funnelshift_l(other, other, own != 0 ? 32 - distance : distance);
    word = (word & kept) | (other & ~kept);
  }
  return word;
}

// A group of quantised values; docs/wire-format.md. Held by a warp, of which a lane has its own
// value of each set.
struct QuantisedGroup {
  uint32_t scale, words;

  // `limit` counts the words of the chunk's values. Words of the next group do no harm.
  __device__ __forceinline__ void load(const uint32_t* values, int group, int limit, int bits) {
    const int at = group * (1 + kGroupSets * bits), own = at + 1 + threadIdx.x % 32;
    scale = values[at];
    words = own < limit ? values[own] : 0;
  }

  __device__ __forceinline__ float value(uint32_t code, int bits) const {
    const float base = ScalarLanes::as_float(scale & 0xffff0000u);
    const float step = ScalarLanes::as_float(scale << 16);
    const uint32_t top = code << (32 - bits), sign = top & 0x80000000u;
    // Compiled without contraction (sources.py); the product is exact anyway.
    const float level = base + static_cast<float>((top ^ sign) >> (32 - bits)) * step;
    return ScalarLanes::as_float(ScalarLanes::as_bits(level) | sign);
  }

  // Apart from `load`, so that what is loaded comes meanwhile. A lane decodes the code that is its
  // number, and lanes fetch their values from each other; codes of 8 bits are too many for that.
  __device__ __forceinline__ void decode(int bits, float (&values)[kGroupSets]) const {
    uint32_t code = transpose_bits(words);
    if (bits < 8) {
      const float own = value(threadIdx.x % 32, bits);
#pragma unroll
      for (int s = 0; s < kGroupSets; ++s, code >>= bits) {
        values[s] = __shfl_sync(kAllLanes, own, code);
      }
    } else {
#pragma unroll
      for (int s = 0; s < kGroupSets; ++s, code >>= bits) values[s] = value(code, bits);
    }
  }
};

// The same of raw values.
template <int VALUE>
struct RawGroup {
  float loaded[kGroupSets];

  __device__ __forceinline__ void load(const uint32_t* values, int group, int entries, int) {
#pragma unroll
    for (int s = 0; s < kGroupSets; ++s) {
      const int entry = kRiceGroup * group + kPlane * s + threadIdx.x % 32;
      loaded[s] = 0;
      if (entry < entries) {
        loaded[s] = value_at<VALUE>(reinterpret_cast<const uint8_t*>(values), entry);
      }
    }
  }

  __device__ __forceinline__ void decode(int, float (&value)[kGroupSets]) const {
#pragma unroll
    for (int s = 0; s < kGroupSets; ++s) value[s] = loaded[s];
  }
};

template <int VALUE>
using ValueGroup = std::conditional_t<is_quantised(VALUE), QuantisedGroup, RawGroup<VALUE>>;

// Adds a lane's values of a group to the elements that are there.
template <class Group>
__device__ __forceinline__ void add_group(const Group& group, int bits,
                                          const unsigned (&element)[kGroupSets],
                                          const bool (&there)[kGroupSets], float* sums) {
  float sum[kGroupSets], value[kGroupSets];
#pragma unroll
  for (int s = 0; s < kGroupSets; ++s) {
    if (there[s]) sum[s] = sums[element[s]];
  }
  group.decode(bits, value);
#pragma unroll
  for (int s = 0; s < kGroupSets; ++s) {
    if (there[s]) sums[element[s]] = sum[s] + value[s];
  }
}

// Adds a tile of `count` records without indices. An element is always the same thread's, so no
// barrier keeps the ranks' order.
__device__ __forceinline__ void add_all_values(const RiceChunk* chunks, int count, float* sums) {
  const int lane = threadIdx.x % 32, length = chunks[0].entries, bits = chunks[0].bits;
  const int limit = chunks[0].value_words;
#pragma unroll 1
  for (int g = threadIdx.x / 32; g * kRiceGroup < length; g += kSumWarps) {
    QuantisedGroup group;
    group.load(chunks[0].values, g, limit, bits);
    const int first = g * kRiceGroup + lane;
    float sum[kGroupSets] = {};
#pragma unroll
    for (int s = 0; s < kGroupSets; ++s) {
      if (first + kPlane * s < length) sum[s] = sums[first + kPlane * s];
    }
#pragma unroll 1
    for (int k = 1; k <= count; ++k) {
      QuantisedGroup next = group;
      if (k < count) next.load(chunks[k].values, g, limit, bits);
      float value[kGroupSets];
      group.decode(bits, value);
#pragma unroll
      for (int s = 0; s < kGroupSets; ++s) sum[s] += value[s];
      group = next;
    }
#pragma unroll
    for (int s = 0; s < kGroupSets; ++s) {
      if (first + kPlane * s < length) sums[first + kPlane * s] = sum[s];
    }
  }
}

// Whether a chunk is right of which `seen` entries have been; called by a whole warp, of which a
// lane gets false. `next_base` is that of the set behind the next entry's.
__device__ __forceinline__ bool ends_right(const RiceChunk& chunk, unsigned seen,
                                           uint32_t next_base) {
  const int entries = static_cast<int>(seen);
  const uint32_t last_word = chunk.ones()[chunk.words - 1];
  const int unused = kPlane - entries % kPlane;  // of the next entry's set
  const int place = 32 * chunk.words - __clz(static_cast<int>(last_word));
  return entries == chunk.entries && last_word != 0 &&
         static_cast<int>(next_base + ((place + unused) << chunk.r)) - unused <= chunk.numel &&
         stray_remainders(chunk.planes(), entries, chunk.r) == 0;
}

// Finds the words that hold the entries of a tile; called by a whole warp, which gets false if
// something that it has seen is wrong. A chunk's last tile checks all that check_rice_chunk does.
__device__ __forceinline__ bool find_entries(RiceChunk& chunk, uint16_t* entries_before,
                                             uint32_t* bases, uint32_t* bases_seen) {
  const int lane = threadIdx.x % 32, r = chunk.r;
  const uint32_t *planes = chunk.planes(), *ones = chunk.ones();
  unsigned entries = 0;              // of the words before
  uint32_t base = 0, next_base = 0;  // of the next entry's set, and of the one behind it
  int first_word = -1;
  unsigned first = 0;
  for (int begin = 0; begin < chunk.words; begin += 31 * kLaneWords) {
    // The last lane has no words: it stands behind those of the others.
    const int at = begin + kLaneWords * lane;
    const int left = lane < 31 ? chunk.words - at : 0;
    uint32_t word[kLaneWords];
    unsigned here = 0;
#pragma unroll
    for (int i = 0; i < kLaneWords; ++i) {
      word[i] = i < left ? ones[at + i] : 0;
      here += __popc(word[i]);
    }
    const unsigned last = entries + warp_inclusive_sum(here), entry = last - here;
    const unsigned all = __shfl_sync(kAllLanes, last, 31);
    const int first_set = entries / kPlane, sets = all / kPlane + 2 - first_set;
    for (int s = 2 * lane; s - 2 * lane < sets; s += 64) {
      uint32_t step[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int set = first_set + s + i;
        step[i] = kPlane - (kPlane << r);
        if (kPlane * set < chunk.entries) step[i] += sum_remainders(planes, set, r, kAllLanes);
      }
      const uint32_t through = base + warp_inclusive_sum(step[0] + step[1]);
      bases_seen[s] = through - step[1] - step[0];
      bases_seen[s + 1] = through - step[1];
      base = __shfl_sync(kAllLanes, through, 31);
    }
    __syncwarp();
    // Entries from word `at` on are elements from `low` on, those before it are below `high`: the
    // remainders of the entry's set are between none and all.
    const uint32_t* own = bases_seen + (entry / kPlane - first_set);
    const int in_set = entry % kPlane;
    const int place = ((32 * min(at, chunk.words) - in_set) << r) + in_set;
    const int low = own[0] + place, high = own[1] + place - kPlane + (kPlane << r);
    const bool is_behind = low >= chunk.end();
    const unsigned in = __ballot_sync(kAllLanes, at < chunk.words && !is_behind) &
                        __ballot_sync(kAllLanes, high > chunk.begin) >> 1;
    if (in != 0) {
      const int least = __ffs(static_cast<int>(in)) - 1, most = 31 - __clz(static_cast<int>(in));
      const unsigned least_entry = __shfl_sync(kAllLanes, entry, least);
      const unsigned last_entry = __shfl_sync(kAllLanes, last, most);
      if (first_word < 0) {
        first_word = begin + kLaneWords * least;
        first = least_entry;
      }
      if (lane == 0) {
        const int end = min(begin + kLaneWords * (most + 1), chunk.words);
        chunk.first_word = first_word + chunk.planes_end;
        chunk.offset = ((32 * first_word) << r) - chunk.begin;
        chunk.word_count = end - first_word;
        chunk.first = first;
        chunk.last = last_entry;
      }
    }
    if (first_word >= 0) {
      int before = entry - first;
#pragma unroll
      for (int i = 0; i < kLaneWords; ++i) {
        const unsigned to = at + i - first_word;
        if (to < kMostTileWords) entries_before[to] = static_cast<uint16_t>(before);
        before += __popc(word[i]);
      }
#pragma unroll 1
      for (int s = lane; s < sets; s += 32) {
        const unsigned to = first_set + s - first / kRiceGroup * kGroupSets;
        if (to < kMostTileGroups * kGroupSets) bases[to] = bases_seen[s];
      }
    }
    entries = all;
    base = bases_seen[sets - 2];
    next_base = bases_seen[sets - 1];
    __syncwarp();  // the sums have been read
    if (__any_sync(kAllLanes, is_behind)) break;
  }
  bool wrong = entries > static_cast<unsigned>(chunk.entries);
  if (chunk.end() == chunk.numel) wrong |= !ends_right(chunk, entries, next_base);
  return !__any_sync(kAllLanes, wrong);
}

// Finds and checks the part of a tile that is chunk k's; called by a whole warp, which gets false
// if the part is wrong.
__device__ __forceinline__ bool find_rice_part(RiceMemory& memory, int k) {
  RiceChunk& chunk = memory.chunks[k];
  if (chunk.words <= 0) return chunk.entries >= 0;
  if (find_entries(chunk, memory.entries_before[k], &memory.bases[k]->x, memory.bases_seen[k])) {
    return true;
  }
  if (threadIdx.x % 32 == 0) chunk.word_count = chunk.first = chunk.last = 0;
  return false;
}

// Lists the places of the entries of the words of the chunks from `begin` on, of as many before
// `end` as there is room for; called by a whole block. Returns the first one that is not listed.
__device__ __forceinline__ int list_places(RiceMemory& memory, int begin, int end) {
  const int lane = threadIdx.x % 32;
  const bool is_here = begin <= lane && lane < end;
  const int count = is_here ? memory.chunks[lane].last - memory.chunks[lane].first : 0;
  const int through = warp_inclusive_sum(count);
  end = __popc(__ballot_sync(kAllLanes, lane < end && through <= kMostPlaces));
  // Each chunk gets 8, 4, 2 or 1 of the warps.
  static_assert(kSumWarps == 8);
  const int log2_threads = __clz(end - begin - 1) - 24, threads = 1 << log2_threads;
  const int k = begin + (static_cast<int>(threadIdx.x) >> log2_threads);
  if (k >= end) return end;
  RiceChunk& chunk = memory.chunks[k];
  const int thread = threadIdx.x & (threads - 1);
  const int before = kRiceGroup + __shfl_sync(kAllLanes, through - count, k);
  if (thread == 0) chunk.listed = before - chunk.first % kRiceGroup;
#pragma unroll 1
  for (int w = thread; w < chunk.word_count; w += threads) {
    uint32_t left = chunk.values[chunk.first_word + w];
    uint16_t* place = memory.places + before + memory.entries_before[k][w] + __popc(left);
#pragma unroll 4
    while (left != 0) {
      const int bit = 31 - __clz(static_cast<int>(left));
      *--place = static_cast<uint16_t>(32 * w + bit);
      left &= ~(1u << bit);
    }
  }
  return end;
}

// Adds those of chunk k's entries that are in the tile.
template <int VALUE>
__device__ __forceinline__ void add_entries(const RiceMemory& memory, int k, float* sums) {
  const RiceChunk& chunk = memory.chunks[k];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t* values = chunk.values;
  const unsigned first = chunk.first, last = chunk.last, length = chunk.length;
  const int limit = is_quantised(VALUE) ? chunk.value_words : chunk.entries;
  const int bits = chunk.bits, r = chunk.r;
  const int planes = chunk.value_words, planes_end = chunk.planes_end;
  const unsigned own = lane - (lane << r) + chunk.offset;
  const uint32_t lanes_through = kAllLanes >> (31 - lane);
  unsigned g = first / kRiceGroup + warp, entry = warp * kRiceGroup + lane;  // from a group on
  const uint16_t* places = memory.places + chunk.listed;
  const uint4* bases = memory.bases[k] + warp;
#pragma unroll 1
  for (; g * kRiceGroup < last; g += kSumWarps, bases += kSumWarps) {
    ValueGroup<VALUE> group;
    group.load(values, g, limit, bits);
    unsigned element[kGroupSets];
    int at[kGroupSets];
#pragma unroll
    for (int s = 0; s < kGroupSets; ++s) {
      element[s] = places[entry + kPlane * s];  // another's where none is listed
      at[s] = s == 0 ? planes + (kGroupSets * g + 1) * r : min(at[s - 1] + r, planes_end);
    }
    const auto add_plane = [&] {
#pragma unroll
      for (int s = 0; s < kGroupSets; ++s) {
        element[s] = 2 * element[s] + __popc(*(values + at[s] - 1) & lanes_through);
      }
    };
    if (r > 0) add_plane();  // apart: often there is no other
#pragma unroll 1
    for (int p = 2; p <= r; ++p) {
      for (int& each : at) --each;
      add_plane();
    }
    const uint4 base = *bases;
    const unsigned from[kGroupSets] = {base.x, base.y, base.z, base.w};
    bool there[kGroupSets];
#pragma unroll
    for (int s = 0; s < kGroupSets; ++s) {
      element[s] += from[s] + own;
      there[s] = entry + kPlane * s - first % kRiceGroup < last - first && element[s] < length;
    }
    add_group(group, bits, element, there, sums);
    entry += kSumWarps * kRiceGroup;
  }
}

// Adds chunk k's part of a tile and, if it has no indices, those of the chunks behind it that have
// none either; called by a whole block when the places are listed. Chunks of the bits in `whole`
// have no indices. Returns how many.
template <int VALUE>
__device__ __forceinline__ int add_rice_parts(const RiceMemory& memory, unsigned whole, int k,
                                              float* sums) {
  if (!is_quantised(VALUE) || (whole >> k & 1) == 0) {
    add_entries<VALUE>(memory, k, sums);
    return 1;
  }
  const int count = __ffs(static_cast<int>(~(whole >> k))) - 1;
  add_all_values(memory.chunks + k, count, sums);
  return count;
}

}  // namespace megatron_sparse
