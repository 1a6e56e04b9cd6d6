// A tile of a sum: 4096 elements in shared memory. The records of one or all ranks are added to it
// in rank order, read in place. Nothing of the sum is written before it is complete.
//
// Each warp handles 512 neighbours in every format, so each rank's record needs only one barrier of
// the block, at which the warps learn where their entries begin. Payloads are checked as they are
// read: a wrong one adds nothing and gives the rank an error.
//
// Bytes an element at density d and v bytes a value, for each rank: COO (4 + v) d and two searches
// of log32 nnz loads for each warp; Pici 1/8 + v d; dense v. The sum is written once.
#pragma once

#include "compact_kernel.cuh"
#include "peer_records.cuh"

namespace megatron_sparse {

constexpr int kWarpElements = kPiciTile / kCompactWarps;

// Where each warp's entries begin in a record, and where the tile's end; two in turn, so that one
// barrier for each sparse record is enough.
struct TileMarks {
  int64_t at[2][kCompactWarps + 1];
};

// One tile and its records: record k of `count` is records[k * stride]. In shared
// memory, with what an error needs, because these kernels are short of registers.
struct PeerTile {
  const DecodeRecord* records;
  int64_t stride;
  int64_t segment;  // in the bucket
  PeerControl* control;
  PeerStage stage;
  int rank;        // the rank that reads
  int first_rank;  // whose record 0 is
  int count;
  int number;  // in the segment
  int length;

