// The CUDA encoders' launch after compaction: the format and place of each segment's record, and
// the move of staged bits and values to their records.
#pragma once

#include "tile_words.cuh"

namespace megatron_sparse {

constexpr int kPlaceThreads = 256;
constexpr int kPlaceWarps = kPlaceThreads / 32;

__device__ __forceinline__ void clear(uint8_t* from, uint8_t* to) {
  for (; from < to; ++from) *from = 0;
}

__device__ __forceinline__ bool has_failed(const Earlier& calls) {
  bool failed = false;
  for (int64_t i = threadIdx.x; i < calls.count; i += kPlaceThreads) {
    failed |= calls.words[i * calls.stride] != 0;
  }
  return failed;
}

// A block's shared memory for plan_records.
struct PlanMemory {
  int64_t warp_sums[kPlaceThreads / 32];
  unsigned int first_misfit;
};

// A segment's counts, after compaction and the limit.
__device__ __forceinline__ RecordPlan counted_plan(const Workspace& work,
                                                   const EncodeArguments& call, int64_t s) {
  const int64_t first = work.tile_begin[s] - 1, last = work.tile_begin[s + 1] - 1;
  RecordPlan plan = {};
  plan.nnz_before = prefix_after(work.nnz_states, first);
  plan.nnz = prefix_after(work.nnz_states, last) - plan.nnz_before;
  if (call.most_nnz != nullptr) plan.nnz = min(plan.nnz, call.most_nnz[s]);
  if (work.block_states != nullptr) {
    plan.blocks_before = prefix_after(work.block_states, first);
    plan.blocks = prefix_after(work.block_states, last) - plan.blocks_before;
  }
  return plan;
}

// The records of dense, COO, Pici and blocks: what plan_records needs of a family of formats.
template <class Value>
struct StagedRecords {
  const Workspace& work;
  const EncodeArguments& call;

  // Format and sections of a segment's record.
  __device__ __forceinline__ RecordPlan plan(int64_t s) const {
    const int64_t numel = call.segment_offsets[s + 1] - call.segment_offsets[s];
    RecordPlan plan = counted_plan(work, call, s);
    plan.kind = call.segment_kinds[s];
    if (plan.kind == kKindAdaptive) {
      const Sections coo = sections_of(kKindCoo, numel, plan.nnz, 0, 0, sizeof(Value));
      const Sections pici = sections_of(kKindPici, numel, plan.nnz, 0, 0, sizeof(Value));
      plan.kind = coo.payload <= pici.payload ? kKindCoo : kKindPici;
    }
    plan.sections =
        sections_of(plan.kind, numel, plan.nnz, plan.blocks, call.block_size, sizeof(Value));
    const Sections dense = sections_of(kKindDense, numel, plan.nnz, 0, 0, sizeof(Value));
    if (plan.sections.payload >= dense.payload) {
      plan.kind = kKindDense;
      plan.sections = dense;
    }
    return plan;
  }

  __device__ __forceinline__ int dtype_of(const RecordPlan&) const { return call.value_dtype; }

