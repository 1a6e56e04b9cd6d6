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
  for (int p = 0; p < bits; ++p) sum += __popc(planes[p] & places) << p;
  return sum;
}

// Places of the last planes that stand for no entry; called by a whole warp, of which lane p gets
// those of plane p.
__device__ __forceinline__ uint32_t stray_remainders(const uint32_t* planes,
                                                     const RiceParts& chunk) {
  const int lane = threadIdx.x % 32, rest = static_cast<int>(chunk.entries % kPlane);
  if (rest == 0 || lane >= chunk.r) return 0;
  const uint32_t word = planes[(planes_of(chunk.entries) - 1) * chunk.r + lane];
  return word >> rest != 0 ? word : 0;
}

// Checks chunk c of a record with indices; called by a whole warp, all lanes of which get the
// CPU's status.
__device__ __attribute__((noinline)) inline FieldError check_rice_chunk(const DecodeRecord& record,
                                                                        int64_t c) {
  const int lane = threadIdx.x % 32;
  const RiceParts chunk = rice_parts_of(record, c);
  const RiceError error = rice_rows_error(chunk, rice_word_count(record));
  if (error.fault != RiceFault::kNone) return field_error(error);
  if (chunk.entries == 0) return {false, 0, 0};
  const uint32_t* planes = rice_words(record) + chunk.before + chunk.gaps;
  const int64_t groups = planes_of(chunk.entries);
  const uint32_t* ones = planes + chunk.r * groups;
  int64_t found = 0;
  for (int64_t w = lane; w < chunk.unary; w += 32) found += __popc(ones[w]);
  found = warp_sum(found);
  const uint32_t last = ones[chunk.unary - 1];
  if (found != chunk.entries || last == 0) return field_error(kDecodeRice, found);
  const uint32_t stray = stray_remainders(planes, chunk);
  const unsigned strays = __ballot_sync(kAllLanes, stray != 0);
  if (strays != 0) {
    const int lowest = __ffs(static_cast<int>(strays)) - 1;
    return field_error(kDecodeRice, __shfl_sync(kAllLanes, stray, lowest));
  }
  int64_t rests = 0;
  for (int64_t g = lane; g < groups; g += 32) {
    rests += sum_planes(planes + g * chunk.r, chunk.r, kAllLanes);
  }
  // Every gap is at least 0, so the last element is the largest.
  const int64_t before = chunk.entries - 1;
  const int64_t place = 32 * chunk.unary - 1 - __clz(static_cast<int>(last));
  const int64_t element = ((place - before) << chunk.r) + before + warp_sum(rests);
  if (element >= chunk.numel) return field_error(kDecodeRice, element);
  return {false, 0, 0};
}

// Numbers of a chunk that `find_rice_bits` needs. Its elements, and so the numbers of its entries,
// are below 2^24.
struct RiceScan {
  const uint32_t* planes;  // of the remainders
  const uint32_t* ones;    // the unary part
  int words;               // of it
  int entries;
  int numel;
  int r;
};

struct RiceBits {
  int first;   // number of the first entry in the tile; that of all entries if there is none
  bool wrong;  // of this lane: an entry that cannot be
};

