// How far parameters moved: the layout of a record behind its header, and the arithmetic of moves;
// for host and device. docs/parameters.md specifies both.
#pragma once

#include <cstdint>

#include "dtypes.h"
#include "header.h"
#include "portability.h"

namespace megatron_sparse {

inline constexpr uint8_t kFormatMoves = 6;
enum MovesCoder : int { kMovesRaw = 0, kMovesRans = 1 };

inline constexpr int kStates = 32;  // of a chunk
inline constexpr int64_t kRansChunk = 16384;
inline constexpr int kScaleBits = 12;
inline constexpr uint32_t kScale = uint32_t{1} << kScaleBits;
inline constexpr int kContexts = 16;
inline constexpr uint32_t kDirect = 16;  // moves below are symbols themselves
inline constexpr uint32_t kLowestState = uint32_t{1} << 16;
inline constexpr int kMaxSymbols = 72;
// Of many numbers the encoder counts every fourth block. As it may then miss symbols, each counts
// once more.
inline constexpr int kCountBlock = 1024;
inline constexpr int kCountStride = 4;
inline constexpr int64_t kCountAll = int64_t{1} << 19;  // up to so many numbers are counted all
inline constexpr int kExponentSamples = 4096;
inline constexpr int64_t kMaxMoves = int64_t{1} << 34;  // then offsets fit 32 bits

struct MovesSubHeader {
  uint32_t checksum;  // of all words of the record behind it
  uint32_t chunks;
  uint32_t table_bytes;
  uint8_t base_exponent;
  uint8_t zeros[3];
};
static_assert(sizeof(MovesSubHeader) == 16, "the wire format has no compiler padding");
inline constexpr int64_t kMovesBodyAt = kHeaderBytes;
inline constexpr int64_t kMovesSectionsAt = kMovesBodyAt + sizeof(MovesSubHeader);

// A table's entry for the encoder: start << 16 | frequency. For the decoder, for each slot:
// (slot - start) << 19 | (frequency - 1) << 7 | symbol.
MS_INLINE constexpr uint32_t encoder_entry(uint32_t start, uint32_t frequency) {
  return start << 16 | frequency;
}
MS_INLINE constexpr uint32_t decoder_entry(uint32_t above_start, uint32_t frequency,
                                           uint32_t symbol) {
  return above_start << 19 | (frequency - 1) << 7 | symbol;
}

MS_INLINE constexpr int symbols_of(int dtype) {
  return dtype == kFp32 ? 72 : 40;
}

MS_INLINE constexpr int mantissa_bits(int dtype) {
  return dtype == kFp32 ? 23 : dtype == kBf16 ? 7 : 10;
}

MS_INLINE constexpr uint32_t exponent_mask(int dtype) {
  return dtype == kFp16 ? 31 : 255;
}

// The chunks of rans.
MS_INLINE constexpr int64_t chunk_count(int64_t numel) {
  return (numel + kRansChunk - 1) / kRansChunk;
}

MS_INLINE constexpr int64_t numbers_in_chunk(int64_t numel, int64_t chunk) {
  const int64_t left = numel - chunk * kRansChunk;
  return left < kRansChunk ? left : kRansChunk;
}

// The sign of a number in the lower bits; see docs/parameters.md, "Mirrored numbers".
MS_INLINE constexpr int sign_bit(int dtype) {
  return dtype == kFp32 ? 31 : 15;
}

MS_INLINE constexpr uint32_t mix_word(uint32_t word, uint32_t position) {
  uint32_t mixed = (word ^ position * 0x9e3779b9u) * 0x85ebca6bu;
  return (mixed ^ mixed >> 15) * 0xc2b2ae35u;
}

}  // namespace megatron_sparse
