// The CUDA encoder of messages without indices: one launch after the cut, from gradient and
// residual to records. The bytes are the CPU's (rice_encode.cpp).
//
// The sizes of all records follow from the segments, so the first block plans them before any
// residual changes. A warp takes one tile after the other, and of it groups of 128 elements; a lane
// has four neighbours, by 16-byte accesses where gradient and residual are aligned alike. The last
// block to end plans the records again, with the counts that the headers need. Nothing is staged.
//
// Bytes an element of g-byte gradient and e-byte residual: g + e read, e and the message written.
#pragma once

#include "rice_encode_groups.cuh"
#include "rice_encode_records.cuh"

namespace megatron_sparse {

// N neighbours, moved by the fewest accesses of up to 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Neighbours {
  T value[N];
};

// A call; without thresholds the gradient is not pruned.
struct WholeCall {
  EncodeArguments encode;
  RiceArguments rice;
  PruneArguments prune;
  PruneSeeds seeds;
};

// The records, for plan_records.
struct WholeRecords {
  const Workspace& work;
  const EncodeArguments& call;
  const RiceArguments& rice;
  bool counted;  // whether call.nnz has the counts, by other blocks too

  __device__ __forceinline__ int64_t numel(int64_t s) const {
    return call.segment_offsets[s + 1] - call.segment_offsets[s];
  }

  __device__ __forceinline__ RecordPlan plan(int64_t s) const {
    RecordPlan plan = {};
    if (counted) plan.nnz = static_cast<const volatile int64_t*>(call.nnz)[s];
    plan.kind = call.segment_kinds[s];
    if (plan.kind == kKindDense) {
      plan.sections = sections_of(kKindDense, numel(s), plan.nnz, 0, 0, dtype_bytes(kBf16));
    } else {
      plan.sections = rice_sections(rice, chunks_of(numel(s), rice.log2_span),
                                    whole_words(numel(s), rice.dtype, rice.log2_span));
    }
    return plan;
  }

  __device__ __forceinline__ int dtype_of(const RecordPlan& plan) const {
    return rice_dtype_of(rice, plan);
  }

  __device__ __forceinline__ void start(const RecordPlan& plan, int64_t s, uint8_t* payload) const {
    start_record(rice, plan, chunks_of(numel(s), rice.log2_span), payload);
  }
};

// Whether a lane's neighbours can be moved together.
template <class Raw>
__device__ __forceinline__ bool is_aligned(const Raw* first) {
  return reinterpret_cast<uintptr_t>(first) % (kLaneValues * sizeof(Raw)) == 0;
}

// `count` of four neighbours, the others 0; all of them `together` where all are there and aligned.
template <class Raw>
__device__ __forceinline__ void load_neighbours(const Raw* first, int count, bool together,
                                                uint32_t (&to)[kLaneValues]) {
  if (together) {
    const auto all = *reinterpret_cast<const Neighbours<Raw, kLaneValues>*>(first);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) to[i] = all.value[i];
  } else {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) to[i] = i < count ? first[i] : 0;
  }
}

template <class Raw>
__device__ __forceinline__ void store_neighbours(Raw* first, int count, bool together,
                                                 const uint32_t (&from)[kLaneValues]) {
  if (!together) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      if (i < count) first[i] = static_cast<Raw>(from[i]);
    }
  } else if constexpr (sizeof(Raw) == 4) {
    // Of an assignment nvcc makes four stores.
    __stwb(reinterpret_cast<uint4*>(first), uint4{from[0], from[1], from[2], from[3]});
  } else {
    const uint32_t low = from[0] | from[1] << 16, high = from[2] | from[3] << 16;
    *reinterpret_cast<uint64_t*>(first) = uint64_t{high} << 32 | low;
  }
}

