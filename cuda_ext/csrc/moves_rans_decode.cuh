// The rans coder of moves on CUDA: a warp decodes a chunk, a state in each lane.
//
// Words come through a ring in shared memory, which is filled ahead of them. There the tables are,
// too: a look-up in memory would take a cycle for each line that the lanes touch. Of a short shard
// blocks have few warps, so that all multiprocessors have some. Bytes of device memory: a number
// read and written an element, and the record read.
#pragma once

#include "moves_check_kernel.cuh"

namespace megatron_sparse {

inline constexpr int kRingHalf = 8 * 32;  // words: a vector from each lane
inline constexpr int kDecodeWarps = 16;   // of a block, at most
// Steps of 32 numbers, loaded while those before are decoded. A number takes two words at most, of
// fp32 three; a half may be overwritten as soon as the next is begun.
template <int D>
inline constexpr int kDecodedSteps = D == kFp32 ? 2 : 4;
static_assert(kDecodedSteps<kFp32> * kStepWords <= kRingHalf, "of fp32");
static_assert(kDecodedSteps<kBf16> * 2 * kStates <= kRingHalf, "of 16 bits");

extern __shared__ uint4 rans_shared[];  // RansDecoder, and a ring of each warp

MS_INLINE int rans_shared_bytes(int warps) {
  return static_cast<int>(sizeof(RansDecoder)) + warps * 4 * kRingHalf;
}

// The words of a chunk, in order; zeros behind its end.
struct WordReader {
  uint16_t* ring;      // [2 kRingHalf], in shared memory
  const uint4* chunk;  // the words, 16-byte aligned
  int vectors;         // of the chunk
  int read;            // words
  int halves;          // in the ring so far
  uint4 ahead;         // of the next half

  __device__ __forceinline__ void load_ahead() {
    const int v = halves * 32 + static_cast<int>(threadIdx.x % 32);
    ahead = v < vectors ? chunk[v] : uint4{0, 0, 0, 0};
  }

  __device__ __forceinline__ void store_ahead() {
    __syncwarp();
    reinterpret_cast<uint4*>(ring)[halves % 2 * 32 + threadIdx.x % 32] = ahead;
    ++halves;
    load_ahead();
    __syncwarp();
  }

  // Makes room for kDecodedSteps<D>; called by a whole warp.
  __device__ __forceinline__ void fill() {
    if (read > (halves - 1) * kRingHalf) store_ahead();
  }

