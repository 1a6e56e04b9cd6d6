// The rans coder of moves on CUDA: a warp decodes a chunk, a state in each lane.
//
// Words come through a ring in shared memory, which is filled ahead of them. The decoder's tables
// take 256 KiB, but few contexts are frequent, so the L1 cache serves most look-ups.
// Bytes of device memory: a number read and written an element, and the record read.
#pragma once

#include "moves_check_kernel.cuh"

namespace megatron_sparse {

inline constexpr int kDecodedSteps = 4;   // of 32 numbers, loaded while those before are decoded
inline constexpr int kRingHalf = 8 * 32;  // words: a vector from each lane
inline constexpr int kStepWords = 3 * kStates;  // that a step takes at most
static_assert(kStepWords <= kRingHalf, "a half may be overwritten as soon as the next is begun");

// The words of a chunk, in order; zeros behind its end.
struct WordReader {
  uint16_t* ring;      // [2 kRingHalf], in shared memory
  const uint4* chunk;  // the words, 16-byte aligned
  int vectors;         // of the chunk
  int read;            // words
  int halves;          // in the ring so far
  uint4 ahead;         // of the next half

  __device__ __forceinline__ void load_ahead() {
    const int v = halves * 32 + static_cast<int>(threadIdx.x);
    ahead = v < vectors ? chunk[v] : uint4{0, 0, 0, 0};
  }

  __device__ __forceinline__ void store_ahead() {
    __syncwarp();
    reinterpret_cast<uint4*>(ring)[halves % 2 * 32 + threadIdx.x] = ahead;
    ++halves;
    load_ahead();
    __syncwarp();
  }

  // Makes room for a step; called by a whole warp.
  __device__ __forceinline__ void fill() {
    if (read + kStepWords > halves * kRingHalf) store_ahead();
  }

  // States below kLowestState take their next word.
  __device__ __forceinline__ void refill(uint32_t& state) {
    const bool empty = state < kLowestState;
    const unsigned lanes = __ballot_sync(kAllLanes, empty);
    if (empty) {
      const int place = read + __popc(lanes & ((1u << threadIdx.x) - 1));
      state = state << 16 | ring[place % (2 * kRingHalf)];
    }
    read += __popc(lanes);
  }
};

// The move of this lane's next number.
template <int D>
__device__ __forceinline__ uint32_t next_move(uint32_t& state, WordReader& words, uint32_t context,
                                              bool active, const uint32_t* table) {
  words.fill();
  const uint32_t slot = state & (kScale - 1);
  // Of a lane without a number the state stays as it is.
  const uint32_t entry =
      active ? table[context << kScaleBits | slot] : slot << 19 | (kScale - 1) << 7;
  const uint32_t symbol = entry & 127;
  state = ((entry >> 7 & (kScale - 1)) + 1) * (state >> kScaleBits) + (entry >> 19);
  words.refill(state);
  const uint32_t bits = raw_bits_of(symbol);
  if (!__any_sync(kAllLanes, bits != 0)) return symbol;
  const uint32_t low = D == kFp32 ? min(bits, 16u) : bits;
  uint32_t raw = state & ((1u << low) - 1);
  state >>= low;
  words.refill(state);
  if (D == kFp32) {
    const uint32_t high = bits - low;
    raw |= (state & ((1u << high) - 1)) << low;
    state >>= high;
    words.refill(state);
  }
  return bits == 0 ? symbol : ((2 | (symbol & 1)) << bits) + raw;
}

// Decodes a chunk into `out`; whether it ends as it must, the same in all lanes.
template <int D>
__device__ __forceinline__ bool decode_rans_chunk(const MovesRaw<D>* held, int64_t count,
                                                  uint32_t base, const uint32_t* table,
                                                  const uint8_t* chunk, int64_t bytes,
                                                  uint16_t* ring, MovesRaw<D>* out) {
  const int lane = threadIdx.x, numbers = static_cast<int>(count);
  uint32_t state = reinterpret_cast<const uint32_t*>(chunk)[lane];
  const uint8_t* first = chunk + 4 * kStates;
  const int word_count = static_cast<int>(bytes - 4 * kStates) / 2;
  WordReader words = {ring, reinterpret_cast<const uint4*>(first), word_count / 8, 0, 0, {}};
  words.load_ahead();
  words.store_ahead();
  uint32_t next[kDecodedSteps];
  const auto load = [&](int from) {
#pragma unroll
    for (int s = 0; s < kDecodedSteps; ++s) {
      const int i = from + 32 * s + lane;
      next[s] = i < numbers ? held[i] : 0;
    }
  };
  load(0);
  for (int begin = 0; begin < numbers; begin += 32 * kDecodedSteps) {
    uint32_t was[kDecodedSteps];
#pragma unroll
    for (int s = 0; s < kDecodedSteps; ++s) was[s] = next[s];
    load(begin + 32 * kDecodedSteps);
#pragma unroll
    for (int s = 0; s < kDecodedSteps; ++s) {
      if (begin + 32 * s >= numbers) break;
      const int i = begin + 32 * s + lane;
      const uint32_t context = context_of<D>(was[s], base);
      const uint32_t z = next_move<D>(state, words, context, i < numbers, table);
      if (i < numbers) out[i] = static_cast<MovesRaw<D>>(moved_by<D>(was[s], z));
    }
  }
  // Less than 16 bytes of padding are left, and every state is back where encoding began.
  const int left = word_count - words.read;
  bool fine = left >= 0 && left < 8 && state == kLowestState;
  if (lane < left && lane < 8) {
    fine = fine && reinterpret_cast<const uint16_t*>(first)[words.read + lane] == 0;
  }
  return __all_sync(kAllLanes, fine);
}

// Decodes all chunks beside what is held: only its end shows whether a chunk is whole.
template <int D>
__global__ void __launch_bounds__(32)
    moves_rans_decode_kernel(MovesDecodeArguments call, MovesDecodeWork work) {
  using Raw = MovesRaw<D>;
  __shared__ __align__(16) uint16_t ring[2 * kRingHalf];
  if (*work.fault != 0) return;
  const MovesSections s = sections_of_moves(call);
  for (int64_t c = blockIdx.x; c < s.chunks; c += gridDim.x) {
    const int64_t count = numbers_in_chunk(kMovesRans, call.numel, c);
    const int64_t raw = round_up_16(count * sizeof(Raw)), bytes = s.chunk_bytes(c, raw);
    const uint8_t* chunk = s.data + int64_t{s.offsets[c]} * 16;
    const Raw* held = static_cast<const Raw*>(call.held) + c * kRansChunk;
    Raw* out = static_cast<Raw*>(work.decoded) + c * kRansChunk;
    if (bytes == raw) {
      for (int64_t i = threadIdx.x; i < count; i += 32) {
        out[i] = reinterpret_cast<const Raw*>(chunk)[i];
      }
      continue;
    }
    const bool fine =
        decode_rans_chunk<D>(held, count, s.base, work.table, chunk, bytes, ring, out);
    if (!fine && threadIdx.x == 0) report_fault(work.damaged, MovesCheck::kChunk, c);
  }
}

}  // namespace megatron_sparse
