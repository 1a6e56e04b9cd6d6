// The CUDA encoder of what is pruned and quantised, for chunks of up to 2^13 elements: after the
// cut, one launch prunes and codes, and one moves coded words into the records. The bytes are the
// CPU's (rice_encode.cpp).
//
// A block takes one chunk after the other by ticket. It keeps the sums of gradient and residual in
// shared memory, lists the entries, codes groups of 128, puts what the levels lose back among the
// sums, and then writes the whole residual. Words lie at their chunk's place in the workspace until
// all sizes are known. Segments that are sent whole beside the records are rounded likewise.
//
// Bytes an element of g-byte gradient and e-byte residual: g + e read, e and the words written;
// then the words read and the message written. Longer chunks, whose entries are few, are staged
// (rice_encode_kernel.cuh).
//
// With a limit a block also waits for the number of entries before its chunk, and takes back what
// is too much (prune_pass.h). If that holds infinity or NaN, the last launch makes the group of the
// last entry that stays NaN.
#pragma once

#include "rice_encode_once_code.cuh"

namespace megatron_sparse {

constexpr int kOnceBlocks = 3;  // resident on a multiprocessor: 80 registers a thread

// Called by one thread: the place of the next ticket.
__device__ __forceinline__ void take_place(const Workspace& work, const WholeCall& call,
                                           OncePlace& place) {
  const PruneArguments& prune = call.prune;
  place = {};
  place.slot = atomicAdd(work.chunk_ticket, 1u);
  if (place.slot >= first_slot(work, call.rice, call.encode.segment_count)) return;
  place.chunk = uncounted_chunk_at(work, call.encode, call.rice, place.slot);
  const int64_t begin = place.chunk.begin;
  if (place.chunk.numel == 0) return;
  const int64_t range = find_range(prune.range_offsets, prune.range_count, begin);
  place.limit = limit_at(prune.thresholds, prune.tie_chances, range);
  place.one_range = prune.range_offsets[range + 1] >= begin + place.chunk.numel;
  place.whole = call.encode.segment_kinds[place.chunk.segment] != kKindRice;
}

// A lane has four neighbours of each of the warp's groups. Calls body(at) for each, with the place
// in the chunk of the first neighbour, which may be behind its end.
template <class Body>
__device__ __forceinline__ void for_neighbours(const RiceArguments& rice, const Body& body) {
  const int share = kRiceGroup * groups_of_warp(rice);
  int at = static_cast<int>(threadIdx.x) / 32 * share + kLaneValues * (threadIdx.x % 32);
#pragma unroll 1
  for (const int end = at + share; at < end; at += 2 * kRiceGroup) {
    body(at);
    body(at + kRiceGroup);
  }
}

// Called by a whole block: prunes the chunk. Returns which of the lane's elements are not zero, and
// leaves what is sent of them, and the residual of the others, in `x`.
template <int GRAD, int RESIDUAL, bool ONE_RANGE>
__device__ __forceinline__ uint32_t prune_chunk(const WholeCall& call, const OncePlace& place,
                                                float* x) {
  using Raw = typename RawType<GRAD>::type;
  using RawRest = typename RawType<RESIDUAL>::type;
  using L = ScalarLanes;
  const int64_t begin = place.chunk.begin;
  const int numel = static_cast<int>(place.chunk.numel);
  const Raw* grad = static_cast<const Raw*>(call.encode.grad) + begin;
  const RawRest* residual = static_cast<const RawRest*>(call.prune.old_residual) + begin;
  const bool full = numel == 1 << call.rice.log2_span;
  const bool grad_together = full && is_aligned(grad), rest_together = full && is_aligned(residual);
  Limit limits[kLaneValues];
  for (Limit& each : limits) each = place.limit;
  uint32_t kept = 0;
  for_neighbours(call.rice, [&](int at) {
    uint32_t raw[kLaneValues], rest[kLaneValues];
    kept >>= kLaneValues;
    load_neighbours(grad + at, numel - at, grad_together, raw);
    load_neighbours(residual + at, numel - at, rest_together, rest);
    if constexpr (!ONE_RANGE) find_limits(call.prune, begin + at, numel - at, limits);
    float sums[kLaneValues];
    const auto prune = [&](auto special) {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        const auto done = pruned_at<GRAD, RESIDUAL, decltype(special)::value>(
            call, raw[i], rest[i], limits[i], begin + at + i);
        if (done.nonzero) kept |= 1u << (28 + i);
        // The residual of an fp32 value is zero.
        const float sent =
            GRAD == kFp32 ? L::as_float(done.grad) : value_to_send<GRAD, RESIDUAL>(done);
        sums[i] = done.nonzero ? sent : widen<ScalarLanes, RESIDUAL>(done.residual);
      }
    };
    bool special = false;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const float sum = fabsf(widen<L, GRAD>(raw[i]) + widen<L, RESIDUAL>(rest[i]));
      special |= !(sum < limits[i].threshold || sum > limits[i].threshold);
    }
    if (special) {
      prune(std::true_type());
    } else {
      prune(std::false_type());
    }
    *reinterpret_cast<float4*>(x + at) = {sums[0], sums[1], sums[2], sums[3]};
  });
  return kept >> (32 - kLaneValues * groups_of_warp(call.rice));
}

