// Records of format Rice for fuzz_decode.cpp: an encoder without torch, from the codec's own loops,
// and the repair of a damaged record's parts.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "place.h"
#include "rice.h"

namespace fuzz_rice {

using namespace megatron_sparse;

struct Shape {
  int log2_span;
  bool indices;
  bool kept[2];  // of quantised messages, these segments are dense in bf16
};

inline Shape any_shape(int dtype, std::minstd_rand& random) {
  const bool may_be_whole = dtype == kQ8 || dtype == kQ4;
  return {kLeastSpan + static_cast<int>(random() % 4 != 0 ? 0 : random() % 6),
          !may_be_whole || random() % 2 == 0,
          {is_quantised(dtype) && random() % 8 == 0, is_quantised(dtype) && random() % 8 == 0}};
}

inline void append(std::vector<uint8_t>& bytes, const void* data, size_t count) {
  const uint8_t* begin = static_cast<const uint8_t*>(data);
  bytes.insert(bytes.end(), begin, begin + count);
}

inline void pad(std::vector<uint8_t>& bytes) {
  bytes.resize((bytes.size() + 15) / 16 * 16);
}

// The sections of a segment's record. What the levels lose is left in `residual`, if there is one.
inline std::vector<uint8_t> sections(const float* x, int64_t numel, int dtype, const Shape& shape,
                                     float* residual, const Kernels& kernel) {
  std::vector<RiceRow> rows = {{0, 0}};
  std::vector<uint8_t> words;
  const int64_t span = int64_t{1} << shape.log2_span;
  for (int64_t begin = 0; begin < numel; begin += span) {
    const int64_t count = std::min(span, numel - begin);
    std::vector<int32_t> index = {-1};
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i) {
      if (shape.indices && x[begin + i] == 0) continue;
      index.push_back(static_cast<int32_t>(i));
      values.push_back(x[begin + i]);
    }
    const int64_t entries = values.size();
    std::vector<uint32_t> coded(value_words(dtype, entries));
    if (entries > 0 && is_quantised(dtype)) {
      float* rest = residual == nullptr ? nullptr : residual + begin;
      kernel.rice_quantise[dtype - kQ8][kFp32]({values.data(), entries,
                                                shape.indices ? index.data() + 1 : nullptr, rest, 0,
                                                HashSeed{}, false, coded.data()});
    } else if (entries > 0) {
      kernel.convert[kFp32][dtype](values.data(), entries, coded.data());
    }
    append(words, coded.data(), 4 * coded.size());
    if (shape.indices && entries > 0) {
      std::vector<uint32_t> gaps(2 * stage_words(count) + 4);
      const int64_t used = kernel.rice_code_gaps(index.data() + 1, entries,
                                                 rice_parameter(count, entries), gaps.data());
      append(words, gaps.data(), 4 * used);
    }
    rows.push_back({static_cast<uint32_t>(rows.back().entries + entries),
                    static_cast<uint32_t>(words.size() / 4)});
  }
  const RiceSubHeader head = {shape.indices, static_cast<uint8_t>(shape.log2_span), 0,
                              static_cast<uint32_t>(rows.size() - 1), words.size() / 4};
  std::vector<uint8_t> payload;
  append(payload, &head, sizeof head);
  if (shape.indices) append(payload, rows.data(), sizeof(RiceRow) * rows.size());
  pad(payload);
  append(payload, words.data(), words.size());
  pad(payload);
  return payload;
}

// The sections of a kept segment of a quantised message: bf16.
inline std::vector<uint8_t> kept_sections(const float* x, int64_t numel, float* residual,
                                          const Kernels& kernel) {
  std::vector<uint16_t> values(numel);
  if (numel > 0) {
    kernel.rice_round[kFp32]({x, numel, nullptr, residual, 0, HashSeed{}, false, values.data()});
  }
  std::vector<uint8_t> payload;
  append(payload, values.data(), 2 * numel);
  pad(payload);
  return payload;
}

