// Chunks of records of format Rice (rice.h), of which the decoder trusts nothing.
#include <algorithm>
#include <vector>

#include "decode_records.h"

namespace megatron_sparse {
namespace {

Status wrong(const DecodeChunk& chunk, Field field, int64_t value) {
  return {true, chunk.segment, field, value};
}

int64_t numel_of(const DecodeChunk& chunk) {
  const int64_t span = int64_t{1} << chunk.log2_span;
  return std::min(span, chunk.numel - chunk.begin * span);
}

RiceParts chunk_of(const DecodeChunk& chunk) {
  const uint8_t* rows = chunk.payload + sizeof(RiceSubHeader);
  return rice_parts(numel_of(chunk), chunk.dtype, read_at<RiceRow>(rows, chunk.begin),
                    read_at<RiceRow>(rows, chunk.begin + 1));
}

}  // namespace

Status check_rice_chunk(const DecodeChunk& chunk, const Kernels& kernel) {
  // A record of an empty segment has a chunk without a unit; the rows were compared.
  if (!chunk.has_indices || chunk.begin == chunk.end) return {};
  const RiceParts parts = chunk_of(chunk);
  const FieldError error =
      rice_rows_error(parts, (chunk.sections.values_end - chunk.sections.values) / 4);
  if (error.wrong) return {true, chunk.segment, error.field, error.value};
  if (parts.entries == 0) return {};
  const uint8_t* gaps = chunk.payload + chunk.sections.values + 4 * (parts.before + parts.gaps);
  const uint8_t* ones = gaps + 4 * parts.r * planes_of(parts.entries);
  int64_t found = kernel.count_bits(ones, parts.unary / 2);
  const uint32_t last = read_at<uint32_t>(ones, parts.unary - 1);
  if (parts.unary % 2 != 0) found += __builtin_popcount(last);
  if (found != parts.entries || last == 0) return wrong(chunk, kFieldRice, found);
  // Every gap is at least 0, so the last element is the largest.
  const int64_t place = 32 * parts.unary - 1 - __builtin_clz(last);
  int64_t element = ((place - (parts.entries - 1)) << parts.r) + parts.entries - 1;
  const int64_t rest = parts.entries % kPlane;
  for (int64_t k = 0; k < planes_of(parts.entries) * parts.r; ++k) {
    const uint32_t word = read_at<uint32_t>(gaps, k);
    const bool is_last = k >= (planes_of(parts.entries) - 1) * parts.r;
    if (is_last && rest != 0 && word >> rest != 0) return wrong(chunk, kFieldRice, word);
    element += int64_t{__builtin_popcount(word)} << (k % parts.r);
  }
  if (element >= parts.numel) return wrong(chunk, kFieldRice, element);
  return {};
}

void add_rice_chunk(const DecodeChunk& chunk, float* target, const Kernels& kernel) {
  if (chunk.begin == chunk.end) return;
  RiceParts parts = {};
  if (chunk.has_indices) {
    parts = chunk_of(chunk);
  } else {
    parts.entries = numel_of(chunk);
    parts.before = chunk.begin * value_words(chunk.dtype, int64_t{1} << chunk.log2_span);
  }
  if (parts.entries == 0) return;
  const uint8_t* values = chunk.payload + chunk.sections.values + 4 * parts.before;
  const uint8_t* gaps = values + 4 * parts.gaps;
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
  if (!chunk.has_indices) {
    kernel.add_dense[dtype](target, values, parts.entries);
    return;
  }
  index.resize(parts.entries);
  kernel.rice_positions(gaps, parts.entries, parts.r, parts.unary, index.data());
  kernel.add_sparse[dtype](target, index.data(), values, parts.entries);
}

}  // namespace megatron_sparse