// Called by a whole block: of the chunk's entries only the first `stay` remain; the others go back
// to the residual in `x`.
template <int RESIDUAL>
__device__ __forceinline__ void take_back(const Workspace& work, const WholeCall& call,
                                          const ChunkPlace& chunk, unsigned stay, Kept& kept,
                                          float* x) {
  using L = ScalarLanes;
  const int own = __popc(kept.word), at = 32 * word_of(call.rice);
  const int before = static_cast<int>(kept.entries.before) + warp_inclusive_sum(own) - own;
  uint32_t left = kept.word;
  for (int k = before; k < static_cast<int>(stay) && left != 0; ++k) left &= left - 1;
  kept = {kept.word ^ left, {min(kept.entries.before, stay), stay}};
  for (; left != 0; left &= left - 1) {
    const int element = at + __ffs(static_cast<int>(left)) - 1;
    const auto done = pruned_at<kFp32, RESIDUAL>(call, L::as_bits(x[element]), 0, drop_finite(),
                                                 chunk.begin + element);
    x[element] = widen<L, RESIDUAL>(done.residual);
    if (!done.nonzero) continue;
    // All threads that write here write the same value.
    if (call.encode.most_nnz[chunk.segment] > 0) {
      work.spoiled[chunk.segment] = 1;
    } else {
      x[element] = L::as_float(kNan);
    }
  }
  __syncthreads();  // `x` is the residual
}

// Called by the first warp of a second tile: publishes the numbers of entries of the chunk's tiles,
// and sets what a limit leaves of them.
__device__ __forceinline__ void number_entries(const Workspace& work, const WholeCall& call,
                                               const ChunkPlace& chunk, const WarpSums& entries,
                                               OnceMemory& memory) {
  if (chunk.numel == 0) return;
  const int64_t tile = chunk.first_tile, first = work.tile_begin[chunk.segment];
  const bool has_two = chunk.tile_end - tile == 2;
  const unsigned in_first = has_two ? entries.before : entries.all;
  int64_t before = look_back(work.nnz_states, tile, in_first);
  if (has_two) look_back(work.nnz_states, tile + 1, entries.all - in_first);
  if (call.encode.most_nnz == nullptr) return;
  if (first > 0) {
    // Earlier segments have been counted, but maybe not yet added up.
    ScanState state = 0;
    while ((state = read_state(&work.nnz_states[first - 1])) < kPrefixKnown) __nanosleep(32);
    before -= static_cast<int64_t>(state & kNumberMask);
  }
  const int64_t left = max(call.encode.most_nnz[chunk.segment] - before, int64_t{0});
  if (threadIdx.x % 32 != 0) return;
  memory.stay = static_cast<unsigned>(min(left, int64_t{entries.all}));
  memory.ends = 0 < left && left <= entries.all;
}

