#include "decode_records.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "pici_order.h"

namespace megatron_sparse {
namespace {

constexpr int64_t kDenseStep = int64_t{1} << 16;  // elements of a chunk, dense or in blocks
constexpr int64_t kCooStep = int64_t{1} << 13;    // entries
constexpr int64_t kTileStep = 32;                 // tiles
// From this many entries a tile on, processing whole tiles is faster than single elements.
constexpr int64_t kCrowded = kPiciTile / 8;

int64_t units_of(const DecodeChunk& record) {
  switch (record.kind) {
    case kKindDense:
      return record.numel;
    case kKindCoo:
      return record.nnz;
    case kKindBlocks:
      return record.blocks;
    case kKindRice:
      return chunks_of(record.numel, record.log2_span);
    default:
      return tiles_of(record.numel);
  }
}

int64_t step_of(const DecodeChunk& record) {
  switch (record.kind) {
    case kKindDense:
      return kDenseStep;
    case kKindCoo:
      return kCooStep;
    case kKindBlocks:
      return std::max(kDenseStep / record.block_size, int64_t{1});
    case kKindRice:
      return 1;
    default:
      return kTileStep;
  }
}

// Indices of COO entries or blocks: strictly ascending, each below `limit`.
Status check_indices(const DecodeChunk& chunk, int64_t limit) {
  const uint8_t* indices = chunk.payload + chunk.sections.indices;
  int64_t previous = chunk.begin > 0 ? read_at<int32_t>(indices, chunk.begin - 1) : -1;
  for (int64_t k = chunk.begin; k < chunk.end; ++k) {
    const int64_t index = read_at<int32_t>(indices, k);
    if (index <= previous || index < 0 || index >= limit) {
      return {true, chunk.segment, kFieldIndices, index};
    }
    previous = index;
  }
  return {};
}

// Each tile's bits against its prefix sums. The chunks together make a chain from 0 to nnz, so no
// value lies outside the record.
Status check_tiles(const DecodeChunk& chunk, const Kernels& kernel) {
  const uint8_t* prefix = chunk.payload + chunk.sections.indices;
  if (chunk.units == 0 && read_at<uint32_t>(prefix, 0) != 0) {
    return {true, chunk.segment, kFieldPrefix, read_at<uint32_t>(prefix, 0)};
  }
  for (int64_t t = chunk.begin; t < chunk.end; ++t) {
    const uint8_t* words = chunk.payload + t * (kPiciTile / 8);
    const int64_t before = read_at<uint32_t>(prefix, t), after = read_at<uint32_t>(prefix, t + 1);
    const bool last = t + 1 == chunk.units;
    if ((t == 0 && before != 0) || (last && after != chunk.nnz) || after > chunk.nnz ||
        after - before != kernel.count_bits(words, kTileSide)) {
      return {true, chunk.segment, kFieldPrefix, after};
    }
    const int64_t inside = chunk.numel - t * kPiciTile;
    if (!last || inside == kPiciTile) continue;
    for (int64_t w = 0; w < kTileSide; ++w) {
      // Linear: bit b is element 64 w + b. Paper: element 64 b + w.
      const int64_t bits = chunk.kind == kKindPici ? inside - kTileSide * w
                                                   : (inside - w + kTileSide - 1) / kTileSide;
      const uint64_t allowed = bits >= 64 ? ~uint64_t{0} : bits > 0 ? (uint64_t{1} << bits) - 1 : 0;
      const uint64_t word = read_at<uint64_t>(words, w);
      if ((word & ~allowed) != 0) {
        return {true, chunk.segment, kFieldWords, static_cast<int64_t>(word)};
      }
    }
  }
  return {};
}

Status check_blocks(const DecodeChunk& chunk, int64_t value_bytes) {
  const int64_t limit = (chunk.numel + chunk.block_size - 1) / chunk.block_size;
  const Status status = check_indices(chunk, limit);
  if (status.wrong || chunk.end == chunk.begin) return status;
  const int64_t k = chunk.end - 1;
  const int64_t begin =
      read_at<int32_t>(chunk.payload + chunk.sections.indices, k) * chunk.block_size;
  const int64_t inside = std::min(chunk.block_size, chunk.numel - begin);
  const uint8_t* block = chunk.payload + chunk.sections.values + k * chunk.block_size * value_bytes;
  for (int64_t i = inside * value_bytes; i < chunk.block_size * value_bytes; ++i) {
    if (block[i] != 0) return {true, chunk.segment, kFieldBlockPadding, block[i]};
  }
  return {};
}

// Everything but the headers: indices, prefix sums, bits and padding.
Status check_chunk(const DecodeChunk& chunk, const Kernels& kernel) {
  switch (chunk.kind) {
    case kKindDense:
      return {};
    case kKindCoo:
      return check_indices(chunk, chunk.numel);
    case kKindBlocks:
      return check_blocks(chunk, dtype_bytes(chunk.dtype));
    case kKindRice:
      return check_rice_chunk(chunk, kernel);
    default:
      return check_tiles(chunk, kernel);
  }
}

// The elements of the segment that the chunk covers: up to the next chunk's first one.
struct Span {
  int64_t begin;
  int64_t end;
};

bool is_indexed(const DecodeChunk& chunk) {
  return chunk.kind == kKindCoo || chunk.kind == kKindBlocks;
}

// An entry's element, or a block's number.
int64_t index_of(const DecodeChunk& chunk, int64_t unit) {
  return read_at<int32_t>(chunk.payload + chunk.sections.indices, unit);
}

Span span_of(const DecodeChunk& chunk) {
  const int64_t width = unit_width(chunk);
  const auto element = [&](int64_t unit) {
    return width * (is_indexed(chunk) ? index_of(chunk, unit) : unit);
  };
  return {chunk.begin == 0 ? 0 : element(chunk.begin),
          chunk.end == chunk.units ? chunk.numel : element(chunk.end)};
}

// The first unit that does not lie before an element; the element is where a unit may begin.
int64_t first_unit(const DecodeChunk& record, int64_t element) {
  const int64_t number = element / unit_width(record);
  if (!is_indexed(record)) return number;
  int64_t before = 0, behind = record.units;
  while (before < behind) {
    const int64_t middle = before + (behind - before) / 2;
    if (index_of(record, middle) < number) {
      before = middle + 1;
    } else {
      behind = middle;
    }
  }
  return before;
}

// In linear order a run of tiles is one long bitmap.
void add_linear_tiles(const DecodeChunk& chunk, int value_dtype, float* target,
                      const Kernels& kernel) {
  const uint8_t* prefix = chunk.payload + chunk.sections.indices;
  const int64_t before = read_at<uint32_t>(prefix, chunk.begin);
  const int64_t count = read_at<uint32_t>(prefix, chunk.end) - before;
  const uint8_t* words = chunk.payload + chunk.begin * (kPiciTile / 8);
  const uint8_t* values = chunk.payload + chunk.sections.values + before * dtype_bytes(value_dtype);
  const Span span = span_of(chunk);
  if (count < kCrowded * (chunk.end - chunk.begin)) {
    int32_t indices[kCrowded * kTileStep];
    kernel.list_bits(words, (chunk.end - chunk.begin) * kTileSide, 0, count, indices);
    kernel.add_sparse[value_dtype](target + span.begin, indices, values, count);
  } else {
    kernel.add_bits[value_dtype](target + span.begin, words, span.end - span.begin, values, count);
  }
}

void add_paper_tiles(const DecodeChunk& chunk, int value_dtype, float* target,
                     const Kernels& kernel) {
  const uint8_t* prefix = chunk.payload + chunk.sections.indices;
  const int64_t value_bytes = dtype_bytes(value_dtype);
  for (int64_t t = chunk.begin; t < chunk.end; ++t) {
    uint64_t columns[kTileSide];
    std::memcpy(columns, chunk.payload + t * (kPiciTile / 8), sizeof columns);
    int32_t indices[kPiciTile];
    int32_t* next = indices;
    for_each_in_columns(columns, [&](int r, int c) { *next++ = kTileSide * r + c; });
    const uint8_t* values =
        chunk.payload + chunk.sections.values + read_at<uint32_t>(prefix, t) * value_bytes;
    kernel.add_sparse[value_dtype](target + t * kPiciTile, indices, values, next - indices);
  }
}

}  // namespace

int64_t unit_width(const DecodeChunk& chunk) {
  switch (chunk.kind) {
    case kKindDense:
    case kKindCoo:
      return 1;
    case kKindBlocks:
      return chunk.block_size;
    case kKindRice:
      return int64_t{1} << chunk.log2_span;
    default:
      return kPiciTile;
  }
}

DecodeChunk part_of(const DecodeChunk& record, int64_t begin, int64_t end) {
  DecodeChunk part = record;
  part.begin = first_unit(record, begin);
  part.end = end == record.numel ? record.units : first_unit(record, end);
  return part;
}

Status find_records(const MessageBytes& message, const Expected& expected,
                    std::vector<DecodeChunk>& records) {
  const int64_t* slots = expected.slots;
  if (slots != nullptr && slots[expected.segment_count] != message.size) {
    return {true, expected.segment_count, kFieldSize, message.size};
  }
  int64_t at = 0;
  for (int64_t s = 0; s < expected.segment_count; ++s) {
    const int64_t end = slots == nullptr ? message.size : slots[s + 1];
    if (end - at < kHeaderBytes) return {true, s, kFieldSize, end};
    const Header header = read_at<Header>(message.bytes + at);
    at += kHeaderBytes;
    DecodeChunk record = {};
    const int64_t offset = expected.offsets[s];
    const uint32_t sum = message.sums == nullptr ? 0 : static_cast<uint32_t>(message.sums[s]);
    const FieldError error = check_header(
        header, message.bytes + at, end - at,
        {offset, expected.offsets[s + 1] - offset, expected.value_dtype, expected.step, sum},
        record);
    if (error.wrong) return {true, s, error.field, error.value};
    record.segment = s;
    record.end = record.units = units_of(record);
    record.acc_begin = offset - expected.base;
    records.push_back(record);
    at = slots == nullptr ? at + record.sections.payload : end;
  }
  if (at != message.size) return {true, expected.segment_count, kFieldSize, message.size};
  return {};
}

std::vector<DecodeChunk> cut_records(const std::vector<DecodeChunk>& records) {
  std::vector<DecodeChunk> chunks;
  for (const DecodeChunk& record : records) {
    const int64_t step = step_of(record);
    DecodeChunk chunk = record;
    do {
      chunk.end = std::min(chunk.begin + step, record.end);
      chunks.push_back(chunk);
      chunk.begin = chunk.end;
    } while (chunk.begin < record.end);
  }
  return chunks;
}

void add_chunk(const DecodeChunk& chunk, bool fresh, float* acc, const Kernels& kernel) {
  float* target = acc + chunk.acc_begin;
  if (fresh) {
    const Span span = span_of(chunk);
    std::fill(target + span.begin, target + span.end, 0.0f);
  }
  const int value_dtype = chunk.dtype;
  const int64_t value_bytes = dtype_bytes(value_dtype), count = chunk.end - chunk.begin;
  const uint8_t* values = chunk.payload + chunk.sections.values;
  const uint8_t* indices = chunk.payload + chunk.sections.indices;
  switch (chunk.kind) {
    case kKindDense:
      kernel.add_dense[value_dtype](target + chunk.begin, values + chunk.begin * value_bytes,
                                    count);
      return;
    case kKindCoo:
      kernel.add_sparse[value_dtype](target, indices + 4 * chunk.begin,
                                     values + chunk.begin * value_bytes, count);
      return;
    case kKindBlocks:
      for (int64_t k = chunk.begin; k < chunk.end; ++k) {
        const int64_t begin = read_at<int32_t>(indices, k) * chunk.block_size;
        kernel.add_dense[value_dtype](target + begin, values + k * chunk.block_size * value_bytes,
                                      std::min(chunk.block_size, chunk.numel - begin));
      }
      return;
    case kKindPici:
      add_linear_tiles(chunk, value_dtype, target, kernel);
      return;
    case kKindRice:
      add_rice_chunk(chunk, target, kernel);
      return;
    default:
      add_paper_tiles(chunk, value_dtype, target, kernel);
  }
}

Status check_chunks(const std::vector<DecodeChunk>& chunks, const Kernels& kernel) {
  const int64_t count = static_cast<int64_t>(chunks.size());
  const int64_t bad =
      first_bad(count, 1, [&](int64_t c) { return check_chunk(chunks[c], kernel).wrong; });
  return bad < count ? check_chunk(chunks[bad], kernel) : Status{};
}

Status decode_records(const MessageBytes& message, const Expected& expected, bool fresh, float* acc,
                      const Kernels& kernel) {
  std::vector<DecodeChunk> records;
  Status status = find_records(message, expected, records);
  if (status.wrong) return status;
  const std::vector<DecodeChunk> chunks = cut_records(records);
  status = check_chunks(chunks, kernel);
  if (status.wrong) return status;
  // Indices ascend, so no two chunks touch the same element.
  for_each(chunks.size(), [&](int64_t c) { add_chunk(chunks[c], fresh, acc, kernel); });
  return {};
}

}  // namespace megatron_sparse
