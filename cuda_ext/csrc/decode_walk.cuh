// First launch of decode_add_ and decode_sum_ on CUDA: follows a message's records and checks
// every header.
//
// The message is untrusted. One thread follows the sizes, with a load for each record, and never
// leaves the message; then the block checks all headers at once. The status is that of the CPU's
// decoder: the lowest wrong segment, and of its fields the first in the order of Field.
#pragma once

#include "cut_tiles.cuh"
#include "decode_record.cuh"
#include "launch_grid.cuh"
#include "scan.cuh"

namespace megatron_sparse {

constexpr int kWalkThreads = 256;

constexpr unsigned long long kNothingWrong = ~0ull;

// What the launches tell each other about a message.
struct DecodeState {
  unsigned long long wrong;  // lowest wrong entry: segment << 33 | entry << 1 | beyond numel
  unsigned int claimed;      // whether a block reports the error that it has met in a section
  bool readable;             // all headers are right
};

struct DecodeWorkspace {
  DecodeRecord* records;  // [segments]
  int64_t* header_at;     // [segments], in the message
  int64_t* unit_begin;    // [segments + 1]: a unit is one warp's check; none if a header is wrong
  int64_t* tile_begin;    // [segments + 1]; none if the segments do not lie in acc
  DecodeState* state;
  int64_t bytes;
};

// Messages of one launch. Kernels take this by value, so it stays in parameter memory.
template <int MOST>
struct DecodeBatch {
  DecodeArguments call[MOST];
  DecodeWorkspace work[MOST];
};

inline DecodeWorkspace lay_out_decode_workspace(void* base, int64_t segment_count) {
  Carver memory(base);
  DecodeWorkspace w = {};
  w.records = memory.take<DecodeRecord>(segment_count);
  w.header_at = memory.take<int64_t>(segment_count);
  w.unit_begin = memory.take<int64_t>(segment_count + 1);
  w.tile_begin = memory.take<int64_t>(segment_count + 1);
  w.state = memory.take<DecodeState>(1);
  w.bytes = memory.used();
  return w;
}

// Called by one block.
__device__ __forceinline__ void walk_message(const DecodeArguments& call,
                                             const DecodeWorkspace& work) {
  __shared__ int64_t shared[kWalkThreads / 32];
  __shared__ int64_t walked, end;
  __shared__ unsigned int first_wrong, first_outside;
  if (threadIdx.x == 0) {
    first_wrong = first_outside = 0xffffffffu;
    *work.state = {kNothingWrong, 0, false};
    if (call.slots == nullptr) {
      walked = follow_sizes(call, work.header_at, end);
    } else {
      end = call.slots[call.segment_count];
      // If the message is not as long as the slots, no record is read.
      walked = end == call.message_bytes ? call.segment_count : 0;
    }
  }
  __syncthreads();
  int64_t units_before = 0, tiles_before = 0;
  for (int64_t begin = 0; begin < call.segment_count; begin += kWalkThreads) {
    const int64_t s = begin + threadIdx.x;
    int64_t units = 0, tiles = 0;
    if (s < call.segment_count) {
      const int64_t from = call.segment_offsets[s], to = call.segment_offsets[s + 1];
      if (from < call.base || from > to || to - call.base > call.acc_numel ||
          to - from > kMaxSegmentNumel) {
        atomicMin(&first_outside, static_cast<unsigned int>(s));
      } else {
        tiles = tiles_of(to - from);
        if (s < walked) {
          if (call.slots != nullptr) work.header_at[s] = call.slots[s];
          if (check_record(call, s, work.header_at[s], work.records[s]).wrong) {
            atomicMin(&first_wrong, static_cast<unsigned int>(s));
          } else {
            units = units_of(work.records[s]);
          }
        }
      }
    }
    int64_t all_units, all_tiles;
    const int64_t unit = block_exclusive_sum<kWalkThreads>(units, shared, all_units);
    const int64_t tile = block_exclusive_sum<kWalkThreads>(tiles, shared, all_tiles);
    if (s < call.segment_count) {
      work.unit_begin[s] = units_before + unit;
      work.tile_begin[s] = tiles_before + tile;
    }
    units_before += all_units;
    tiles_before += all_tiles;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int64_t status[4] = {kDecodeOk, 0, 0, 0};
  if (first_outside != 0xffffffffu) {
    status[0] = kDecodeSegments;
    status[1] = first_outside;
    status[3] = call.segment_offsets[first_outside + 1];
  } else if (first_wrong != 0xffffffffu) {
    DecodeRecord unused;
    const FieldError error = check_record(call, first_wrong, work.header_at[first_wrong], unused);
    status[0] = kDecodeMessage;
    status[1] = first_wrong;
    status[2] = error.field;
    status[3] = error.value;
  } else if (walked < call.segment_count || end != call.message_bytes) {
    status[0] = kDecodeMessage;
    status[1] = call.slots == nullptr ? walked : call.segment_count;
    status[2] = kFieldSize;
    status[3] = call.message_bytes;
  }
  work.unit_begin[call.segment_count] = status[0] == kDecodeOk ? units_before : 0;
  work.tile_begin[call.segment_count] = status[0] == kDecodeSegments ? 0 : tiles_before;
  work.state->readable = status[0] == kDecodeOk;
  for (int i = 0; i < 4; ++i) call.status[i] = status[i];
}

template <int MOST>
__global__ void __launch_bounds__(kWalkThreads)
    walk_kernel(const __grid_constant__ DecodeBatch<MOST> batch) {
  walk_message(batch.call[blockIdx.x], batch.work[blockIdx.x]);
}

// Beside the walk, the cut of the encoder that comes after it: `cut` is of other memory.
template <int MOST>
__global__ void __launch_bounds__(kWalkThreads)
    walk_and_cut_kernel(const __grid_constant__ DecodeBatch<MOST> batch, int count,
                        const __grid_constant__ TileCut cut) {
  static_assert(kWalkThreads == kCutThreads);
  const int block = static_cast<int>(blockIdx.x);
  if (block < count) {
    walk_message(batch.call[block], batch.work[block]);
  } else {
    cut_tiles(cut, block - count, static_cast<int>(gridDim.x) - count);
  }
}

}  // namespace megatron_sparse