// Called by a whole block, behind code_chunk: copies the list of the last group to the workspace.
__device__ __forceinline__ void keep_last_group(const Workspace& work, const ChunkPlace& chunk,
                                                unsigned entries, const OnceMemory& memory) {
  const unsigned first = (entries - 1) / kRiceGroup * kRiceGroup, k = threadIdx.x;
  if (k < entries - first) {
    work.last_groups[chunk.segment * kRiceGroup + k] =
        memory.behind[kListBegin + first % kOnceListed + k];
  }
}

// Called by a whole block: the values of a chunk that is sent whole, and what rounding leaves.
__device__ __forceinline__ void round_chunk(const RiceArguments& rice, int numel, float* x,
                                            uint16_t* values) {
  for_neighbours(rice, [&](int at) {
    for (int k = at; k < min(at + kLaneValues, numel); ++k) {
      const RoundedValue rounded = round_kept(x[k] + 0.0f);  // no -0.0
      values[k] = static_cast<uint16_t>(rounded.sent);
      x[k] = rounded.rest;
    }
  });
}

// Called by a whole block: writes the chunk's residual.
template <int RESIDUAL>
__device__ __forceinline__ void store_rests(const WholeCall& call, const ChunkPlace& chunk,
                                            const float* x) {
  using RawRest = typename RawType<RESIDUAL>::type;
  RawRest* residual = static_cast<RawRest*>(call.rice.residual) + chunk.begin;
  const int numel = static_cast<int>(chunk.numel);
  const bool together = numel == 1 << call.rice.log2_span && is_aligned(residual);
  for_neighbours(call.rice, [&](int at) {
    const float4 four = *reinterpret_cast<const float4*>(x + at);
    const float rests[kLaneValues] = {four.x, four.y, four.z, four.w};
    uint32_t out[kLaneValues];
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      out[i] = raw_rest<RESIDUAL>(call, rests[i], chunk.begin + at + i);
    }
    store_neighbours(residual + at, numel - at, together, out);
  });
}

template <int GRAD, int RESIDUAL, int DTYPE>
__global__ void __launch_bounds__(kRiceThreads, kOnceBlocks)
    rice_once_kernel(Workspace work, WholeCall call) {
  __shared__ OnceMemory memory;
  if (call.encode.status[0] != kEncodeOk) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t slots = first_slot(work, call.rice, call.encode.segment_count);
  for (int k = threadIdx.x; k < kOnceElements / 32; k += kRiceThreads) memory.unary[k] = 0;
  if (threadIdx.x == 0) {
    memory.behind[kListBegin - 1] = 0;
    memory.ends = false;
    for (int k = 0; k < 2; ++k) take_place(work, call, memory.places[k]);
  }
  __syncthreads();
  for (unsigned round = 0;; ++round) {
    const OncePlace& place = memory.places[round % 3];
    if (place.slot >= slots) return;
    const uint32_t kept = place.one_range
                              ? prune_chunk<GRAD, RESIDUAL, true>(call, place, memory.x)
                              : prune_chunk<GRAD, RESIDUAL, false>(call, place, memory.x);
    const int own = __reduce_add_sync(kAllLanes, __popc(kept));
    if (lane == 0) memory.entries[round % 2][warp] = own;
    __syncthreads();  // the only one of a chunk without entries
    // The last warp often codes one group less.
    if (threadIdx.x == kRiceThreads - 32) take_place(work, call, memory.places[(round + 2) % 3]);
    Kept found = {words_of(kept), add_warps(memory.entries[round % 2])};
    const ChunkPlace& chunk = place.chunk;
    if (warp == kRiceWarps / 2) number_entries(work, call, chunk, found.entries, memory);
    if (call.encode.most_nnz != nullptr) {
      __syncthreads();
      const unsigned stay = chunk.numel > 0 ? memory.stay : 0;
      if (stay < found.entries.all) take_back<RESIDUAL>(work, call, chunk, stay, found, memory.x);
    }
    uint32_t* words = work.coded + chunk.first_tile * kCodedWords;
    const int numel = static_cast<int>(chunk.numel);
    int used = 0;
    if (place.whole) {
      round_chunk(call.rice, numel, memory.x, reinterpret_cast<uint16_t*>(words));
    } else if (found.entries.all > 0) {
      used = code_chunk<DTYPE>(call.rice, numel, found, words, memory);
      if (memory.ends) keep_last_group(work, chunk, found.entries.all, memory);
    }
    store_rests<RESIDUAL>(call, chunk, memory.x);
    // A block ends its chunks in ascending order, and waits for lower ones only.
    if (warp == 0) look_back(work.chunk_states, place.slot, used);
  }
}

