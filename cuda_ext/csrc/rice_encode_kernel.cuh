// The last launch of the CUDA encoders of Rice records with indices, but for what is coded at once
// (rice_encode_once.cuh): quantises and codes what compaction has staged, straight into the
// records, and leaves in the residual what the levels lose. The bytes are the CPU's
// (rice_encode.cpp).
//
// Of a record with indices, a block takes one chunk after the other, lists its entries, and each
// warp codes groups of 128; of dense records a warp takes one tile after the other. Bytes an
// element, at density d, v bytes a staged value and an e-byte residual: 1/4 + d v read, the message
// written; of quantised values d e written and, unless the residual is zero there, d e read.
#pragma once

#include "rice_encode_groups.cuh"
#include "rice_encode_records.cuh"

namespace megatron_sparse {

// A call, as the kernel has it.
struct RiceCall {
  EncodeArguments encode;
  RiceArguments rice;
  HashSeed residual_seed;
  bool keeps_signs;   // of -0.0, in dense records
  bool entries_rest;  // whether the residual may be other than zero where an entry is
};

template <int DTYPE>
using StagedValue = typename RawType<is_quantised(DTYPE) ? int{kFp32} : DTYPE>::type;

__device__ __forceinline__ float load_rest(const RiceCall& call, int64_t at) {
  if (call.rice.residual_dtype == kFp32) return static_cast<const float*>(call.rice.residual)[at];
  const uint32_t bits = static_cast<const uint16_t*>(call.rice.residual)[at];
  return ScalarLanes::as_float(bits << 16);
}

__device__ __forceinline__ void store_rest(const RiceCall& call, int64_t at, float rest) {
  if (call.rice.residual_dtype == kFp32) {
    static_cast<float*>(call.rice.residual)[at] = rest;
  } else {
    static_cast<uint16_t*>(call.rice.residual)[at] = static_cast<uint16_t>(
        narrow_residual(rest, call.residual_seed, call.rice.key >= 0, static_cast<uint64_t>(at)));
  }
}

constexpr int kMostListed = kRiceGroup - 1 + kPiciTile;  // a tile's, behind the rest of a group
constexpr int kListBegin = 4;                            // aligned for a lane's four neighbours
constexpr int kWindowWords = 512;
constexpr int kRiceBlocks = 4;  // resident on a multiprocessor: 64 registers a thread

struct ChunkHead {
  ChunkPlace place;
  int r;
  uint32_t* words;        // of the chunk in its record: its values
  uint32_t* index_words;  // and behind these
};

// A block's shared memory.
struct ChunkMemory {
  ChunkHead heads[2];  // of this chunk and of the next
  // The element behind each listed entry, in the chunk. Before the list that of the entry before
  // it, or 0; behind it room for the rest of a group.
  __align__(16) uint32_t behind[kListBegin + kMostListed + 1];
  uint32_t window[kWindowWords];  // of the unary part
  uint32_t last_one;              // the place in it of the last listed entry's 1
};

// Dense records and Rice records with indices, for plan_records.
template <int DTYPE>
struct RiceRecords {
  const Workspace& work;
  const EncodeArguments& call;
  const RiceArguments& rice;

  __device__ __forceinline__ int64_t chunks(int64_t s) const {
    return chunks_of(call.segment_offsets[s + 1] - call.segment_offsets[s], rice.log2_span);
  }

  __device__ __forceinline__ RecordPlan plan(int64_t s) const {
    const int64_t numel = call.segment_offsets[s + 1] - call.segment_offsets[s];
    RecordPlan plan = counted_plan(work, call, s);
    const int value_bytes = is_quantised(DTYPE) ? 2 : sizeof(StagedValue<DTYPE>);
    plan.kind = kKindDense;
    plan.sections = sections_of(kKindDense, numel, plan.nnz, 0, 0, value_bytes);
    if (call.segment_kinds[s] != kKindRice) return plan;
    const int64_t before = first_slot(work, rice, s) - 1;
    const int64_t words = prefix_after(work.chunk_states, before + chunks(s)) -
                          prefix_after(work.chunk_states, before);
    const Sections sections = rice_sections(rice, chunks(s), words);
    if (!is_quantised(DTYPE) && sections.payload >= plan.sections.payload) return plan;
    plan.kind = kKindRice;
    plan.sections = sections;
    return plan;
  }

  __device__ __forceinline__ int dtype_of(const RecordPlan& plan) const {
    return rice_dtype_of(rice, plan);
  }

