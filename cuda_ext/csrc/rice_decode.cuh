// Chunks of Rice records on CUDA: their check, and the entries of a tile as the bits of a bitmap.
//
// A chunk has one tile or more. For each of them a warp reads the chunk's index words from the
// begin on, as far as the tile reaches: of each 32 words of the unary part first the number of
// entries and the sum of remainders, from which follows between which elements a word's entries
// lie; then the elements of the entries of words that may reach into the tile. Encoders take chunks
// of about 1024 to 2048 entries, so this is little beside the tile. It is right, but slow, for long
// chunks that are full: the number of words read is that of a chunk's index words times its tiles.
//
// Bytes an element at density d, of 2^s elements a chunk, for each record: values as other formats;
// of the index words, which have i bytes an element, up to i max(1, 2^(s - 12) / 2), mostly from
// the L2 cache.
#pragma once

#include <cstddef>

#include "tile_part.cuh"
#include "tile_words.cuh"

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

// A bit of word p stands for 2^p: the sum of the numbers in `bits` planes, of which only those
// whose place is in `places` count.
__device__ __forceinline__ int sum_planes(const uint32_t* planes, int bits, uint32_t places) {
  int sum = 0;
#pragma unroll 1
  for (int p = 0; p < bits; ++p) sum += __popc(planes[p] & places) << p;
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
  FieldError error = field_error(rice_rows_error(chunk, rice_word_count(record)));
  if (!error.wrong && chunk.entries != 0) {
    const uint32_t* planes = rice_words(record) + chunk.before + chunk.gaps;
    const int entries = static_cast<int>(chunk.entries), r = chunk.r;
    const int groups = (entries + kPlane - 1) / kPlane;
    const uint32_t* ones = planes + groups * r;
    int64_t found = 0, rests = 0;
#pragma unroll 1
    for (int64_t w = lane; w < chunk.unary; w += 32) found += __popc(ones[w]);
#pragma unroll 1
    for (int g = lane; g < groups; g += 32) rests += sum_planes(planes + g * r, r, kAllLanes);
    found = warp_sum(found);
    const uint32_t last = ones[chunk.unary - 1], stray = stray_remainders(planes, entries, r);
    const unsigned strays = __ballot_sync(kAllLanes, stray != 0);
    // Every gap is at least 0, so the last element is the largest.
    const int64_t place = 32 * chunk.unary - 1 - __clz(static_cast<int>(last));
    const int64_t element = ((place - (entries - 1)) << r) + entries - 1 + warp_sum(rests);
    if (found != entries || last == 0) {
      error = field_error(kDecodeRice, found);
    } else if (strays != 0) {
      error = field_error(kDecodeRice,
                          __shfl_sync(kAllLanes, stray, __ffs(static_cast<int>(strays)) - 1));
    } else if (element >= chunk.numel) {
      error = field_error(kDecodeRice, element);
    }
  }
  if (error.wrong && status != nullptr && lane == 0) {
    status[0] = error.field;
    status[1] = error.value;
  }
  return !error.wrong;
}

// What a warp knows about a chunk, in shared memory to save registers. Elements, and so the numbers
// of entries, are below 2^24.
struct RiceScan {
  const uint32_t* values;
  const uint32_t* planes;  // of the remainders
  const uint32_t* ones;    // the unary part
  int words;               // of it
  int entries;
  int numel;
  int r;
  int begin;                     // of the tile in the chunk
  int end;                       // of the tile
  int rests_before[kPlane + 1];  // sums of the remainders before each of these groups of 32 entries

  __device__ __forceinline__ bool is_last() const { return end == numel; }
  __device__ __forceinline__ int groups() const { return (entries + kPlane - 1) / kPlane; }

  // The element of an entry whose one is at a place of the unary part, less the remainders. Zeros
  // before it are quotients of gaps.
  __device__ __forceinline__ int element(int entry, int place) const {
    return ((place - entry) << r) + entry;
  }
};

struct RiceBits {
  int first;   // number of the first entry in the tile; that of all entries if there is none
  bool wrong;  // of this lane: an entry that cannot be
};

// Sets the bits of those of a chunk's entries that are in the tile; called by a whole warp. Entries
// of a wrong chunk set bits in the tile only, and each of them has its number below that of all
// entries.
__device__ __forceinline__ RiceBits find_rice_bits(RiceScan& chunk, uint32_t* bits) {
  const int lane = threadIdx.x % 32;
  RiceBits result = {chunk.entries, false};
  // Of the words before: entries, and the remainders of all whole groups of 32 of these.
  int entries = 0, rests = 0;
  for (int w = lane; w < kTileWords; w += 32) bits[w] = 0;
  for (int at = lane; at - lane < chunk.words; at += 32) {
    const uint32_t word = at < chunk.words ? chunk.ones[at] : 0;
    const int here = __popc(word), group = entries / kPlane;
    const int through = warp_inclusive_sum(here);
    int sum = 0;
    if (group + lane < chunk.groups()) {
      sum = sum_planes(chunk.planes + (group + lane) * chunk.r, chunk.r, kAllLanes);
    }
    const int sums = rests + warp_inclusive_sum(sum);
    chunk.rests_before[lane + 1] = sums;
    if (lane == 0) chunk.rests_before[0] = rests;
    __syncwarp();
    // A word whose entries lie before or behind the tile is left out.
    int entry = entries + through - here;
    bool may_be_in = false, is_behind = false;
    if (here != 0) {
      const int most = entry + here - 1;
      const int low = chunk.element(entry, 32 * at + __ffs(static_cast<int>(word)) - 1) +
                      chunk.rests_before[entry / kPlane - group];
      const int high = chunk.element(most, 32 * at + 31 - __clz(static_cast<int>(word))) +
                       chunk.rests_before[most / kPlane - group] +
                       (most % kPlane + 1) * ((1 << chunk.r) - 1);
      is_behind = low >= chunk.end;
      may_be_in = high >= chunk.begin && (!is_behind || chunk.is_last());
    }
    for (uint32_t left = may_be_in ? word : 0; left != 0; left &= left - 1, ++entry) {
      if (entry >= chunk.entries) {
        result.wrong = true;
        break;
      }
      const int rest = sum_planes(chunk.planes + entry / kPlane * chunk.r, chunk.r,
                                  kAllLanes >> (kPlane - 1 - entry % kPlane));
      const int element = chunk.element(entry, 32 * at + __ffs(static_cast<int>(left)) - 1) +
                          chunk.rests_before[entry / kPlane - group] + rest;
      if (element >= chunk.begin && element < chunk.end) {
        const int place = element - chunk.begin;
        atomicOr(&bits[place / 32], 1u << place % 32);
        result.first = min(result.first, entry);
      } else if (element >= chunk.numel) {
        result.wrong = true;
      }
    }
    entries += __shfl_sync(kAllLanes, through, 31);
    rests = chunk.rests_before[entries / kPlane - group];
    __syncwarp();  // the sums have been read
    if (__any_sync(kAllLanes, is_behind)) break;
  }
  result.first = __reduce_min_sync(kAllLanes, static_cast<unsigned>(result.first));
  result.wrong |= chunk.is_last() && entries != chunk.entries;
  return result;
}