  // What the tiles do not write: sub-header, last entry of a table, padding.
  __device__ __forceinline__ void start(const RecordPlan& plan, int64_t s, uint8_t* payload) const {
    const bool pici = plan.kind == kKindPici || plan.kind == kKindPiciPaper;
    const int64_t tiles = work.tile_begin[s + 1] - work.tile_begin[s];
    const int64_t index_count = plan.kind == kKindCoo      ? plan.nnz
                                : plan.kind == kKindBlocks ? plan.blocks
                                : pici                     ? tiles + 1
                                                           : 0;
    uint32_t* indices = reinterpret_cast<uint32_t*>(payload + plan.sections.indices);
    if (pici) indices[tiles] = static_cast<uint32_t>(plan.nnz);
    if (plan.kind == kKindBlocks) {
      uint32_t* subheader = reinterpret_cast<uint32_t*>(payload);
      subheader[0] = static_cast<uint32_t>(call.block_size);
      subheader[1] = static_cast<uint32_t>(plan.blocks);
      subheader[2] = subheader[3] = 0;
    }
    clear(payload + plan.sections.indices + 4 * index_count, payload + plan.sections.values);
    clear(payload + plan.sections.values_end, payload + plan.sections.payload);
  }
};

// Called by one block, after compaction: sizes, places, headers and padding of all records.
template <class Records>
__device__ __forceinline__ void plan_records(const Records& records, const SpoiledBy& spoiled,
                                             PlanMemory& shared) {
  const Workspace& work = records.work;
  const EncodeArguments& call = records.call;
  if (threadIdx.x == 0) shared.first_misfit = 0xffffffffu;
  if (call.status[0] != kEncodeOk) {
    for (int64_t s = threadIdx.x; s < call.segment_count; s += kPlaceThreads) {
      call.segment_bytes[s] = 0;
      call.nnz[s] = 0;
    }
    return;
  }
  int64_t used = 0;
  for (int64_t begin = 0; begin < call.segment_count; begin += kPlaceThreads) {
    const int64_t s = begin + threadIdx.x;
    int64_t bytes = 0;
    RecordPlan plan = {};
    if (s < call.segment_count) {
      plan = records.plan(s);
      bytes = kHeaderBytes + plan.sections.payload;
    }
    int64_t total;
    plan.at = used + block_exclusive_sum<kPlaceThreads>(bytes, shared.warp_sums, total);
    used += total;
    if (s < call.segment_count) {
      if (call.slots != nullptr) {
        plan.at = call.slots[s];
        if (bytes > call.slots[s + 1] - plan.at) {
          atomicMin(&shared.first_misfit, static_cast<unsigned int>(s));
        }
      }
      work.plans[s] = plan;
      call.segment_bytes[s] = bytes;
      call.nnz[s] = plan.nnz;
    }
  }
  __syncthreads();  // all have read the status
  const unsigned int first_misfit = shared.first_misfit;
  if (first_misfit != 0xffffffffu) {
    if (threadIdx.x == 0) {
      call.status[0] = kEncodeSlot;
      call.status[1] = first_misfit;
      call.status[2] = call.segment_bytes[first_misfit];
      call.status[3] = call.slots[first_misfit + 1] - call.slots[first_misfit];
    }
    return;
  }
  if (call.slots == nullptr && used > call.capacity) {
    if (threadIdx.x == 0) {
      call.status[0] = kEncodeCapacity;
      call.status[2] = used;
      call.status[3] = call.capacity;
    }
    return;
  }
  for (int64_t s = threadIdx.x; s < call.segment_count; s += kPlaceThreads) {
    const RecordPlan plan = work.plans[s];
    const int64_t offset = call.segment_offsets[s];
    Header header = {};
    header.magic = kMagic;
    header.version = kVersion;
    header.format = plan.kind & 0xf;
    header.dtype = static_cast<uint8_t>(records.dtype_of(plan));
    header.flags = plan.kind == kKindPici ? kFlagLinear : 0;
    header.numel = static_cast<uint64_t>(call.segment_offsets[s + 1] - offset);
    header.nnz = static_cast<uint64_t>(plan.nnz);
    header.payload_bytes = static_cast<uint64_t>(plan.sections.payload);
    header.offset = static_cast<uint64_t>(offset);
    header.step = call.step;
    header.checksum = checksum_of(header);
    *reinterpret_cast<Header*>(call.out + plan.at) = header;
    records.start(plan, s, call.out + plan.at + kHeaderBytes);
  }
  const bool failed = has_failed(spoiled.some) || has_failed(spoiled.others);
  // The barrier comes after the first record's header.
  if (__syncthreads_or(failed) && threadIdx.x == 0) call.out[0] = 0;
}

// Lets the first block of the launch plan the records; the others wait for it. It has begun before
// they ask, so the wait ends on any GPU.
template <class Records>
__device__ __forceinline__ void plan_once(const Records& records, const SpoiledBy& spoiled,
                                          PlanMemory& shared) {
  const Workspace& work = records.work;
  __shared__ bool is_first;
  if (threadIdx.x == 0) is_first = atomicAdd(work.planners, 1u) == 0;
  __syncthreads();
  if (is_first) {
    plan_records(records, spoiled, shared);
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();  // the plans before the word that announces them
      atomicExch(work.planned, 1u);
    }
  } else if (threadIdx.x == 0) {
    while (*static_cast<const volatile unsigned int*>(work.planned) == 0) __nanosleep(64);
    __threadfence();
  }
  __syncthreads();
}