// What pruning leaves of element `at` and of its residual.
template <int GRAD, int RESIDUAL, bool SPECIAL = true>
__device__ __forceinline__ Pruned<ScalarLanes> pruned_at(const WholeCall& call, uint32_t grad,
                                                         uint32_t rest, const Limit& limit,
                                                         int64_t at) {
  using L = ScalarLanes;
  constexpr Grid grid = grid_of(GRAD, kFp32);
  const uint32_t high = static_cast<uint32_t>(at >> 32), low = static_cast<uint32_t>(at);
  const bool random = (GRAD != kFp32 || RESIDUAL != kFp32) && call.prune.key >= 0;
  return random ? prune_element<L, GRAD, RESIDUAL, grid, true, SPECIAL>(
                      grad, rest, limit, call.prune.leak, call.seeds, high, low)
                : prune_element<L, GRAD, RESIDUAL, grid, false, SPECIAL>(
                      grad, rest, limit, call.prune.leak, call.seeds, high, low);
}

// The value of a pruned element that is sent, with the residual that pruning left added.
template <int GRAD, int RESIDUAL>
__device__ __forceinline__ float value_to_send(const Pruned<ScalarLanes>& done) {
  return widen<ScalarLanes, GRAD>(done.grad) + widen<ScalarLanes, RESIDUAL>(done.residual);
}

// The raw bits of the residual of element `at`.
template <int RESIDUAL>
__device__ __forceinline__ uint32_t raw_rest(const WholeCall& call, float rest, int64_t at) {
  if (RESIDUAL == kFp32) return ScalarLanes::as_bits(rest);
  return narrow_residual(rest, call.seeds.residual, call.rice.key >= 0, static_cast<uint64_t>(at));
}

// The same of a gradient that is not pruned: its -0.0 count as 0.0.
template <int GRAD, int RESIDUAL>
__device__ __forceinline__ float plain_value(uint32_t grad, uint32_t rest, int& nnz) {
  const float value = widen<ScalarLanes, GRAD>(grad);
  nnz += value != 0;  // true of NaN
  return (value == 0 ? 0.0f : value) + widen<ScalarLanes, RESIDUAL>(rest);
}

// The limits of neighbours that may lie in several ranges.
__device__ __forceinline__ void find_limits(const PruneArguments& prune, int64_t at, int count,
                                            Limit (&limits)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    if (i >= count) break;
    const int64_t range = find_range(prune.range_offsets, prune.range_count, at + i);
    limits[i] = limit_at(prune.thresholds, prune.tie_chances, range);
  }
}