// The message of two segments; raw segments are Rice records too, even if dense ones were smaller.
inline std::vector<uint8_t> message(const std::vector<float>& grad, const int64_t* offsets,
                                    int dtype, uint32_t step, const Shape& shape, float* residual,
                                    const Kernels& kernel) {
  std::vector<uint8_t> bytes;
  for (int s = 0; s < 2; ++s) {
    const int64_t begin = offsets[s] - offsets[0], numel = offsets[s + 1] - offsets[s];
    const float* x = grad.data() + begin;
    float* rest = residual == nullptr ? nullptr : residual + begin;
    const std::vector<uint8_t> payload = shape.kept[s]
                                             ? kept_sections(x, numel, rest, kernel)
                                             : sections(x, numel, dtype, shape, rest, kernel);
    uint64_t nnz = 0;
    for (int64_t i = 0; i < numel; ++i) nnz += x[i] != 0;
    Header header = {kMagic,
                     kVersion,
                     shape.kept[s] ? uint8_t{kKindDense} : kFormatRice,
                     static_cast<uint8_t>(shape.kept[s] ? int{kBf16} : dtype),
                     0,
                     static_cast<uint64_t>(numel),
                     nnz,
                     payload.size(),
                     static_cast<uint64_t>(offsets[s]),
                     step,
                     0};
    header.checksum = checksum_of(header);
    append(bytes, &header, sizeof header);
    append(bytes, payload.data(), payload.size());
  }
  return bytes;
}

// Makes a damaged record's sub-header, length and, if asked, rows possible; leaves its words.
inline void repair(std::vector<uint8_t>& payload, const Header& header, bool repair_rows) {
  RiceSubHeader head = {};
  payload.resize(std::max(payload.size(), sizeof head));
  std::memcpy(&head, payload.data(), sizeof head);
  const bool may_be_whole = header.dtype == kQ8 || header.dtype == kQ4;
  head.indices = may_be_whole ? head.indices % 2 : 1;
  if (head.log2_span < kLeastSpan || head.log2_span > kMostSpan) head.log2_span = kLeastSpan;
  head.zero = 0;
  const int64_t numel = static_cast<int64_t>(header.numel);
  const int64_t chunks = chunks_of(numel, head.log2_span);
  head.chunks = static_cast<uint32_t>(chunks);
  const int64_t table = rice_table_bytes(chunks, head.indices != 0);
  if (head.indices == 0) {
    head.words = whole_words(numel, header.dtype, head.log2_span);
  } else {
    head.words %= payload.size() / 4 + 8;
  }
  payload.resize(rice_payload(chunks, head.indices != 0, static_cast<int64_t>(head.words)));
  std::memcpy(payload.data(), &head, sizeof head);
  if (table == 0) return;
  RiceRow before = {0, 0};
  for (int64_t c = 0; c <= chunks; ++c) {
    uint8_t* place = payload.data() + sizeof head + c * sizeof(RiceRow);
    RiceRow row;
    std::memcpy(&row, place, sizeof row);
    if (c == 0) row = {0, 0};
    if (c == chunks) {
      row = {static_cast<uint32_t>(header.nnz), static_cast<uint32_t>(head.words)};
    } else if (repair_rows) {
      row.entries = std::min<uint32_t>(std::max(row.entries, before.entries), header.nnz);
      row.words = std::min<uint32_t>(std::max(row.words, before.words), head.words);
    }
    std::memcpy(place, &row, sizeof row);
    before = row;
  }
}

// Changes a number of one of the rows a little; of one in between, if there is one.
inline void nudge_row(uint8_t* payload, const uint8_t* end, uint32_t step,
                      std::minstd_rand& random) {
  RiceSubHeader head;
  if (end - payload < static_cast<int64_t>(sizeof head)) return;
  std::memcpy(&head, payload, sizeof head);
  const uint64_t row = head.chunks > 1 ? 1 + random() % (head.chunks - 1) : random() % 2;
  const uint64_t at = sizeof head + sizeof(RiceRow) * row + 4 * (random() % 2);
  if (at + 4 > static_cast<uint64_t>(end - payload)) return;
  uint32_t number;
  std::memcpy(&number, payload + at, sizeof number);
  number += random() % 2 != 0 ? step : -step;
  std::memcpy(payload + at, &number, sizeof number);
}

}  // namespace fuzz_rice