// The data that a warp needs to place one tile.
template <class Value>
struct TileMove {
  const TileWords& bits;
  const Value* staged;  // the tile's
  int nnz;
  int64_t rank;   // of the tile's first value in the record
  int64_t first;  // of the tile's first element in the segment
  int length;
  uint8_t* payload;
  Sections sections;
  const uint32_t* signs;     // the tile's
  const uint8_t* has_signs;  // null if none are wanted

  __device__ __forceinline__ Value* values() const {
    return reinterpret_cast<Value*>(payload + sections.values);
  }
  __device__ __forceinline__ uint32_t* indices() const {
    return reinterpret_cast<uint32_t*>(payload + sections.indices);
  }
  // The value of element 32 w + lane, zero where it was not kept.
  __device__ __forceinline__ Value element(int w) const {
    const int lane = threadIdx.x % 32;
    const uint32_t word = bits.word[w];
    if (!(word >> lane & 1)) return 0;
    return staged[bits.before[w] + __popc(word & ((1u << lane) - 1))];
  }
  // The same, with the sign of -0.0.
  __device__ __forceinline__ Value signed_element(int w) const {
    constexpr Value kNegativeZero = static_cast<Value>(Value{1} << (8 * sizeof(Value) - 1));
    const bool negative_zero = has_signs != nullptr && has_signs[w / kWarpWords] != 0 &&
                               (signs[w] >> (threadIdx.x % 32) & 1) != 0;
    return negative_zero ? kNegativeZero : element(w);
  }
  __device__ __forceinline__ void copy_values() const {
    for (int k = threadIdx.x % 32; k < nnz; k += 32) values()[rank + k] = staged[k];
  }
};

template <class Value>
__device__ __forceinline__ void place_dense(const TileMove<Value>& move) {
  const int lane = threadIdx.x % 32;
  for (int w = 0; w < kTileWords; ++w) {
    const int at = 32 * w + lane;
    if (at >= move.length) return;
    move.values()[move.first + at] = move.signed_element(w);
  }
}

template <class Value>
__device__ __forceinline__ void place_coo(const TileMove<Value>& move) {
  const int lane = threadIdx.x % 32;
  uint32_t* indices = move.indices() + move.rank + move.bits.before[4 * lane];
  for (int w = 4 * lane; w < 4 * lane + 4; ++w) {
    for (uint32_t word = move.bits.word[w]; word != 0; word &= word - 1) {
      *indices++ = static_cast<uint32_t>(move.first) + 32 * w + __ffs(static_cast<int>(word)) - 1;
    }
  }
  move.copy_values();
}

template <class Value>
__device__ __forceinline__ void place_pici(const TileMove<Value>& move) {
  const int lane = threadIdx.x % 32;
  const int64_t tile = move.first / kPiciTile;
  const uint32_t* word = move.bits.word + 4 * lane;
  reinterpret_cast<uint4*>(move.payload)[tile * 32 + lane] = {word[0], word[1], word[2], word[3]};
  if (lane == 0) move.indices()[tile] = static_cast<uint32_t>(move.rank);
  move.copy_values();
}

