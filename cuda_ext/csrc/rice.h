// The record format Rice: Rice-coded gaps between entries, and values in full or in few bits with
// levels for each group of entries. docs/wire-format.md specifies it. For host and device.
#pragma once

#include <cstdint>
#include <cstring>

#include "dtypes.h"
#include "header.h"
#include "portability.h"

namespace megatron_sparse {

inline constexpr uint8_t kFormatRice = 8;
inline constexpr uint8_t kKindRice = 8;
inline constexpr int kLeastSpan = 12, kMostSpan = 24;            // log2 of a chunk's elements
inline constexpr int kRiceGroup = 128;                           // entries with common levels
inline constexpr int kPlane = 32;                                // entries of a word of bits
inline constexpr uint32_t kNanLevels = 0x7fc00000u;              // of a group that holds NaN or Inf
inline constexpr uint32_t kLeastRefusedMagnitude = 0x7b800000u;  // 2^120: counts as Inf

// Dtype codes of values that only this format has, beside those of dtypes.h.
enum QuantisedDtype : int { kQ8 = 3, kQ4 = 4, kQ3 = 5, kQ2 = 6 };

MS_INLINE constexpr bool is_quantised(int dtype) {
  return dtype >= kQ8;
}

// The dtype of values that are not quantised yet.
MS_INLINE constexpr int staged_dtype(int dtype) {
  return is_quantised(dtype) ? int{kFp32} : dtype;
}

// Bits of a quantised value's code.
MS_INLINE constexpr int code_bits(int dtype) {
  return dtype == kQ8 ? 8 : dtype == kQ4 ? 4 : dtype == kQ3 ? 3 : 2;
}

struct RiceSubHeader {
  uint8_t indices;  // 1: gaps are coded; 0: every element has a value
  uint8_t log2_span;
  uint16_t zero;
  uint32_t chunks;
  uint64_t words;  // of all chunks
};
static_assert(sizeof(RiceSubHeader) == 16, "the wire format has no compiler padding");

struct RiceRow {
  uint32_t entries;  // before the chunk
  uint32_t words;    // before the chunk
};

MS_INLINE int64_t chunks_of(int64_t numel, int log2_span) {
  return (numel + (int64_t{1} << log2_span) - 1) >> log2_span;
}

// Of 64 bits or, on a device, of 32.
template <class T>
MS_INLINE T planes_of(T entries) {
  return (entries + kPlane - 1) / kPlane;
}

// Rice's parameter of a chunk of `numel` elements with `entries` > 0 entries: the smallest r that
// does not make the worst case, entries (r + 1) + (numel - entries) / 2^r bits, longer.
template <class T>
MS_INLINE int rice_parameter(T numel, T entries) {
  int r = 0;
  while (numel - entries > entries << (r + 1)) ++r;
  return r;
}

// Words of a chunk's values.
template <class T>
MS_INLINE T value_words(int dtype, T entries) {
  if (dtype == kFp32) return entries;
  if (!is_quantised(dtype)) return (entries + 1) / 2;
  return (entries + kRiceGroup - 1) / kRiceGroup + code_bits(dtype) * planes_of(entries);
}

// Bytes behind the sub-header up to the first chunk's words.
MS_INLINE int64_t rice_table_bytes(int64_t chunks, bool indices) {
  return indices ? (8 * (chunks + 1) + 15) / 16 * 16 : 0;
}

MS_INLINE int64_t rice_payload(int64_t chunks, bool indices, int64_t words) {
  return 16 + rice_table_bytes(chunks, indices) + (4 * words + 15) / 16 * 16;
}

// A chunk with indices as its rows describe it, which may be wrong.
struct RiceParts {
  int64_t numel;
  int64_t entries;
  int64_t words;
  int64_t before;  // words
  // Zero if the number of entries is impossible or 0:
  int r;
  int64_t gaps;   // words of the values, which precede those of the gaps
  int64_t unary;  // words; not above 0 if there are too few words
};

MS_INLINE RiceParts rice_parts(int64_t numel, int dtype, RiceRow row, RiceRow next) {
  RiceParts chunk = {};
  chunk.numel = numel;
  chunk.entries = int64_t{next.entries} - row.entries;
  chunk.words = int64_t{next.words} - row.words;
  chunk.before = row.words;
  if (chunk.entries <= 0 || chunk.entries > numel) return chunk;
  const uint32_t entries = static_cast<uint32_t>(chunk.entries);  // 32 bits are faster on a device
  chunk.r = rice_parameter(static_cast<uint32_t>(numel), entries);
  chunk.gaps = value_words(dtype, entries);
  chunk.unary = chunk.words - chunk.gaps - chunk.r * planes_of(entries);
  return chunk;
}

// Words of all chunks of a record in which every element has a value.
MS_INLINE int64_t whole_words(int64_t numel, int dtype, int log2_span) {
  const int64_t span = int64_t{1} << log2_span, full = numel >> log2_span;
  return full * value_words(dtype, span) + value_words(dtype, numel - (full << log2_span));
}

// The most words that the chunks of a record with at most `entries` entries take, wherever these
// lie: Rice's worst case, and the roundings of each chunk. wire.py has the same.
MS_INLINE int64_t most_rice_words(int64_t numel, int64_t entries, int dtype, int log2_span) {
  const int64_t k = entries < numel ? entries : numel;
  if (k == 0) return 0;
  const int64_t chunks = chunks_of(numel, log2_span), filled = chunks < k ? chunks : k;
  const int r = rice_parameter(numel, k);
  const int64_t bits = k * (r + 1) + ((numel - k) >> r);
  int64_t values = k;
  if (is_quantised(dtype)) {
    values = k / kRiceGroup + filled + code_bits(dtype) * (k / kPlane + filled);
  } else if (dtype != kFp32) {
    values = k / 2 + filled;
  }
  return values + bits / 32 + 1 + filled * log2_span;
}

// bf16 bits of a number >= 0, towards zero or away from it.
MS_INLINE uint32_t bf16_down(uint32_t bits) {
  return bits >> 16;
}
MS_INLINE uint32_t bf16_up(uint32_t bits) {
  return (bits + 0xffffu) >> 16;
}

}  // namespace megatron_sparse