  __device__ __forceinline__ void start(const RecordPlan& plan, int64_t s, uint8_t* payload) const {
    start_record(rice, plan, chunks(s), payload);
  }
};

// Called by a whole warp: the values of the group of the chunk's entries from `first` on, which are
// listed from `listed` on.
template <int DTYPE>
__device__ __forceinline__ void place_group_values(const Workspace& work, const RiceCall& call,
                                                   const ChunkHead& head, const uint32_t* listed,
                                                   int first, int count) {
  using Staged = StagedValue<DTYPE>;
  const ChunkPlace& chunk = head.place;
  const int lane = threadIdx.x % 32, lane_first = kLaneValues * lane;
  const Staged* staged = static_cast<const Staged*>(work.values) + chunk.staged + first;
  if constexpr (!is_quantised(DTYPE)) {
    Staged* values = reinterpret_cast<Staged*>(head.words) + first;
    for (int i = lane; i < count; i += 32) values[i] = staged[i];
    const bool odd_end = first + count == chunk.entries && count % 2 != 0;
    if (sizeof(Staged) == 2 && odd_end && lane == 0) values[count] = 0;
  } else {
    constexpr int kBits = code_bits(DTYPE);
    float x[kLaneValues];
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const int at = lane_first + i;
      x[i] = at < count ? ScalarLanes::as_float(staged[at]) : 0.0f;
      if (at < count && call.entries_rest) x[i] += load_rest(call, chunk.begin - 1 + listed[at]);
    }
    quantise_group<kBits, false>(x, count, head.words + first / kRiceGroup * kGroupWords<kBits>);
    if (call.rice.residual == nullptr) return;
    const uint4 four = *reinterpret_cast<const uint4*>(listed + lane_first);
    const uint32_t behind[kLaneValues] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      if (lane_first + i < count) store_rest(call, chunk.begin - 1 + behind[i], x[i]);
    }
  }
}

// Called by a whole warp: the remainders of the same group's gaps.
__device__ __forceinline__ void place_remainders(const ChunkHead& head, const uint32_t* listed,
                                                 int first, int count) {
  const int lane_first = kLaneValues * (threadIdx.x % 32), r = head.r;
  const uint4 four = *reinterpret_cast<const uint4*>(listed + lane_first);
  const uint32_t behind[kLaneValues] = {four.x, four.y, four.z, four.w};
  uint32_t gap[kLaneValues], previous = listed[lane_first - 1];
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    gap[i] = lane_first + i < count ? behind[i] - previous - 1 : 0;
    previous = behind[i];
  }
#pragma unroll 1
  for (int plane = 0; plane < r; plane += 4) {
    uint32_t numbers = 0;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) numbers |= (gap[i] >> plane & 15) << 4 * i;
    store_planes(gather_planes(numbers), plane, r, count, head.index_words + first / kPlane * r);
  }
}

// Called by a whole block: lists the entries of tiles of a chunk, whose first `coded` entries are
// coded, and sets in the window of the unary part, which begins at word `from`, their 1s. A warp
// has a quarter of the words of a tile.
__device__ __forceinline__ void list_tiles(const Workspace& work, const ChunkHead& head, int tile,
                                           int tile_end, int coded, uint32_t from,
                                           ChunkMemory& memory) {
  const ChunkPlace& chunk = head.place;
  const int r = head.r;
  const int lane = threadIdx.x % 32, quarter = threadIdx.x / 32 % 4;
  const int end = chunk.entries_before(tile_end) - coded;
#pragma unroll 1
  for (tile += threadIdx.x / 128; tile < tile_end; tile += kRiceWarps / 4) {
    const uint4 four =
        reinterpret_cast<const uint4*>(work.words)[(chunk.first_tile + tile) * 32 + lane];
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
    int own = 0, at = chunk.entries_before(tile) - coded;
    uint32_t left = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (w == quarter) {
        left = words[w];
        at += own;
      }
      own += __popc(words[w]);
    }
    at += warp_inclusive_sum(own) - own;
    if (left == 0) continue;
    const int w = 4 * lane + quarter;
    const uint32_t word_begin = static_cast<uint32_t>(tile) * kPiciTile + 32 * w;
    uint32_t behind = word_begin + __ffs(static_cast<int>(left));
    const uint32_t place =
        r == 0 ? behind - 1 : work.unary[(chunk.first_tile + tile) * kTileWords + w];
    uint32_t ones = 1;
    int offset = 0;  // of the entry's 1 behind the first: less than 32, like that of the entry
    for (;;) {
      memory.behind[kListBegin + at++] = behind;
      left &= left - 1;
      if (left == 0) break;
      const uint32_t next = word_begin + __ffs(static_cast<int>(left));
      offset += ((next - behind - 1) >> r) + 1;
      ones |= uint32_t{1} << offset;
      behind = next;
    }
    const uint64_t shifted = uint64_t{ones} << (place % 32);
    // A word before `from` becomes a large number.
    const uint32_t word = place / 32 - from, high = static_cast<uint32_t>(shifted >> 32);
    if (word < kWindowWords) atomicOr(&memory.window[word], static_cast<uint32_t>(shifted));
    if (high != 0 && word + 1 < kWindowWords) atomicOr(&memory.window[word + 1], high);
    if (at == end) memory.last_one = place + offset;
  }
}

