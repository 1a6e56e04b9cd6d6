// The decoders' first launch: everything that a record's damage can show before
// it is decoded, and the decoder's table of rans.
//
// The status names the same field as moves_record.cpp does: of all faults the
// one that the CPU would meet first, whichever block finds one first. Bytes of
// device memory: the record read once; 73 KiB of tables written.
#pragma once

#include "launch_grid.cuh"
#include "moves_launch.h"
#include "moves_record.h"
#include "moves_scalar.cuh"
#include "scan.cuh"

namespace megatron_sparse {

inline constexpr int kCheckThreads = 256;

// In the order in which the CPU checks, << 4, with the MovesField that is wrong.
enum class MovesCheck : unsigned {
  kNone = 0,
  kSubHeaderSize = 1 << 4 | kFieldSize,
  kZeros = 2 << 4 | kFieldZeros,
  kChunks = 3 << 4 | kFieldChunks,
  kNoTable = 4 << 4 | kFieldTable,
  kSize = 5 << 4 | kFieldSize,
  kTable = 6 << 4 | kFieldTable,
  kOffsets = 7 << 4 | kFieldOffsets,
  kChunk = 8 << 4 | kFieldChunk,
  kChecksum = 9 << 4 | kFieldChecksum,
};

// A fault as one number, the earlier the larger, so that zeroed memory means none.
using MovesFaultKey = unsigned long long;
inline constexpr int kWhereBits = 40;

// The decoder's tables of rans: symbols by context and slot, and of each symbol
// raw bits << 25 | start << 13 | frequency, and its move without raw bits.
struct RansDecoder {
  uint8_t symbols[kContexts][kScale];
  uint2 entries[kTableEntries];
};
static_assert(sizeof(RansDecoder) % 16 == 0, "it is copied in vectors");

// What blocks find out about a record; zeroed.
struct MovesFindings {
  MovesFaultKey fault;
  MovesFaultKey damaged;  // of rans chunks whose end is wrong
  unsigned summed;        // blocks that have added to the sum
  uint32_t sum;           // of the mixed words
};

struct MovesDecodeWork {
  MovesFindings* found;
  RansDecoder* tables;  // of rans
  void* decoded;        // [numel], of rans
};

// Records of one launch; a grid has a row of blocks for each. Kernels take this by value, so it
// stays in parameter memory.
inline constexpr int kMostMoves = 32;
struct MovesBatch {
  MovesDecodeArguments call[kMostMoves];
  MovesDecodeWork work[kMostMoves];
};
static_assert(sizeof(MovesBatch) <= 4096, "a launch's parameters have at most 4 KB");

// The first of all faults in the words of MovesField; called by one thread.
__device__ __forceinline__ void write_status(const MovesDecodeArguments& call,
                                             const MovesDecodeWork& work) {
  constexpr MovesFaultKey where = (MovesFaultKey{1} << kWhereBits) - 1;
  const MovesFaultKey found = work.found->fault != 0 ? work.found->fault : work.found->damaged;
  call.status[0] = found == 0 ? kFieldFine : static_cast<int64_t>(~found >> kWhereBits & 15);
  call.status[1] = found == 0 ? 0 : static_cast<int64_t>(~found & where);
}

// Where the sections lie. Only if `check` is kNone can they be read.
struct MovesSections {
  MovesCheck check;
  int64_t chunks;
  int64_t table_bytes;
  uint32_t base;
  const uint32_t* offsets;
  const uint8_t* table;
  const uint8_t* data;  // the chunks, or the raw numbers
  int64_t data_bytes;