// Sets the bits of those of the chunk's entries that are among its elements [begin, begin +
// length); called by a whole warp. Entries of a wrong chunk set bits in the tile only, and each of
// them has its number below that of all entries.
__device__ __forceinline__ RiceBits find_rice_bits(const RiceScan& chunk, int begin, int length,
                                                   TileWords& bits) {
  const int lane = threadIdx.x % 32, end = begin + length;
  const bool is_last = end == chunk.numel;
  const int groups = static_cast<int>(planes_of(chunk.entries));
  RiceBits result = {chunk.entries, false};
  // Of the words before: entries, and the remainders of all whole groups of 32 of these.
  int entries = 0, rests = 0;
  int* rests_before = reinterpret_cast<int*>(bits.before);  // of a group, from that of `entries` on
  for (int w = lane; w < kTileWords; w += 32) bits.word[w] = 0;
  for (int at = 0; at < chunk.words; at += 32) {
    const uint32_t word = at + lane < chunk.words ? chunk.ones[at + lane] : 0;
    const int here = __popc(word), group = entries / kPlane, own = group + lane;
    const int sum = own < groups ? sum_planes(chunk.planes + own * chunk.r, chunk.r, kAllLanes) : 0;
    const int through = warp_inclusive_sum(here), sums = warp_inclusive_sum(sum);
    rests_before[lane] = rests + sums - sum;
    if (lane == 31) rests_before[32] = rests + sums;
    __syncwarp();
    // Zeros before a one are quotients of gaps, so with the number of the entry its place in the
    // unary part gives its element without remainders.
    const auto without_rest = [&](int entry, int bit) {
      return ((32 * (at + lane) + bit - entry) << chunk.r) + entry;
    };
    int entry = entries + through - here;
    bool may_be_in = false, is_behind = false;
    if (here != 0) {
      const int most = entry + here - 1;
      const int low = without_rest(entry, __ffs(static_cast<int>(word)) - 1) +
                      rests_before[entry / kPlane - group];
      const int high = without_rest(most, 31 - __clz(static_cast<int>(word))) +
                       rests_before[most / kPlane - group] +
                       (most % kPlane + 1) * ((1 << chunk.r) - 1);
      is_behind = low >= end;
      may_be_in = high >= begin && (!is_behind || is_last);
    }
    for (uint32_t left = may_be_in ? word : 0; left != 0; left &= left - 1, ++entry) {
      if (entry >= chunk.entries) {
        result.wrong = true;
        break;
      }
      const int rest = sum_planes(chunk.planes + entry / kPlane * chunk.r, chunk.r,
                                  kAllLanes >> (kPlane - 1 - entry % kPlane));
      const int element = without_rest(entry, __ffs(static_cast<int>(left)) - 1) +
                          rests_before[entry / kPlane - group] + rest;
      if (element >= begin && element < end) {
        const int place = element - begin;
        atomicOr(&bits.word[place / 32], 1u << place % 32);
        result.first = min(result.first, entry);
      } else if (element >= chunk.numel) {
        result.wrong = true;
      }
    }
    entries += __shfl_sync(kAllLanes, through, 31);
    rests = rests_before[entries / kPlane - group];
    __syncwarp();  // the sums have been read
    if (__any_sync(kAllLanes, is_behind)) break;
  }
  result.first = __reduce_min_sync(kAllLanes, static_cast<unsigned>(result.first));
  result.wrong |= is_last && entries != chunk.entries;
  return result;
}

// Finds and checks record k's part of a tile; called by a whole warp. A chunk's last tile checks
// all that check_rice_chunk does.
template <class Report>
__device__ __forceinline__ void find_rice_part(const DecodeRecord& record, const SumTile& tile,
                                               int k, TilePart& part, TileWords& bits,
                                               const Report& report) {
  const int lane = threadIdx.x % 32;
  const int64_t c = tile.begin >> record.log2_span;
  const int begin = static_cast<int>(tile.begin - (c << record.log2_span));
  const bool quantised = is_quantised(record.dtype);
  if (quantised) part.code_bits = static_cast<uint8_t>(code_bits(record.dtype));
  if (!record.has_indices) {
    const int64_t before = c * value_words(record.dtype, int64_t{1} << record.log2_span);
    part.values = reinterpret_cast<const uint8_t*>(rice_words(record) + before);
    part.first = begin;
    part.count = tile.length;
    part.kind = kKindDense;
    return;
  }
  const RiceParts chunk = rice_parts_of(record, c);
  RiceError error = rice_rows_error(chunk, rice_word_count(record));
  // More words would reach behind the last element. So all elements and sums stay below 2^31.
  if (chunk.unary > (chunk.entries - 1 + ((chunk.numel - chunk.entries) >> chunk.r)) / 32 + 1) {
    error.fault = RiceFault::kRice;
  }
  bool wrong = error.fault != RiceFault::kNone;
  if (!wrong && chunk.entries != 0) {
    const uint32_t* words = rice_words(record) + chunk.before;
    const uint32_t* planes = words + chunk.gaps;
    const RiceScan scan = {planes,
                           planes + chunk.r * planes_of(chunk.entries),
                           static_cast<int>(chunk.unary),
                           static_cast<int>(chunk.entries),
                           static_cast<int>(chunk.numel),
                           chunk.r};
    const RiceBits found = find_rice_bits(scan, begin, tile.length, bits);
    wrong = found.wrong;
    if (begin + tile.length == chunk.numel) {
      wrong |= scan.ones[scan.words - 1] == 0 || stray_remainders(planes, chunk) != 0;
    }
    wrong = __any_sync(kAllLanes, wrong);
    part.values = reinterpret_cast<const uint8_t*>(words);
    part.first = found.first;
    if (!quantised) part.values += found.first * dtype_bytes(record.dtype);
  }
  if (wrong) {
    if (lane == 0) report(k, kDecodeRice, c);
    return;
  }
  if (chunk.entries == 0) return;
  const uint32_t* own = bits.word + 4 * lane;
  part.count = hold_tile_words(bits, {own[0], own[1], own[2], own[3]});
  part.kind = kKindPici;
}

}  // namespace megatron_sparse