// Called by a whole block: codes a chunk that has entries. Its tiles are listed once each, as many
// at a time as the list has room for. What is left of a group, and of a word of the unary part, is
// coded with the next ones.
template <int DTYPE>
__device__ __forceinline__ void place_chunk(const Workspace& work, const RiceCall& call,
                                            const ChunkHead& head, ChunkMemory& memory) {
  const ChunkPlace& chunk = head.place;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  uint32_t* unary = head.index_words + planes_of(chunk.entries) * head.r;
  if (thread == 0) memory.behind[kListBegin - 1] = memory.last_one = 0;
  uint32_t from = 0;
  int coded = 0;
  const int tile_end = static_cast<int>(chunk.tile_end - chunk.first_tile);
  for (int tile = 0; tile < tile_end;) {
    const int to = tile + 1 + lane;
    const bool fits = to <= tile_end && chunk.entries_before(to) - coded <= kMostListed;
    const int end = tile + __popc(__ballot_sync(kAllLanes, fits));
    const int listed = chunk.entries_before(end) - coded;
    const bool is_last = end == tile_end;
    uint32_t rest;
    do {  // only once, but for gaps that are very long
      __syncthreads();
      list_tiles(work, head, tile, end, coded, from, memory);
      __syncthreads();
      rest = memory.last_one / 32 - from;
      const uint32_t begun = rest < kWindowWords && !is_last ? memory.window[rest] : 0;
#pragma unroll 1
      for (uint32_t k = thread; k < min(rest + is_last, uint32_t{kWindowWords});
           k += kRiceThreads) {
        unary[from + k] = memory.window[k];
      }
      __syncthreads();
#pragma unroll 1
      for (uint32_t k = thread; k < min(rest + 1, uint32_t{kWindowWords}); k += kRiceThreads) {
        memory.window[k] = k == 0 ? begun : 0;
      }
      from += min(rest, uint32_t{kWindowWords});
    } while (rest >= kWindowWords);
    const int whole = is_last ? listed : listed / kRiceGroup * kRiceGroup;
#pragma unroll 1
    for (int first = warp * kRiceGroup; first < whole; first += kRiceWarps * kRiceGroup) {
      const uint32_t* begin = memory.behind + kListBegin + first;
      const int count = min(whole - first, kRiceGroup);
      place_remainders(head, begin, coded + first, count);
      place_group_values<DTYPE>(work, call, head, begin, coded + first, count);
    }
    if (!is_last) {
      const bool stays = thread <= listed - whole;
      uint32_t* begin = memory.behind + kListBegin - 1 + thread;
      const uint32_t behind = stays ? begin[whole] : 0;
      __syncthreads();
      if (stays) *begin = behind;
    }
    coded += whole;
    tile = end;
  }
}

// Called by one thread: begins the chunk in a slot.
template <int DTYPE>
__device__ __forceinline__ void start_chunk(const Workspace& work, const RiceCall& call,
                                            unsigned slot, ChunkHead& head) {
  ChunkPlace chunk = chunk_at(work, call.encode, call.rice, slot);
  if (work.plans[chunk.segment].kind != kKindRice) chunk.entries = chunk.numel = 0;
  head.place = chunk;
  if (chunk.numel == 0) return;
  head.words = write_row(work, call.encode, call.rice, slot, chunk);
  head.index_words = head.words + value_words(DTYPE, chunk.entries);
  if (chunk.entries > 0) head.r = rice_parameter(chunk.numel, chunk.entries);
}