// Describes the chunk that a tile lies in. entries is -1 if its rows are wrong. Called by one lane;
// not inline, so that its numbers of 64 bits take no registers from loops.
__device__ __attribute__((noinline)) inline void start_rice_scan(const DecodeRecord& record,
                                                                 const SumTile& tile,
                                                                 RiceScan& scan) {
  const int64_t c = tile.begin >> record.log2_span;
  const RiceParts chunk = rice_parts_of(record, c);
  scan.entries = -1;
  // More words would reach behind the last element. So all elements and sums stay below 2^31.
  if (rice_rows_error(chunk, rice_word_count(record)).fault != RiceFault::kNone ||
      chunk.unary > (chunk.entries - 1 + ((chunk.numel - chunk.entries) >> chunk.r)) / 32 + 1) {
    return;
  }
  scan.values = rice_words(record) + chunk.before;
  scan.planes = scan.values + chunk.gaps;
  scan.words = static_cast<int>(chunk.unary);
  scan.entries = static_cast<int>(chunk.entries);
  scan.numel = static_cast<int>(chunk.numel);
  scan.r = chunk.r;
  scan.ones = scan.planes + scan.groups() * scan.r;
  scan.begin = static_cast<int>(tile.begin - (c << record.log2_span));
  scan.end = scan.begin + tile.length;
}

// The part of a chunk with indices, as find_rice_part. Leaves the entries as bits.
__device__ __forceinline__ bool find_rice_entries(const DecodeRecord& record, const SumTile& tile,
                                                  TilePart& part, TileWords& bits) {
  // The counts of `bits` come after the scan.
  RiceScan& scan = *reinterpret_cast<RiceScan*>(bits.before);
  static_assert(sizeof(RiceScan) <= sizeof bits.before && offsetof(TileWords, before) % 8 == 0);
  const int lane = threadIdx.x % 32;
  if (lane == 0) start_rice_scan(record, tile, scan);
  __syncwarp();
  if (scan.entries <= 0) return scan.entries == 0;
  const RiceBits found = find_rice_bits(scan, bits.word);
  bool wrong = found.wrong;
  if (scan.is_last()) {
    wrong |=
        scan.ones[scan.words - 1] == 0 || stray_remainders(scan.planes, scan.entries, scan.r) != 0;
  }
  if (__any_sync(kAllLanes, wrong)) return false;
  const uint8_t* values = reinterpret_cast<const uint8_t*>(scan.values);
  const uint32_t* own = bits.word + 4 * lane;
  const int count = hold_tile_words(bits, {own[0], own[1], own[2], own[3]});
  if (lane == 0) {
    part.first = found.first;
    part.values = values;
    if (part.code_bits == 0) part.values += found.first * dtype_bytes(record.dtype);
    part.count = count;
    part.kind = kKindPici;
  }
  return true;
}

// Finds and checks a record's part of a tile; called by a whole warp, which gets false if the part
// is wrong. A chunk's last tile checks all that check_rice_chunk does. The part and the words are
// those of the warp's number in the block. Not inline, so that the loops around it keep their
// registers.
__device__ __attribute__((noinline)) inline bool find_rice_part(const DecodeRecord& record,
                                                                const SumTile& tile,
                                                                TilePart* parts, TileWords* words) {
  TilePart& part = parts[threadIdx.x / 32];
  if (threadIdx.x % 32 == 0) {
    part = {nullptr, nullptr, 0, 0, kKindCoo, 0, 0};
    if (is_quantised(record.dtype)) part.code_bits = static_cast<uint8_t>(code_bits(record.dtype));
  }
  if (record.has_indices) return find_rice_entries(record, tile, part, words[threadIdx.x / 32]);
  if (threadIdx.x % 32 == 0) {
    const int64_t c = tile.begin >> record.log2_span;
    const int64_t before = c * value_words(record.dtype, int64_t{1} << record.log2_span);
    part.values = reinterpret_cast<const uint8_t*>(rice_words(record) + before);
    part.first = static_cast<int>(tile.begin - (c << record.log2_span));
    part.count = tile.length;
    part.kind = kKindDense;
  }
  return true;
}

}  // namespace megatron_sparse
