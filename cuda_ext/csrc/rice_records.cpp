#include "rice_records.h"

#include <algorithm>
#include <vector>

namespace megatron_sparse {
namespace {

Status wrong(const DecodeChunk& chunk, Field field, int64_t value) {
  return {true, chunk.segment, field, value};
}

// One chunk's parts. With indices it is what its rows say, which `check_rice_chunk` checks.
struct Parts {
  int64_t numel;
  int64_t entries;
  int64_t words;
  int64_t before;  // words
  int r;
  int64_t unary;  // words; negative if there are too few words
  const uint8_t* values;
  const uint8_t* gaps;
};

RiceRow row_at(const DecodeChunk& chunk, int64_t c) {
  RiceRow row;
  std::memcpy(&row, chunk.payload + sizeof(RiceSubHeader) + c * sizeof row, sizeof row);
  return row;
}

Parts parts_of(const DecodeChunk& chunk) {
  const int64_t c = chunk.begin, span = int64_t{1} << chunk.log2_span;
  Parts parts = {};
  parts.numel = std::min(span, chunk.numel - c * span);
  if (chunk.indices) {
    const RiceRow row = row_at(chunk, c), next = row_at(chunk, c + 1);
    parts.entries = int64_t{next.entries} - row.entries;
    parts.words = int64_t{next.words} - row.words;
    parts.before = row.words;
  } else {
    parts.entries = parts.numel;
    parts.words = value_words(chunk.dtype, parts.entries);
    parts.before = c * value_words(chunk.dtype, span);
  }
  parts.values = chunk.payload + chunk.at.values + 4 * parts.before;
  if (!chunk.indices || parts.entries <= 0 || parts.entries > parts.numel) return parts;
  const int64_t values = value_words(chunk.dtype, parts.entries);
  parts.gaps = parts.values + 4 * values;
  parts.r = rice_parameter(parts.numel, parts.entries);
  parts.unary = parts.words - values - parts.r * planes_of(parts.entries);
  return parts;
}

uint32_t word_of(const uint8_t* words, int64_t k) {
  uint32_t word;
  std::memcpy(&word, words + 4 * k, sizeof word);
  return word;
}

}  // namespace

Status start_rice(const Header& header, int64_t available, DecodeChunk& record) {
  const int64_t announced = static_cast<int64_t>(header.payload_bytes);
  if (available < static_cast<int64_t>(sizeof(RiceSubHeader))) {
    return wrong(record, kFieldSize, kHeaderBytes + available);
  }
  RiceSubHeader head;
  std::memcpy(&head, record.payload, sizeof head);
  if (head.indices > 1 || (head.indices == 0 && header.dtype != kQ8 && header.dtype != kQ4)) {
    return wrong(record, kFieldChunk, head.indices);
  }
  if (head.log2_span < kLeastSpan || head.log2_span > kMostSpan) {
    return wrong(record, kFieldChunk, head.log2_span);
  }
  if (head.zero != 0) return wrong(record, kFieldChunk, head.zero);
  record.log2_span = head.log2_span;
  record.indices = head.indices != 0;
  record.units = chunks_of(record.numel, head.log2_span);
  if (head.chunks != record.units) return wrong(record, kFieldChunk, head.chunks);
  // A chunk never takes more words than its elements in fp32 and a word for each of them.
  const uint64_t most =
      record.indices
          ? 2 * static_cast<uint64_t>(record.numel) + 64 * head.chunks
          : static_cast<uint64_t>(whole_words(record.numel, header.dtype, head.log2_span));
  if (head.words > most || (!record.indices && head.words != most)) {
    return wrong(record, kFieldTable, static_cast<int64_t>(head.words));
  }
  const int64_t words = static_cast<int64_t>(head.words);
  record.at.values = sizeof head + rice_table_bytes(record.units, record.indices);
  record.at.values_end = record.at.values + 4 * words;
  record.at.payload = rice_payload(record.units, record.indices, words);
  if (announced != record.at.payload) return wrong(record, kFieldPayloadBytes, announced);
  if (announced > available) return wrong(record, kFieldSize, kHeaderBytes + available);
  if (!record.indices) return {};
  const RiceRow first = row_at(record, 0), last = row_at(record, record.units);
  if (first.entries != 0 || first.words != 0) return wrong(record, kFieldTable, first.entries);
  if (last.entries != record.nnz || last.words != head.words) {
    return wrong(record, kFieldTable, last.entries);
  }
  return {};
}

Status check_rice_chunk(const DecodeChunk& chunk, const Kernels& kernel) {
  // A record of an empty segment has a chunk without a unit; the rows were compared.
  if (!chunk.indices || chunk.begin == chunk.end) return {};
  const Parts parts = parts_of(chunk);
  // Rows ascend from zero to the record's words, so no chunk lies outside.
  if (parts.entries < 0 || parts.entries > parts.numel || parts.words < 0) {
    return wrong(chunk, kFieldTable, parts.entries);
  }
  const int64_t end = 4 * (parts.before + parts.words);
  if (end > chunk.at.values_end - chunk.at.values) return wrong(chunk, kFieldTable, end / 4);
  if (parts.entries == 0) {
    return parts.words == 0 ? Status{} : wrong(chunk, kFieldRice, parts.words);
  }
  if (parts.unary <= 0) return wrong(chunk, kFieldRice, parts.words);
  const uint8_t* ones = parts.gaps + 4 * parts.r * planes_of(parts.entries);
  int64_t found = kernel.count_bits(ones, parts.unary / 2);
  const uint32_t last = word_of(ones, parts.unary - 1);
  if (parts.unary % 2 != 0) found += __builtin_popcount(last);
  if (found != parts.entries || last == 0) return wrong(chunk, kFieldRice, found);
  // Every gap is at least 0, so the last element is the largest.
  const int64_t place = 32 * parts.unary - 1 - __builtin_clz(last);
  int64_t element = ((place - (parts.entries - 1)) << parts.r) + parts.entries - 1;
  const int64_t rest = parts.entries % kPlane;
  for (int64_t k = 0; k < planes_of(parts.entries) * parts.r; ++k) {
    const uint32_t word = word_of(parts.gaps, k);
    const bool is_last = k >= (planes_of(parts.entries) - 1) * parts.r;
    if (is_last && rest != 0 && word >> rest != 0) return wrong(chunk, kFieldRice, word);
    element += int64_t{__builtin_popcount(word)} << (k % parts.r);
  }
  if (element >= parts.numel) return wrong(chunk, kFieldRice, element);
  return {};
}

void add_rice_chunk(const DecodeChunk& chunk, float* target, const Kernels& kernel) {
  if (chunk.begin == chunk.end) return;
  const Parts parts = parts_of(chunk);
  if (parts.entries == 0) return;
  const uint8_t* values = parts.values;
  int dtype = chunk.dtype;
  // Kept from call to call: fresh memory would cost more than the work.
  static thread_local std::vector<float> numbers;
  static thread_local std::vector<int32_t> index;
  if (is_quantised(dtype)) {
    numbers.resize((parts.entries + kRiceGroup - 1) / kRiceGroup * kRiceGroup);
    kernel.rice_dequantise[dtype - kQ8](values, parts.entries, numbers.data());
    values = reinterpret_cast<const uint8_t*>(numbers.data());
    dtype = kFp32;
  }
  target += chunk.begin << chunk.log2_span;
  if (!chunk.indices) {
    kernel.add_dense[dtype](target, values, parts.entries);
    return;
  }
  index.resize(parts.entries);
  kernel.rice_positions(parts.gaps, parts.entries, parts.r, parts.unary, index.data());
  kernel.add_sparse[dtype](target, index.data(), values, parts.entries);
}

}  // namespace megatron_sparse