  // States below kLowestState take their next word.
  __device__ __forceinline__ void refill(uint32_t& state) {
    const bool empty = state < kLowestState;
    const unsigned lanes = __ballot_sync(kAllLanes, empty);
    const int place = read + __popc(lanes & ((1u << threadIdx.x % 32) - 1));
    const uint32_t word = ring[place % (2 * kRingHalf)];
    state = empty ? state << 16 | word : state;
    read += __popc(lanes);
  }
};

// The move of this lane's next number.
template <int D>
__device__ __forceinline__ uint32_t next_move(uint32_t& state, WordReader& words, uint32_t context,
                                              bool active, const RansDecoder& tables) {
  // Of a lane without a number the state stays as it is.
  uint2 entry = {0, 0};
  if (active) {
    const uint32_t slot = state & (kScale - 1);
    entry = tables.entries[context * kMaxSymbols + tables.symbols[context][slot]];
    state = (entry.x & 0x1fffu) * (state >> kScaleBits) + slot - (entry.x >> 13 & (kScale - 1));
  }
  words.refill(state);
  const uint32_t bits = entry.x >> 25;
  if (!__any_sync(kAllLanes, bits != 0)) return entry.y;
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
  return entry.y + 2 * raw;
}

// Decodes a chunk into `out`; whether it ends as it must, the same in all lanes.
template <int D>
__device__ __forceinline__ bool decode_rans_chunk(const MovesRaw<D>* held, const uint32_t* down,
                                                  int64_t count, uint32_t base,
                                                  const RansDecoder& tables, const uint8_t* chunk,
                                                  int64_t bytes, uint16_t* ring, MovesRaw<D>* out) {
  const int lane = threadIdx.x % 32, numbers = static_cast<int>(count);
  uint32_t state = reinterpret_cast<const uint32_t*>(chunk)[lane];
  const uint8_t* first = chunk + 4 * kStates;
  const int word_count = static_cast<int>(bytes - 4 * kStates) / 2;
  WordReader words = {ring, reinterpret_cast<const uint4*>(first), word_count / 8, 0, 0, {}};
  words.load_ahead();
  words.store_ahead();
  constexpr int kGroup = 32 * kDecodedSteps<D>;
  const int whole = numbers / kGroup * kGroup;
  uint32_t next[kDecodedSteps<D>], next_down[kDecodedSteps<D>];
  const auto load = [&](int first) {
#pragma unroll
    for (int s = 0; s < kDecodedSteps<D>; ++s) {
      next_down[s] = down[first / 32 + s];
      next[s] = mirrored<D>(held[first + 32 * s + lane], next_down[s], lane);
    }
  };
  const auto next_z = [&](uint32_t was, bool active) {
    return next_move<D>(state, words, context_of<D>(was, base), active, tables);
  };
  if (whole > 0) load(0);
  for (int first = 0; first < whole; first += kGroup) {
    uint32_t was[kDecodedSteps<D>], signs[kDecodedSteps<D>];
#pragma unroll
    for (int s = 0; s < kDecodedSteps<D>; ++s) was[s] = next[s], signs[s] = next_down[s];
    if (first + kGroup < whole) load(first + kGroup);
    words.fill();
#pragma unroll
    for (int s = 0; s < kDecodedSteps<D>; s += 2) {
      MovesRaw<D>* to = out + first + 32 * s + lane;
      const uint32_t z = next_z(was[s], true), other = next_z(was[s + 1], true);
      uint32_t now[2];
      if constexpr (D == kFp32) {
        now[0] = moved_by<D>(was[s], z);
        now[1] = moved_by<D>(was[s + 1], other);
      } else {
        const uint32_t pair = moved_pair(was[s] | was[s + 1] << 16, z | other << 16);
        now[0] = pair & 0xffffu;
        now[1] = pair >> 16;
      }
      to[0] = static_cast<MovesRaw<D>>(mirrored<D>(now[0], signs[s], lane));
      to[32] = static_cast<MovesRaw<D>>(mirrored<D>(now[1], signs[s + 1], lane));
    }
  }
  for (int i = whole + lane; i - lane < numbers; i += 32) {
    const bool active = i < numbers;
    words.fill();
    const uint32_t signs = active ? down[i / 32] : 0;
    const uint32_t was = active ? mirrored<D>(held[i], signs, lane) : 0, z = next_z(was, active);
    if (active) out[i] = static_cast<MovesRaw<D>>(mirrored<D>(moved_by<D>(was, z), signs, lane));
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
__global__ void __launch_bounds__(32 * kDecodeWarps, 2)
    moves_rans_decode_kernel(const __grid_constant__ MovesBatch batch) {
  using Raw = MovesRaw<D>;
  const MovesDecodeArguments& call = batch.call[blockIdx.y];
  const MovesDecodeWork& work = batch.work[blockIdx.y];
  if (call.coder != kMovesRans || work.found->fault != 0) return;
  const MovesSections s = sections_of_moves(call);
  constexpr int kVectors = sizeof(RansDecoder) / 16;
#pragma unroll 8
  for (int v = threadIdx.x; v < kVectors; v += blockDim.x) {
    rans_shared[v] = reinterpret_cast<const uint4*>(work.tables)[v];
  }
  __syncthreads();
  const RansDecoder& tables = *reinterpret_cast<const RansDecoder*>(rans_shared);
  const int lane = threadIdx.x % 32;
  uint16_t* ring =
      reinterpret_cast<uint16_t*>(rans_shared + kVectors) + threadIdx.x / 32 * 2 * kRingHalf;
  for (int64_t c = first_item() / 32; c < s.chunks; c += item_stride() / 32) {
    const int64_t count = numbers_in_chunk(call.numel, c);
    const int64_t raw = pad16(count * sizeof(Raw)), bytes = s.chunk_bytes(c, raw);
    const uint8_t* chunk = s.data + int64_t{s.offsets[c]} * 16;
    const Raw* held = static_cast<const Raw*>(call.held) + c * kRansChunk;
    const uint32_t* down = call.down + c * kRansChunk / 32;
    Raw* out = static_cast<Raw*>(work.decoded) + c * kRansChunk;
    if (bytes == raw) {
      for (int64_t i = lane; i < count; i += 32) {
        out[i] = reinterpret_cast<const Raw*>(chunk)[i];
      }
      continue;
    }
    const bool fine =
        decode_rans_chunk<D>(held, down, count, s.base, tables, chunk, bytes, ring, out);
    if (!fine && lane == 0) report_fault(&work.found->damaged, MovesCheck::kChunk, c);
  }
}

}  // namespace megatron_sparse