// The paper's order: a lane gathers columns `lane` and `lane + 32` of the 64x64 tile.
template <class Value>
__device__ __forceinline__ void place_pici_paper(const TileMove<Value>& move) {
  const int lane = threadIdx.x % 32;
  const int64_t tile = move.first / kPiciTile;
  uint64_t column[2] = {0, 0};
  for (int row = 0; row < 64; ++row) {
    column[0] |= static_cast<uint64_t>(move.bits.word[2 * row] >> lane & 1) << row;
    column[1] |= static_cast<uint64_t>(move.bits.word[2 * row + 1] >> lane & 1) << row;
  }
  int64_t rank = move.rank;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    reinterpret_cast<uint64_t*>(move.payload)[tile * 64 + half * 32 + lane] = column[half];
    const int count = __popcll(column[half]);
    const int inclusive = warp_inclusive_sum(count);
    Value* out = move.values() + rank + inclusive - count;
    for (uint64_t left = column[half]; left != 0; left &= left - 1) {
      const int w = 2 * (__ffsll(static_cast<long long>(left)) - 1) + half;
      *out++ = move.staged[move.bits.before[w] + __popc(move.bits.word[w] & ((1u << lane) - 1))];
    }
    rank += __shfl_sync(kAllLanes, inclusive, 31);
  }
  if (lane == 0) move.indices()[tile] = static_cast<uint32_t>(move.rank);
}

template <class Value>
__device__ __forceinline__ void place_blocks(const TileMove<Value>& move, int block_size,
                                             int64_t rank) {
  const int lane = threadIdx.x % 32;
  const int64_t blocks_before = move.first / block_size;
  uint64_t firsts = fold_blocks(nonzero_words(move.bits.word), block_size / 64);
  for (; firsts != 0; firsts &= firsts - 1, ++rank) {
    const int begin = __ffsll(static_cast<long long>(firsts)) - 1;  // in 64-bit words
    if (lane == 0) {
      move.indices()[rank] = static_cast<uint32_t>(blocks_before + begin * 64 / block_size);
    }
    Value* out = move.values() + rank * block_size;
    // Beyond the segment's end no bit is set, so zeros fill the last block.
    for (int w = 0; w < block_size / 32; ++w) out[32 * w + lane] = move.element(2 * begin + w);
  }
}

// The first block plans the records. Then a warp takes one tile after the other.
template <class Value>
__global__ void __launch_bounds__(kPlaceThreads, 4)
    place_kernel(Workspace work, EncodeArguments call, SpoiledBy spoiled) {
  __shared__ TileWords tiles[kPlaceWarps];
  __shared__ PlanMemory planning;
  plan_once(StagedRecords<Value>{work, call}, spoiled, planning);
  if (call.status[0] != kEncodeOk) return;
  TileWords& bits = tiles[threadIdx.x / 32];
  const int64_t tile_count = work.tile_begin[call.segment_count];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kPlaceWarps;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kPlaceWarps + threadIdx.x / 32;
       tile < tile_count; tile += warps) {
    const int64_t segment = find_range(work.tile_begin, call.segment_count, tile);
    const RecordPlan plan = work.plans[segment];
    const int64_t numel = call.segment_offsets[segment + 1] - call.segment_offsets[segment];
    const int64_t first = (tile - work.tile_begin[segment]) * kPiciTile;
    const int64_t staged = prefix_after(work.nnz_states, tile - 1);
    const int nnz = load_tile_words(bits, work.words + tile * kTileWords);
    const TileMove<Value> move = {
        bits,
        static_cast<const Value*>(work.values) + staged,
        nnz,
        min(staged - plan.nnz_before, plan.nnz),  // the limit has removed all elements
        first,
        static_cast<int>(min(numel - first, static_cast<int64_t>(kPiciTile))),
        call.out + plan.at + kHeaderBytes,
        plan.sections,
        work.signs + tile * kTileWords,
        work.has_signs + tile * kSignGroups};
    switch (plan.kind) {
      case kKindDense:
        place_dense(move);
        break;
      case kKindCoo:
        place_coo(move);
        break;
      case kKindPici:
        place_pici(move);
        break;
      case kKindPiciPaper:
        place_pici_paper(move);
        break;
      default:
        place_blocks(move, static_cast<int>(call.block_size),
                     prefix_after(work.block_states, tile - 1) - plan.blocks_before);
    }
  }
}

}  // namespace megatron_sparse