// Called by a whole warp: makes the last of a chunk's `entries`, with its group, NaN.
__device__ __forceinline__ void spoil_last_group(const Workspace& work, const RiceArguments& rice,
                                                 const ChunkPlace& chunk, uint32_t* words) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (chunk.entries - 1) / kRiceGroup * kRiceGroup;
  const int64_t begin = value_words(rice.dtype, first),
                end = value_words(rice.dtype, chunk.entries);
  for (int64_t k = begin + lane; k < end; k += 32) words[k] = k == begin ? kNanLevels : 0;
  for (int64_t k = lane; k < chunk.entries - first; k += 32) {
    const int64_t at = chunk.begin + work.last_groups[chunk.segment * kRiceGroup + k] - 1;
    if (rice.residual_dtype == kFp32) {
      static_cast<float*>(rice.residual)[at] = 0;
    } else {
      static_cast<uint16_t*>(rice.residual)[at] = 0;
    }
  }
}

// The launch after it: a warp moves the words of one chunk after the other.
__global__ void __launch_bounds__(kRiceThreads, 4)
    rice_move_kernel(Workspace work, WholeCall call) {
  __shared__ PlanMemory planning;
  const EncodeArguments& encode = call.encode;
  plan_once(RiceRecords<kQ4>{work, encode, call.rice}, SpoiledBy{}, planning);
  if (encode.status[0] != kEncodeOk) return;
  const int lane = threadIdx.x % 32;
  const int64_t slots = first_slot(work, call.rice, encode.segment_count);
  for (int64_t slot = first_item() / 32; slot < slots; slot += item_stride() / 32) {
    const ChunkPlace chunk = chunk_at(work, encode, call.rice, slot);
    if (chunk.numel == 0) continue;
    const RecordPlan& plan = work.plans[chunk.segment];
    const uint32_t* words = work.coded + chunk.first_tile * kCodedWords;
    if (plan.kind == kKindRice) {
      uint32_t* to = write_row(work, encode, call.rice, slot, chunk);
      const int64_t count =
          prefix_after(work.chunk_states, slot) - prefix_after(work.chunk_states, slot - 1);
      for (int64_t k = lane; k < count; k += 32) to[k] = words[k];
      const bool is_last = chunk.staged + chunk.entries == plan.nnz_before + plan.nnz;
      if (work.spoiled[chunk.segment] != 0 && is_last && chunk.entries > 0) {
        __syncwarp();
        spoil_last_group(work, call.rice, chunk, to);
      }
    } else {
      uint16_t* to =
          reinterpret_cast<uint16_t*>(encode.out + plan.at + kHeaderBytes + plan.sections.values) +
          (chunk.number << call.rice.log2_span);
      const uint16_t* values = reinterpret_cast<const uint16_t*>(words);
      for (int64_t k = lane; k < chunk.numel; k += 32) to[k] = values[k];
    }
  }
}

}  // namespace megatron_sparse