// Called by a whole warp: a tile of `length` elements from element `begin` of the bucket on, the
// element `first` of its segment. Returns how many elements this lane has counted.
template <int GRAD, int RESIDUAL, int DTYPE>
__device__ __forceinline__ int place_whole(const WholeCall& call, const RecordPlan& plan,
                                           int64_t begin, int64_t first, int length) {
  using Raw = typename RawType<GRAD>::type;
  using RawRest = typename RawType<RESIDUAL>::type;
  constexpr int kBits = code_bits(DTYPE);
  const EncodeArguments& encode = call.encode;
  const PruneArguments& prune = call.prune;
  // Of the tile; null if there is none.
  const Raw* grads = static_cast<const Raw*>(encode.grad) + begin;
  RawRest* rests = static_cast<RawRest*>(call.rice.residual);
  const void* old = prune.thresholds == nullptr ? call.rice.residual : prune.old_residual;
  if (rests != nullptr) rests += begin;
  const RawRest* old_rests = static_cast<const RawRest*>(old) + begin;
  const int lane = threadIdx.x % 32, log2_span = call.rice.log2_span;
  const bool quantises = plan.kind == kKindRice;
  const bool grad_aligned = is_aligned(grads), old_aligned = is_aligned(old_rests);
  const bool rest_aligned = is_aligned(rests);
  Limit limits[kLaneValues] = {};
  bool one_range = true;
  if (prune.thresholds != nullptr) {
    const int64_t range = find_range(prune.range_offsets, prune.range_count, begin);
    one_range = prune.range_offsets[range + 1] >= begin + length;
    const Limit limit = limit_at(prune.thresholds, prune.tie_chances, range);
    for (Limit& each : limits) each = limit;
  }
  uint8_t* values = encode.out + plan.at + kHeaderBytes + plan.sections.values;
  const int64_t chunk = first >> log2_span;
  uint32_t* words = reinterpret_cast<uint32_t*>(values) +
                    chunk * value_words(DTYPE, int64_t{1} << log2_span) +
                    (first - (chunk << log2_span)) / kRiceGroup * kGroupWords<kBits>;
  uint32_t grad[kLaneValues], rest[kLaneValues] = {};
  const auto load = [&](int group) {
    const int at = group + kLaneValues * lane;
    const bool all = length - at >= kLaneValues;
    load_neighbours(grads + at, length - at, grad_aligned && all, grad);
    if (rests != nullptr) load_neighbours(old_rests + at, length - at, old_aligned && all, rest);
  };
  int nnz = 0;
  load(0);
  for (int group = 0; group < length; group += kRiceGroup, words += kGroupWords<kBits>) {
    const int at = group + kLaneValues * lane, count = length - at;
    float x[kLaneValues];
    if (prune.thresholds == nullptr) {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        x[i] = plain_value<GRAD, RESIDUAL>(grad[i], rest[i], nnz);
      }
    } else {
      if (!one_range) find_limits(prune, begin + at, count, limits);
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        const auto done =
            pruned_at<GRAD, RESIDUAL>(call, grad[i], rest[i], limits[i], begin + at + i);
        nnz += done.nonzero;
        x[i] = value_to_send<GRAD, RESIDUAL>(done);
      }
    }
    if (group + kRiceGroup < length) load(group + kRiceGroup);  // on its way during the arithmetic
    uint32_t out[kLaneValues];
    if (quantises) {
      quantise_group<kBits, true>(x, min(length - group, kRiceGroup), words);
    } else {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        const RoundedValue rounded = round_kept(x[i]);
        out[i] = rounded.sent;
        x[i] = rounded.rest;
      }
      store_neighbours(reinterpret_cast<uint16_t*>(values) + first + at, count,
                       count >= kLaneValues, out);
    }
    if (rests == nullptr) continue;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      out[i] = raw_rest<RESIDUAL>(call, x[i], begin + at + i);
    }
    store_neighbours(rests + at, count, rest_aligned && count >= kLaneValues, out);
  }
  return nnz;
}

template <int GRAD, int RESIDUAL, int DTYPE>
__global__ void __launch_bounds__(kRiceThreads, 3)
    rice_whole_kernel(Workspace work, WholeCall call) {
  __shared__ PlanMemory planning;
  __shared__ bool is_last;
  const EncodeArguments& encode = call.encode;
  plan_once(WholeRecords{work, encode, call.rice, false}, SpoiledBy{}, planning);
  if (encode.status[0] != kEncodeOk) return;
  const int64_t tile_count = work.tile_begin[encode.segment_count];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kRiceWarps;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kRiceWarps + threadIdx.x / 32;
       tile < tile_count; tile += warps) {
    const int64_t segment = find_range(work.tile_begin, encode.segment_count, tile);
    const int64_t from = encode.segment_offsets[segment];
    const int64_t first = (tile - work.tile_begin[segment]) * kPiciTile;
    const int64_t left = encode.segment_offsets[segment + 1] - from - first;
    const int nnz = warp_sum(
        place_whole<GRAD, RESIDUAL, DTYPE>(call, work.plans[segment], from + first, first,
                                           static_cast<int>(min(left, int64_t{kPiciTile}))));
    if (threadIdx.x % 32 == 0 && nnz > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(encode.nnz + segment),
                static_cast<unsigned long long>(nnz));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // this block's counts before its ticket, and the others' behind theirs
    is_last = atomicAdd(work.ticket, 1u) + 1 == gridDim.x;
    __threadfence();
  }
  __syncthreads();
  if (is_last) plan_records(WholeRecords{work, encode, call.rice, true}, SpoiledBy{}, planning);
}

}  // namespace megatron_sparse
