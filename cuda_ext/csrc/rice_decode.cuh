// Chunks of Rice records on CUDA: their check, and what a block that adds one must know
// (tile_rice.cuh).
#pragma once

#include "scan.cuh"
#include "tile_part.cuh"

namespace megatron_sparse {

__device__ __forceinline__ const uint32_t* rice_words(const DecodeRecord& record) {
  return reinterpret_cast<const uint32_t*>(record.payload + record.sections.values);
}

__device__ __forceinline__ int64_t rice_word_count(const DecodeRecord& record) {
  return (record.sections.values_end - record.sections.values) / 4;
}

__device__ __forceinline__ int64_t rice_chunk_numel(const DecodeRecord& record, int64_t c) {
  const int64_t span = int64_t{1} << record.log2_span;
  return min(span, record.numel - c * span);
}

__device__ __forceinline__ RiceParts rice_parts_of(const DecodeRecord& record, int64_t c) {
  const RiceRow* rows = reinterpret_cast<const RiceRow*>(indices_of(record)) + c;
  return rice_parts(rice_chunk_numel(record, c), record.dtype, rows[0], rows[1]);
}

// The sum of the remainders of a set of 32 entries, of which only those whose place is in `places`
// count. Bits of plane p stand for 2^p.
__device__ __forceinline__ int sum_remainders(const uint32_t* planes, unsigned set, int r,
                                              uint32_t places) {
  int sum = 0;
  unsigned at = (set + 1) * r;
#pragma unroll 1
  for (int p = 0; p < r; ++p) sum = 2 * sum + __popc(planes[--at] & places);
  return sum;
}

// Places of the last planes that stand for no entry; called by a whole warp, of which lane p gets
// those of plane p.
__device__ __forceinline__ uint32_t stray_remainders(const uint32_t* planes, int entries, int r) {
  const int lane = threadIdx.x % 32, rest = entries % kPlane;
  if (rest == 0 || lane >= r) return 0;
  const uint32_t word = planes[entries / kPlane * r + lane];
  return word >> rest != 0 ? word : 0;
}

// Checks chunk c of a record with indices; called by a whole warp. The field and the value of the
// CPU's status, if the chunk is wrong, go to `status`, if there is one. Written for few registers.
__device__ __forceinline__ bool check_rice_chunk(const DecodeRecord& record, int64_t c,
                                                 int64_t* status) {
  const int lane = threadIdx.x % 32;
  const RiceParts chunk = rice_parts_of(record, c);
  FieldError error = rice_rows_error(chunk, rice_word_count(record));
  if (!error.wrong && chunk.entries != 0) {
    const uint32_t* planes = rice_words(record) + chunk.before + chunk.gaps;
    const int entries = static_cast<int>(chunk.entries), r = chunk.r;
    const int groups = (entries + kPlane - 1) / kPlane;
    const uint32_t* ones = planes + groups * r;
    int64_t found = 0, rests = 0;
#pragma unroll 1
    for (int64_t w = lane; w < chunk.unary; w += 32) found += __popc(ones[w]);
#pragma unroll 1
    for (int g = lane; g < groups; g += 32) rests += sum_remainders(planes, g, r, kAllLanes);
    found = warp_sum(found);
    const uint32_t last = ones[chunk.unary - 1], stray = stray_remainders(planes, entries, r);
    const unsigned strays = __ballot_sync(kAllLanes, stray != 0);
    // Every gap is at least 0, so the last element is the largest.
    const int64_t place = 32 * chunk.unary - 1 - __clz(static_cast<int>(last));
    const int64_t element = ((place - (entries - 1)) << r) + entries - 1 + warp_sum(rests);
    if (found != entries || last == 0) {
      error = field_error(kFieldRice, found);
    } else if (strays != 0) {
      error = field_error(kFieldRice,
                          __shfl_sync(kAllLanes, stray, __ffs(static_cast<int>(strays)) - 1));
    } else if (element >= chunk.numel) {
      error = field_error(kFieldRice, element);
    }
  }
  if (error.wrong && status != nullptr && lane == 0) {
    status[0] = error.field;
    status[1] = error.value;
  }
  return !error.wrong;
}

// A tile's chunk, in shared memory to save registers. Elements are below 2^24, so
// there are at most 2^24 entries.
//
// Sets are 32 entries, as planes have them. The entry number l of a set, whose one is at a place of
// the words that may hold the tile's entries, is the tile's element
//   base of the set + ((place - l) << r) + l + remainders up to the entry's + offset.
struct alignas(16) RiceChunk {
  const uint32_t* values;  // without indices, those of the tile
  // Entries of the words that may hold the tile's:
  int first;
  int last;         // behind the last one
  int length;       // of the tile
  int value_words;  // of quantised values
  int bits;         // of a quantised value
  int r;
  int planes_end;  // behind the planes of the remainders, from the values on
  int offset;
  int first_word;  // of the words that may hold entries of the tile, from the values on
  int word_count;
  int listed;   // where the places of the first entry's group begin (RiceMemory)
  int words;    // of the unary part; -1 without indices
  int entries;  // -1 if the chunk's rows are wrong; without indices, those of the tile
  int numel;
  int begin;  // of the tile in the chunk

  // The planes of the remainders, and the unary part.
  __device__ __forceinline__ const uint32_t* planes() const { return values + value_words; }
  __device__ __forceinline__ const uint32_t* ones() const { return values + planes_end; }
  __device__ __forceinline__ int end() const { return begin + length; }  // of the tile
};

// Describes the chunk that a tile lies in. Called by one lane; not inline, so that its numbers of
// 64 bits take no registers from loops.
__device__ __attribute__((noinline)) inline void find_rice_chunk(const DecodeRecord& record,
                                                                 const SumTile& tile,
                                                                 RiceChunk& found) {
  const int64_t c = tile.begin >> record.log2_span;
  found.bits = code_bits(record.dtype);
  found.word_count = found.first = found.last = 0;
  found.begin = static_cast<int>(tile.begin - (c << record.log2_span));
  found.length = tile.length;
  found.numel = static_cast<int>(rice_chunk_numel(record, c));
  if (!record.has_indices) {
    const int64_t before = c * value_words(record.dtype, int64_t{1} << record.log2_span) +
                           value_words(record.dtype, found.begin);
    found.values = rice_words(record) + before;
    found.words = -1;
    found.entries = tile.length;
    found.value_words = static_cast<int>(value_words(record.dtype, tile.length));
    return;
  }
  const RiceParts chunk = rice_parts_of(record, c);
  found.words = 0;
  found.entries = -1;
  // More words would reach behind the last element. So all elements and sums stay below 2^31.
  const uint32_t entries = static_cast<uint32_t>(chunk.entries);
  if (rice_rows_error(chunk, rice_word_count(record)).wrong ||
      chunk.unary > (entries - 1 + ((found.numel - entries) >> chunk.r)) / 32 + 1) {
    return;
  }
  found.values = rice_words(record) + chunk.before;
  found.value_words = static_cast<int>(chunk.gaps);
  found.words = static_cast<int>(chunk.unary);
  found.entries = static_cast<int>(entries);
  found.r = chunk.r;
  found.planes_end = found.value_words + static_cast<int>(planes_of(entries)) * chunk.r;
}

}  // namespace megatron_sparse
