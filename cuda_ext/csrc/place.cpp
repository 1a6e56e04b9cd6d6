#include "place.h"

#include <cstring>

#include "pici_order.h"

namespace megatron_sparse {
namespace {

// Pici's values in the paper's order: row by row of the tile, from left to right.
template <class Value>
void permute_values(const uint64_t* rows, const uint64_t* columns, const uint8_t* from,
                    uint8_t* to) {
  uint32_t next[kTileSide];
  uint32_t before = 0;
  for (int r = 0; r < kTileSide; ++r) {
    next[r] = before;
    before += static_cast<uint32_t>(__builtin_popcountll(rows[r]));
  }
  for_each_in_columns(columns, [&](int r, int) {
    std::memcpy(to, from + sizeof(Value) * next[r]++, sizeof(Value));
    to += sizeof(Value);
  });
}

void place_pici(const StageChunk& chunk, const Record& record, int value_dtype,
                const Kernels& kernel) {
  const int64_t value_bytes = dtype_bytes(value_dtype);
  const int64_t first = (chunk.begin - record.offset) / kPiciTile;
  const int64_t tiles = tiles_of(chunk.end - chunk.begin);
  uint8_t* words = record.payload + first * (kPiciTile / 8);
  uint8_t* prefix = record.payload + record.at.indices;
  uint8_t* values = record.payload + record.at.values + chunk.nnz_before * value_bytes;
  uint32_t before = static_cast<uint32_t>(chunk.nnz_before);
  const bool linear = record.kind == kKindPici;
  if (linear) {
    std::memcpy(words, chunk.words, tiles * (kPiciTile / 8));
    std::memcpy(values, chunk.values, chunk.nnz * value_bytes);
  }
  const uint8_t* staged = chunk.values;
  for (int64_t t = 0; t < tiles; ++t) {
    std::memcpy(prefix + 4 * (first + t), &before, sizeof before);
    const uint64_t* rows = chunk.words + t * kTileSide;
    const int64_t count = kernel.count_bits(rows, kTileSide);
    if (!linear) {
      uint64_t columns[kTileSide];
      std::memcpy(columns, rows, sizeof columns);
      transpose_64(columns);
      std::memcpy(words + t * sizeof columns, columns, sizeof columns);
      if (value_bytes == 4) {
        permute_values<uint32_t>(rows, columns, staged, values);
      } else {
        permute_values<uint16_t>(rows, columns, staged, values);
      }
      staged += count * value_bytes;
      values += count * value_bytes;
    }
    before += static_cast<uint32_t>(count);
  }
  if (first + tiles == tiles_of(record.numel)) {
    std::memcpy(prefix + 4 * (first + tiles), &before, sizeof before);
  }
}

void place_blocks(const StageChunk& chunk, const Record& record, int value_dtype,
                  const Kernels& kernel) {
  const int64_t value_bytes = dtype_bytes(value_dtype), size = record.block_size;
  const int64_t numel = chunk.end - chunk.begin;
  uint8_t* indices = record.payload + record.at.indices + 4 * chunk.blocks_before;
  uint8_t* target = record.payload + record.at.values + chunk.blocks_before * size * value_bytes;
  const uint8_t* staged = chunk.values;
  for (int64_t begin = 0; begin < numel; begin += size) {
    const int64_t inside = std::min(size, numel - begin);
    const uint64_t* words = chunk.words + begin / 64;
    const int64_t count = kernel.count_bits(words, (inside + 63) / 64);
    if (count == 0) continue;
    const uint32_t index = static_cast<uint32_t>((chunk.begin - record.offset + begin) / size);
    std::memcpy(indices, &index, sizeof index);
    indices += sizeof index;
    kernel.expand[value_dtype](words, nullptr, staged, inside, target);
    std::memset(target + inside * value_bytes, 0, (size - inside) * value_bytes);
    target += size * value_bytes;
    staged += count * value_bytes;
  }
}

// Where the section before the values ends, without padding.
int64_t indices_end(const Record& record) {
  switch (record.kind) {
    case kKindDense:
      return 0;
    case kKindCoo:
      return 4 * record.nnz;
    case kKindBlocks:
      return record.at.indices + 4 * record.blocks;
    default:
      return record.at.indices + 4 * (tiles_of(record.numel) + 1);
  }
}

}  // namespace

Record plan_record(uint8_t wanted, int64_t offset, int64_t numel, SegmentCount count,
                   int64_t block_size, int64_t value_bytes) {
  const auto record_of = [&](uint8_t kind) {
    return Record{kind,
                  numel,
                  count.nnz,
                  count.blocks,
                  block_size,
                  offset,
                  sections_of(kind, numel, count.nnz, count.blocks, block_size, value_bytes),
                  nullptr};
  };
  const Record dense = record_of(kKindDense);
  if (wanted == kKindDense) return dense;
  Record sparse = record_of(wanted == kKindAdaptive ? uint8_t{kKindCoo} : wanted);
  if (wanted == kKindAdaptive) {
    const Record pici = record_of(kKindPici);
    if (pici.at.payload < sparse.at.payload) sparse = pici;
  }
  return sparse.at.payload < dense.at.payload ? sparse : dense;
}

uint8_t* write_header(const Record& record, int value_dtype, uint32_t step, uint8_t* out) {
  Header header = {kMagic,
                   kVersion,
                   static_cast<uint8_t>(record.kind & 0xf),
                   static_cast<uint8_t>(value_dtype),
                   record.kind == kKindPici ? kFlagLinear : uint8_t{0},
                   static_cast<uint64_t>(record.numel),
                   static_cast<uint64_t>(record.nnz),
                   static_cast<uint64_t>(record.at.payload),
                   static_cast<uint64_t>(record.offset),
                   step,
                   0};
  header.checksum = checksum_of(header);
  std::memcpy(out, &header, sizeof header);
  return out + kHeaderBytes;
}

uint8_t* next_record(const Record& record, uint8_t* out, const int64_t* slots) {
  if (slots == nullptr) return out + record.bytes();
  const int64_t slot = slots[1] - slots[0];
  std::memset(out + record.bytes(), 0, slot - record.bytes());
  return out + slot;
}

void start_records(std::vector<Record>& records, int value_dtype, uint32_t step, uint8_t* out,
                   const int64_t* slots) {
  for (size_t s = 0; s < records.size(); ++s) {
    Record& record = records[s];
    uint8_t* payload = record.payload = write_header(record, value_dtype, step, out);
    if (record.kind == kKindBlocks) {
      const uint32_t subheader[4] = {static_cast<uint32_t>(record.block_size),
                                     static_cast<uint32_t>(record.blocks), 0, 0};
      std::memcpy(payload, subheader, sizeof subheader);
    }
    const int64_t end = indices_end(record);
    std::memset(payload + end, 0, record.at.values - end);
    std::memset(payload + record.at.values_end, 0, record.at.payload - record.at.values_end);
    out = next_record(record, out, slots == nullptr ? nullptr : slots + s);
  }
}

void place_chunk(const StageChunk& chunk, const Record& record, int value_dtype,
                 const Kernels& kernel) {
  const int64_t value_bytes = dtype_bytes(value_dtype), first = chunk.begin - record.offset;
  const int64_t numel = chunk.end - chunk.begin;
  uint8_t* values = record.payload + record.at.values;
  switch (record.kind) {
    case kKindDense:
      kernel.expand[value_dtype](chunk.words, chunk.signs, chunk.values, numel,
                                 values + first * value_bytes);
      return;
    case kKindCoo:
      kernel.list_bits(chunk.words, (numel + 63) / 64, static_cast<int32_t>(first), chunk.nnz,
                       record.payload + 4 * chunk.nnz_before);
      std::memcpy(values + chunk.nnz_before * value_bytes, chunk.values, chunk.nnz * value_bytes);
      return;
    case kKindBlocks:
      place_blocks(chunk, record, value_dtype, kernel);
      return;
    default:
      place_pici(chunk, record, value_dtype, kernel);
  }
}

}  // namespace megatron_sparse
