// The workspace of the encoders of moves.
#pragma once

#include "launch_grid.cuh"
#include "moves_launch.h"
#include "moves_scalar.cuh"
#include "scan.cuh"

namespace megatron_sparse {

// What the launches of the rans encoder tell each other.
struct RansTables {
  uint32_t base;                 // exponent of context 0
  uint32_t table_bytes;          // of the frequency table in the record
  uint2 entries[kTableEntries];  // see rans_entry
};

inline constexpr int kRansSteps = 4;  // of 32 numbers, loaded while those before are coded
inline constexpr int64_t kSlotSlack = kRansSteps * kStepWords;

// Words of a chunk's room: of its raw numbers, which a chunk that pays does not fill, and in front
// of these of some steps, so that the encoder looks at its end once for all of them.
MS_INLINE int64_t slot_words(int dtype) {
  return kSlotSlack + kRansChunk * dtype_bytes(dtype) / 2;
}

inline constexpr uint32_t kRawWords = 0xffffffffu;  // the number of words of a raw chunk

struct MovesEncodeWork {
  ScanState* ends;      // zeroed; [chunks], where coded chunks end, in units of 16 bytes
  unsigned* ticket;     // zeroed
  unsigned* sealed;     // zeroed; blocks that have added to the sum
  uint32_t* sum;        // zeroed; of the mixed words, of raw numbers or of what precedes chunks
  uint32_t* chunk_sum;  // zeroed; of the chunks' mixed words
  unsigned long long* counts;  // zeroed; [kContexts][kMaxSymbols]
  int64_t zeroed_bytes;
  RansTables* tables;
  uint32_t* states;  // [chunks][kStates]
  uint32_t* words;   // [chunks], how many there are, or kRawWords
  uint16_t* slots;   // [chunks][slot_words], words lie at the end
  int64_t bytes;
};

inline MovesEncodeWork lay_out_encode(void* base, int64_t numel, int dtype) {
  const int64_t chunks = chunk_count(numel);
  Carver memory(base);
  MovesEncodeWork w = {};
  w.ends = memory.take<ScanState>(chunks);
  w.ticket = memory.take<unsigned>(1);
  w.sealed = memory.take<unsigned>(1);
  w.sum = memory.take<uint32_t>(1);
  w.chunk_sum = memory.take<uint32_t>(1);
  w.counts = memory.take<unsigned long long>(kTableEntries);
  w.zeroed_bytes = memory.used();
  w.tables = memory.take<RansTables>(1);
  w.states = memory.take<uint32_t>(chunks * kStates);
  w.words = memory.take<uint32_t>(chunks);
  w.slots = memory.take<uint16_t>(chunks * slot_words(dtype));
  w.bytes = memory.used();
  return w;
}

// Where the chunks of a coded record lie.
__device__ __forceinline__ uint8_t* chunks_of_record(const MovesEncodeArguments& call,
                                                     const MovesEncodeWork& work, int64_t chunks) {
  return call.out + kMovesSectionsAt + offset_table_bytes(chunks) + pad16(work.tables->table_bytes);
}

// Publishes the size of a chunk, writes its entry of the table of offsets, and returns where it
// begins among the chunks. Called by a warp.
__device__ __forceinline__ int64_t place_chunk(const MovesEncodeArguments& call,
                                               const MovesEncodeWork& work, int64_t chunk,
                                               int64_t chunks, int64_t bytes) {
  const int64_t before = look_back(work.ends, chunk, bytes / 16);
  uint32_t* offsets = reinterpret_cast<uint32_t*>(call.out + kMovesSectionsAt);
  if (threadIdx.x % 32 == 0) {
    offsets[chunk] = static_cast<uint32_t>(before);
    if (chunk + 1 == chunks) {
      offsets[chunks] = static_cast<uint32_t>(before + bytes / 16);
      for (int64_t i = chunks + 1; i < offset_table_bytes(chunks) / 4; ++i) offsets[i] = 0;
    }
  }
  return 16 * before;
}

// Writes a vector of the record; returns its mixed words.
__device__ __forceinline__ uint32_t put_vector(const MovesEncodeArguments& call, uint8_t* target,
                                               const uint4& vector) {
  *reinterpret_cast<uint4*>(target) = vector;
  return mix_vector(vector, static_cast<uint32_t>((target - call.out - kMovesBodyAt) / 4));
}

// Writes a chunk's raw numbers, padded; called by a whole block. Returns this thread's mixed words.
template <int D>
__device__ __forceinline__ uint32_t write_raw_chunk(const MovesEncodeArguments& call, int64_t chunk,
                                                    uint8_t* target) {
  const MovesRaw<D>* now = static_cast<const MovesRaw<D>*>(call.now) + chunk * kRansChunk;
  const int64_t count = numbers_in_chunk(call.numel, chunk);
  constexpr int kItems = 16 / sizeof(MovesRaw<D>);
  uint32_t sum = 0;
  for (int64_t v = threadIdx.x; v * kItems < count; v += blockDim.x) {
    sum += put_vector(call, target + 16 * v, vector_of(now, v * kItems, count));
  }
  return sum;
}

}  // namespace megatron_sparse