// Records with indices: a block takes one chunk after the other.
template <int DTYPE>
__device__ __forceinline__ void place_chunks(const Workspace& work, const RiceCall& call,
                                             ChunkMemory& memory) {
  // As many as tickets can count.
  const unsigned slots =
      static_cast<unsigned>(first_slot(work, call.rice, call.encode.segment_count));
  __syncthreads();  // the tiles' memory is free
  for (int k = threadIdx.x; k < kWindowWords; k += kRiceThreads) memory.window[k] = 0;
  if (threadIdx.x == 0) memory.heads[1].place.entries = 0;
  __syncthreads();
  int turn = 0;
  for (unsigned slot = blockIdx.x;; slot += gridDim.x, turn ^= 1) {
    const ChunkHead& chunk = memory.heads[turn ^ 1];
    if (chunk.place.entries > 0) place_chunk<DTYPE>(work, call, chunk, memory);
    // The last warp, which often has one group less, begins the next one while others code.
    if (slot >= slots) return;
    if (threadIdx.x == kRiceThreads - 32) {
      start_chunk<DTYPE>(work, call, slot, memory.heads[turn]);
    }
    __syncthreads();
  }
}

// Called by a whole warp: a tile of a segment that is sent whole beside quantised values.
__device__ __forceinline__ void round_tile(const RiceCall& call, const TileMove<uint32_t>& move,
                                           int64_t begin) {
  const int lane = threadIdx.x % 32;
  uint16_t* values = reinterpret_cast<uint16_t*>(move.payload + move.sections.values);
  for (int w = 0; w < kTileWords; ++w) {
    const int at = 32 * w + lane;
    if (at >= move.length) return;
    float x = ScalarLanes::as_float(move.signed_element(w));
    if (call.rice.residual != nullptr) x += load_rest(call, begin + at);
    const RoundedValue rounded = round_kept(x);
    values[move.first + at] = static_cast<uint16_t>(rounded.sent);
    if (call.rice.residual != nullptr) store_rest(call, begin + at, rounded.rest);
  }
}

// Dense records: a warp takes one tile after the other.
template <int DTYPE>
__device__ __forceinline__ void place_tiles(const Workspace& work, const RiceCall& call,
                                            TileWords& bits) {
  using Staged = StagedValue<DTYPE>;
  const EncodeArguments& encode = call.encode;
  const int64_t tile_count = work.tile_begin[encode.segment_count];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kRiceWarps;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kRiceWarps + threadIdx.x / 32;
       tile < tile_count; tile += warps) {
    const int64_t segment = find_range(work.tile_begin, encode.segment_count, tile);
    const RecordPlan plan = work.plans[segment];
    if (plan.kind == kKindRice) continue;
    const int64_t from = encode.segment_offsets[segment];
    const int64_t first = (tile - work.tile_begin[segment]) * kPiciTile;
    const int64_t left = encode.segment_offsets[segment + 1] - from - first;
    const int64_t staged = staged_counts(work, encode, segment).before(tile);
    const int nnz = load_tile_words(bits, work.words + tile * kTileWords);
    const TileMove<Staged> move = {
        bits,
        static_cast<const Staged*>(work.values) + staged,
        nnz,
        staged - plan.nnz_before,
        first,
        static_cast<int>(min(left, static_cast<int64_t>(kPiciTile))),
        encode.out + plan.at + kHeaderBytes,
        plan.sections,
        work.signs + tile * kTileWords,
        call.keeps_signs ? work.has_signs + tile * kSignGroups : nullptr};
    if constexpr (!is_quantised(DTYPE)) {
      place_dense(move);
    } else {
      round_tile(call, move, from + first);
    }
  }
}

template <int DTYPE>
__global__ void __launch_bounds__(kRiceThreads, kRiceBlocks)
    rice_kernel(Workspace work, RiceCall call) {
  __shared__ union {
    TileWords tiles[kRiceWarps];
    ChunkMemory chunk;
  } memory;
  __shared__ PlanMemory planning;
  plan_once(RiceRecords<DTYPE>{work, call.encode, call.rice}, SpoiledBy{}, planning);
  if (call.encode.status[0] != kEncodeOk) return;
  place_tiles<DTYPE>(work, call, memory.tiles[threadIdx.x / 32]);
  place_chunks<DTYPE>(work, call, memory.chunk);
}

}  // namespace megatron_sparse