  // The bytes of a chunk, or -1 where its offsets are wrong.
  __device__ __forceinline__ int64_t chunk_bytes(int64_t chunk, int64_t raw_bytes) const {
    const int64_t begin = int64_t{offsets[chunk]} * 16, end = int64_t{offsets[chunk + 1]} * 16;
    return begin <= end && end <= data_bytes && end - begin <= raw_bytes ? end - begin : -1;
  }
};

__device__ __forceinline__ MovesSections sections_of_moves(const MovesDecodeArguments& call) {
  constexpr int64_t kHead = sizeof(MovesSubHeader);
  MovesSections s = {};
  s.check = MovesCheck::kSubHeaderSize;
  if (call.body_bytes < kHead) return s;
  const uint4 head = *reinterpret_cast<const uint4*>(call.body);
  s.chunks = call.coder == kMovesRaw ? 0 : chunk_count(call.numel);
  s.table_bytes = head.z;
  s.base = head.w & 255;
  s.check = MovesCheck::kZeros;
  if (head.w >> 8 != 0) return s;
  s.check = MovesCheck::kChunks;
  if (head.y != s.chunks) return s;
  s.check = MovesCheck::kNoTable;
  if (call.coder == kMovesRaw && s.table_bytes != 0) return s;
  s.offsets = reinterpret_cast<const uint32_t*>(call.body + kHead);
  s.table = call.body + kHead;
  if (call.coder != kMovesRaw) s.table += offset_table_bytes(s.chunks);
  s.data = s.table + pad16(s.table_bytes);
  s.data_bytes = call.body_bytes - (s.data - call.body);
  s.check = MovesCheck::kSize;
  if (s.data_bytes < 0) return s;
  if (call.coder == kMovesRaw && s.data_bytes != pad16(call.numel * dtype_bytes(call.dtype))) {
    return s;
  }
  s.check = MovesCheck::kNone;
  return s;
}

__device__ __forceinline__ void report_fault(MovesFaultKey* fault, MovesCheck check,
                                             int64_t where) {
  atomicMax(fault,
            ~(static_cast<MovesFaultKey>(check) << kWhereBits | static_cast<MovesFaultKey>(where)));
}

__device__ __forceinline__ uint2 symbol_entry(uint32_t symbol, uint32_t start, uint32_t frequency) {
  const uint32_t bits = symbol < kDirect ? 0 : (symbol >> 1) - 5;  // raw ones that follow it
  return {bits << 25 | start << 13 | frequency, bits == 0 ? symbol : 2u << bits | (symbol & 1)};
}

// One context of the frequency table, in shared memory.
struct ContextTable {
  uint32_t frequency[kMaxSymbols];
  uint32_t start[kMaxSymbols];
  int stored;  // frequencies; -1 if they are wrong
};

// Checks as moves_record.cpp's read_table does; called by a warp.
__device__ __forceinline__ void read_context(const MovesSections& s, int context, int symbols,
                                             ContextTable& shared) {
  const int lane = threadIdx.x % 32;
  bool right = s.table_bytes >= kContexts;
  const int counted = right && lane < kContexts ? s.table[lane] : 0;
  const int stored = __shfl_sync(kAllLanes, counted, context);
  const int64_t at = kContexts + 2 * warp_sum(lane < context ? counted : 0);
  right = right && stored <= symbols && at + 2 * stored <= s.table_bytes;
  const uint16_t* frequencies = reinterpret_cast<const uint16_t*>(s.table + at);
  uint32_t sum = 0;
#pragma unroll
  for (int first = 0; first < kMaxSymbols; first += 32) {
    const int symbol = first + lane;
    const uint32_t frequency = right && symbol < stored ? frequencies[symbol] : 0;
    const uint32_t end = sum + warp_inclusive_sum(frequency);
    if (symbol < kMaxSymbols) {
      shared.frequency[symbol] = frequency;
      shared.start[symbol] = end - frequency;
    }
    sum = __shfl_sync(kAllLanes, end, 31);
  }
  right = right && sum == (stored == 0 ? 0 : kScale);
  if (context == kContexts - 1) right = right && at + 2 * stored == s.table_bytes;
  if (lane == 0) shared.stored = right ? stored : -1;
}

// Checks the contexts and makes the decoder's table of each; called by a whole block.
__device__ __forceinline__ void make_tables(const MovesDecodeArguments& call,
                                            const MovesDecodeWork& work, const MovesSections& s,
                                            ContextTable& shared) {
  for (int context = blockIdx.x; context < kContexts; context += gridDim.x) {
    __syncthreads();
    if (threadIdx.x < 32) read_context(s, context, symbols_of(call.dtype), shared);
    __syncthreads();
    if (shared.stored < 0 && threadIdx.x == 0) {
      // A table without room for its contexts is the fault of the first one.
      const int where = s.table_bytes < kContexts ? 0 : context;
      report_fault(&work.found->fault, MovesCheck::kTable, where);
    }
    uint8_t* symbols = work.tables->symbols[context];
    uint2* entries = work.tables->entries + context * kMaxSymbols;
    if (shared.stored <= 0) {
      // As moves_decoder_table: a symbol, the states of which only lose bits.
      for (int slot = threadIdx.x; slot < static_cast<int>(kScale); slot += kCheckThreads) {
        symbols[slot] = 0;
      }
      if (threadIdx.x == 0) entries[0] = symbol_entry(0, 0, 1);
    }
    for (int symbol = threadIdx.x / 32; symbol < shared.stored; symbol += kCheckThreads / 32) {
      const uint32_t frequency = shared.frequency[symbol], start = shared.start[symbol];
      for (uint32_t above = threadIdx.x % 32; above < frequency; above += 32) {
        symbols[start + above] = static_cast<uint8_t>(symbol);
      }
      if (threadIdx.x % 32 == 0) entries[symbol] = symbol_entry(symbol, start, frequency);
    }
  }
}

// Checks the offsets and the chunks; a thread takes a chunk.
__device__ __forceinline__ void check_chunks(const MovesDecodeArguments& call,
                                             const MovesDecodeWork& work, const MovesSections& s) {
  if (first_item() == 0) {
    if (s.offsets[0] != 0) report_fault(&work.found->fault, MovesCheck::kOffsets, 0);
    if (int64_t{s.offsets[s.chunks]} * 16 != s.data_bytes) {
      report_fault(&work.found->fault, MovesCheck::kOffsets, s.chunks);
    }
  }
  const int64_t value_bytes = dtype_bytes(call.dtype);
  for (int64_t c = first_item(); c < s.chunks; c += item_stride()) {
    const int64_t count = numbers_in_chunk(call.numel, c);
    const int64_t raw = pad16(count * value_bytes), bytes = s.chunk_bytes(c, raw);
    if (bytes < 0) report_fault(&work.found->fault, MovesCheck::kOffsets, c + 1);
    if (bytes >= 0 && bytes != raw && bytes < 4 * kStates) {
      report_fault(&work.found->fault, MovesCheck::kChunk, c);
    }
  }
}

__global__ void __launch_bounds__(kCheckThreads, 4)
    moves_check_kernel(const __grid_constant__ MovesBatch batch) {
  __shared__ ContextTable shared;
  const MovesDecodeArguments& call = batch.call[blockIdx.y];
  const MovesDecodeWork& work = batch.work[blockIdx.y];
  const MovesSections s = sections_of_moves(call);
  if (s.check != MovesCheck::kNone) {
    if (first_item() == 0) report_fault(&work.found->fault, s.check, 0);
    return;
  }
  if (call.coder == kMovesRans) {
    check_chunks(call, work, s);
    make_tables(call, work, s, shared);
  }
  const uint4* vectors = reinterpret_cast<const uint4*>(call.body);
  uint32_t sum = 0;
#pragma unroll 4
  for (int64_t v = first_item(); v < call.body_bytes / 16; v += item_stride()) {
    sum += mix_vector(vectors[v], static_cast<uint32_t>(4 * v));
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) atomicAdd(&work.found->sum, sum);
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();  // this block's sums come before its count
  if (atomicAdd(&work.found->summed, 1u) + 1 != gridDim.x) return;
  __threadfence();  // the other blocks' sums come before their count
  // The checksum's own word is none of the words that it sums.
  const uint32_t checksum = vectors[0].x;
  if (atomicAdd(&work.found->sum, 0u) - mix_word(checksum, 0) != checksum) {
    report_fault(&work.found->fault, MovesCheck::kChecksum, 0);
  }
}

}  // namespace megatron_sparse