  __device__ __forceinline__ bool is_last(const DecodeRecord& record) const {
    return number + 1 == tiles_of(record.numel);
  }
};

__device__ __attribute__((noinline)) inline void report_wrong(const PeerTile& tile, int k,
                                                              DecodeField field, int64_t value) {
  fail(tile.control, tile.stage,
       {kPeerRecord, tile.first_rank + k, tile.rank, tile.segment, field, value});
}

// The first of `count` ascending indices that is not below `wanted`; called by a whole warp. For
// indices that do not ascend the result is an arbitrary place, always the same.
__device__ __forceinline__ int64_t warp_lower_bound(const uint32_t* indices, int64_t count,
                                                    int64_t wanted) {
  const int lane = threadIdx.x % 32;
  int64_t low = 0, high = count;  // it is in [low, high]
  while (high - low > 0) {
    const int64_t step = (high - low + 31) / 32;
    const int64_t at = low + lane * step;
    const bool below = at < high && indices[at] < wanted;
    // The number of leading lanes that are below.
    const unsigned not_below = ~__ballot_sync(kAllLanes, below);
    const int lanes_below = not_below == 0 ? 32 : __ffs(static_cast<int>(not_below)) - 1;
    if (lanes_below == 0) return low;
    const int64_t last_below = low + (lanes_below - 1) * step;
    high = min(high, last_below + step);
    low = last_below + 1;
  }
  return low;
}

template <int VALUE>
__device__ __forceinline__ void add_dense_part(const DecodeRecord& record, const PeerTile& tile,
                                               float* sums) {
  using Raw = typename RawType<VALUE>::type;
  using Vector = Neighbours<Raw, 4>;
  const int lane = threadIdx.x % 32, begin = threadIdx.x / 32 * kWarpElements;
  // Payloads are 16-byte aligned and tiles a multiple of it.
  const Raw* values = reinterpret_cast<const Raw*>(record.payload) + tile.number * kPiciTile;
#pragma unroll
  for (int j = 0; j < kWarpElements / 128; ++j) {
    const int at = begin + j * 128 + lane * 4;
    if (at + 4 <= tile.length) {
      const Vector added = *reinterpret_cast<const Vector*>(values + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[at + i] += widen<ScalarLanes, VALUE>(added.value[i]);
    } else {
      for (int i = at; i < tile.length; ++i) sums[i] += widen<ScalarLanes, VALUE>(values[i]);
    }
  }
}

template <int VALUE>
__device__ __forceinline__ void add_coo_part(const DecodeRecord& record, const PeerTile& tile,
                                             int k, int64_t* marks, float* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t* indices = indices_of(record);
  const uint32_t tile_begin = static_cast<uint32_t>(tile.number) * kPiciTile;
  // Every border of a warp is searched once or, at a tile's end, twice with the same result, so all
  // entries are checked for any indices.
  for (int border = warp; border <= kCompactWarps; border += kCompactWarps) {
    const int64_t at = warp_lower_bound(indices, record.nnz, tile_begin + border * kWarpElements);
    if (lane == 0) marks[border] = at;
  }
  __syncthreads();
  const int64_t first = marks[warp], end = marks[warp + 1];
  // In the tile; an element before the tile wraps to far behind its end.
  const uint32_t from = warp * kWarpElements;
  const uint32_t to = min(from + kWarpElements, static_cast<uint32_t>(tile.length));
  for (int64_t i = first + lane; i < end; i += 32) {
    const uint32_t at = indices[i] - tile_begin;
    if (at < from || at >= to || (i > first && indices[i] <= indices[i - 1])) {
      report_wrong(tile, k, kDecodeIndices, static_cast<int32_t>(indices[i]));
    } else {
      sums[at] += value_at<VALUE>(record.payload + record.sections.values, i);
    }
  }
  if (threadIdx.x % 32 == 0 &&
      (first > end || (tile.is_last(record) && marks[kCompactWarps] != record.nnz))) {
    report_wrong(tile, k, kDecodeIndices, end);
  }
}

template <int VALUE>
__device__ __forceinline__ void add_pici_part(const DecodeRecord& record, const PeerTile& tile,
                                              int k, int64_t* marks, float* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t* prefix = indices_of(record) + tile.number;
  const uint32_t* words =
      reinterpret_cast<const uint32_t*>(record.payload) + int64_t{tile.number} * kTileWords;
  const uint32_t my_word = lane < kWarpWords ? words[warp * kWarpWords + lane] : 0;
  const uint32_t before_tile = prefix[0], after_tile = prefix[1];
  const int inclusive = warp_inclusive_sum(__popc(my_word));
  if (lane == 31) marks[warp] = inclusive;
  __syncthreads();
  int nnz = 0, warp_before = 0;
#pragma unroll
  for (int w = 0; w < kCompactWarps; ++w) {
    if (w == warp) warp_before = nnz;
    nnz += static_cast<int>(marks[w]);
  }
  if (before_tile + nnz != after_tile || after_tile > record.nnz || after_tile < before_tile ||
      (tile.number == 0 && before_tile != 0) ||
      (tile.is_last(record) && after_tile != record.nnz)) {
    if (threadIdx.x == 0) report_wrong(tile, k, kDecodePrefix, after_tile);
    return;
  }
  const uint8_t* values = record.payload + record.sections.values +
                          (int64_t{before_tile} + warp_before) * dtype_bytes(VALUE);
  bool stray = false;
#pragma unroll 4
  for (int j = 0; j < kWarpWords; ++j) {
    const uint32_t word = __shfl_sync(kAllLanes, my_word, j);
    const int before = __shfl_sync(kAllLanes, inclusive - __popc(my_word), j);
    if (!(word >> lane & 1)) continue;
    const int at = (warp * kWarpWords + j) * 32 + lane;
    if (at < tile.length) {
      sums[at] += value_at<VALUE>(values, before + __popc(word & ((1u << lane) - 1)));
    } else {
      stray = true;
    }
  }
  if (stray) report_wrong(tile, k, kDecodeWords, tile.number);
}

// Called by a block of kCompactThreads: the tile's sum. A barrier must come before, so that all see
// `tile`, and after, so that all see `sums`.
template <int VALUE>
__device__ __forceinline__ void sum_tile(const PeerTile& tile, TileMarks& marks, float* sums) {
  const int lane = threadIdx.x % 32, begin = threadIdx.x / 32 * kWarpElements;
  for (int at = begin + lane; at < begin + kWarpElements; at += 32) sums[at] = 0;
  int turn = 0;
  for (int k = 0; k < tile.count; ++k) {
    const DecodeRecord& record = tile.records[k * tile.stride];
    __syncwarp();  // other formats assign other elements to lanes
    if (record.kind == kKindDense) {
      add_dense_part<VALUE>(record, tile, sums);
    } else if (record.kind == kKindCoo) {
      add_coo_part<VALUE>(record, tile, k, marks.at[turn ^= 1], sums);
    } else if (record.kind == kKindPici) {
      add_pici_part<VALUE>(record, tile, k, marks.at[turn ^= 1], sums);
    }
  }
}

// A source of compaction (compact_kernel.cuh): the sum of the ranks' records of the own shard.
template <int VALUE>
struct PeerSource {
  static constexpr int kGrad = kFp32;
  static constexpr int kVector = 1;
  static constexpr int kBlocks = kCompactBlocks;

  PeerReading reading;
  const void* grad;        // never read: there is no gradient whose alignment counts
  const int64_t* offsets;  // of the shard's segments, from its first element on
  int64_t count;           // of them
  int64_t first;           // of them, in the bucket

  __device__ __forceinline__ void fill(const TilePlace& place, uint32_t* raw) const {
    __shared__ TileMarks marks;
    __shared__ PeerTile tile;
    if (threadIdx.x == 0) {
      const int64_t segment = find_range(offsets, count, place.begin);
      tile = {reading.records + segment,
              count,
              first + segment,
              control_of(reading.domain, reading.rank),
              reading.stage,
              reading.rank,
              0,
              reading.domain.world,
              static_cast<int>((place.begin - offsets[segment]) / kPiciTile),
              place.length};
    }
    __syncthreads();
    sum_tile<VALUE>(tile, marks, reinterpret_cast<float*>(raw));
  }
};

// Four neighbours of an output, to nearest even where they are narrowed; 8 or 16 bytes at a time.
__device__ __forceinline__ void store_sums(void* out, int64_t at, int dtype, const float* sums,
                                           int count) {
  const uint32_t* bits = reinterpret_cast<const uint32_t*>(sums);
  const int64_t bytes = dtype_bytes(dtype);
  uint8_t* to = static_cast<uint8_t*>(out) + at * bytes;
  if (count == 4 && reinterpret_cast<uintptr_t>(to) % (4 * bytes) == 0) {
    if (dtype == kFp32) {
      *reinterpret_cast<uint4*>(to) = {bits[0], bits[1], bits[2], bits[3]};
    } else {
      Neighbours<uint16_t, 4> narrow;
#pragma unroll
      for (int i = 0; i < 4; ++i) store_value<kFp32>(narrow.value, i, dtype, bits[i]);
      *reinterpret_cast<Neighbours<uint16_t, 4>*>(to) = narrow;
    }
    return;
  }
  for (int i = 0; i < count; ++i) store_value<kFp32>(out, at + i, dtype, bits[i]);
}

// The last launch: tiles of the output, each from the records of all ranks (reduce-scatter) or from
// that of the shard's owner. An output is written once and never read. After an error none is
// written.
template <int VALUE>
__global__ void __launch_bounds__(kCompactThreads, kCompactBlocks)
    peer_write_kernel(PeerReading call, const int64_t* tile_begin, const int64_t* offsets,
                      int64_t segments, int dtype, void* out) {
  __shared__ __align__(16) float sums[kPiciTile];
  __shared__ TileMarks marks;
  __shared__ PeerTile tile;
  const bool all_ranks = call.stage.phase == kPeerMessages;
  if (__syncthreads_or(threadIdx.x == 0 && has_failed(control_of(call.domain, call.rank)))) return;
  const int64_t tiles = tile_begin[segments];
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t segment = find_range(tile_begin, segments, t);
    const int number = static_cast<int>(t - tile_begin[segment]);
    const int64_t begin = offsets[segment] + int64_t{number} * kPiciTile;
    if (threadIdx.x == 0) {
      const int64_t* shards = call.tables.shard_segments;
      tile = {call.records + segment,
              segments,
              all_ranks ? shards[call.rank] + segment : segment,
              control_of(call.domain, call.rank),
              call.stage,
              call.rank,
              all_ranks ? 0 : static_cast<int>(find_range(shards, call.domain.world, segment)),
              all_ranks ? call.domain.world : 1,
              number,
              static_cast<int>(min(offsets[segment + 1] - begin, static_cast<int64_t>(kPiciTile)))};
    }
    __syncthreads();
    sum_tile<VALUE>(tile, marks, sums);
    __syncthreads();
    for (int at = threadIdx.x * 4; at < tile.length; at += 4 * kCompactThreads) {
      store_sums(out, begin + at, dtype, sums + at, min(4, tile.length - at));
    }
    __syncthreads();  // shared memory is free again
  }
}

}  // namespace megatron_sparse
