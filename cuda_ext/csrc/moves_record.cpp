#include "moves_record.h"

#include <algorithm>
#include <cstring>

#include "header.h"

namespace megatron_sparse {
namespace {

// The frequencies of a record; returns the first context that is wrong, or -1.
int64_t read_table(const uint8_t* table, int64_t bytes, int symbols, MovesFrequencies& found) {
  if (bytes < kContexts) return 0;
  int64_t at = kContexts;
  for (int64_t context = 0; context < kContexts; ++context) {
    const int64_t stored = table[context];
    if (stored > symbols || at + 2 * stored > bytes) return context;
    uint32_t sum = 0;
    for (int64_t symbol = 0; symbol < stored; ++symbol, at += 2) {
      const uint16_t frequency = read_at<uint16_t>(table + at);
      found[context * kMaxSymbols + symbol] = frequency;
      sum += frequency;
    }
    if (sum != (stored == 0 ? 0 : kScale)) return context;
  }
  return at == bytes ? -1 : kContexts - 1;
}

}  // namespace

uint32_t moves_base_exponent(const void* old, int64_t numel, int dtype) {
  const int64_t samples = std::min<int64_t>(numel, kExponentSamples);
  const int64_t bytes = dtype_bytes(dtype);
  int64_t counts[256] = {};
  for (int64_t i = 0; i < samples; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, static_cast<const char*>(old) + i * numel / samples * bytes, bytes);
    ++counts[bits >> mantissa_bits(dtype) & exponent_mask(dtype)];
  }
  int top = 255;
  for (int64_t above = 0; top > 0 && above + counts[top] <= samples / 256; --top) {
    above += counts[top];
  }
  return static_cast<uint32_t>(std::max(top - (kContexts - 1), 0));
}

MovesFrequencies moves_quantise(const std::vector<uint64_t>& counts) {
  MovesFrequencies frequencies(kContexts * kMaxSymbols);
  for (int context = 0; context < kContexts; ++context) {
    const uint64_t* count = counts.data() + context * kMaxSymbols;
    uint32_t* frequency = frequencies.data() + context * kMaxSymbols;
    uint64_t total = 0;
    for (int s = 0; s < kMaxSymbols; ++s) total += count[s];
    if (total == 0) continue;
    int64_t rest = kScale;
    for (int s = 0; s < kMaxSymbols; ++s) {
      if (count[s] == 0) continue;
      const uint64_t rounded = ((count[s] << kScaleBits) + total / 2) / total;
      frequency[s] = static_cast<uint32_t>(std::max<uint64_t>(rounded, 1));
      rest -= frequency[s];
    }
    if (rest > 0) *std::max_element(frequency, frequency + kMaxSymbols) += rest;
    for (; rest < 0; ++rest) --*std::max_element(frequency, frequency + kMaxSymbols);
  }
  return frequencies;
}

std::vector<uint32_t> moves_encoder_table(const MovesFrequencies& frequencies) {
  std::vector<uint32_t> table(kContexts * kMaxSymbols);
  for (int context = 0; context < kContexts; ++context) {
    uint32_t start = 0;
    for (int s = 0; s < kMaxSymbols; ++s) {
      const int at = context * kMaxSymbols + s;
      table[at] = encoder_entry(start, frequencies[at]);
      start += frequencies[at];
    }
  }
  return table;
}

std::vector<uint32_t> moves_decoder_table(const MovesFrequencies& frequencies) {
  std::vector<uint32_t> table(kContexts * kScale);
  for (int context = 0; context < kContexts; ++context) {
    uint32_t* slot = table.data() + context * kScale;
    // A context that does not occur has one symbol, the states of which only lose bits.
    for (uint32_t above = 0; above < kScale; ++above) slot[above] = decoder_entry(above, 1, 0);
    for (int s = 0; s < kMaxSymbols; ++s) {
      const uint32_t frequency = frequencies[context * kMaxSymbols + s];
      for (uint32_t above = 0; above < frequency; ++above) {
        *slot++ = decoder_entry(above, frequency, s);
      }
    }
  }
  return table;
}

std::vector<uint8_t> moves_table_bytes(const MovesFrequencies& frequencies) {
  std::vector<uint8_t> bytes(kContexts);
  for (int context = 0; context < kContexts; ++context) {
    const uint32_t* frequency = frequencies.data() + context * kMaxSymbols;
    int stored = kMaxSymbols;
    while (stored > 0 && frequency[stored - 1] == 0) --stored;
    bytes[context] = static_cast<uint8_t>(stored);
    for (int s = 0; s < stored; ++s) {
      bytes.push_back(static_cast<uint8_t>(frequency[s]));
      bytes.push_back(static_cast<uint8_t>(frequency[s] >> 8));
    }
  }
  return bytes;
}

MovesFault moves_read_record(const uint8_t* body, int64_t bytes, MovesRecord& record) {
  constexpr int64_t kHead = sizeof(MovesSubHeader);
  if (bytes < kHead) return {kFieldSize, 0};
  const MovesSubHeader head = read_at<MovesSubHeader>(body);
  if (head.zeros[0] != 0 || head.zeros[1] != 0 || head.zeros[2] != 0) return {kFieldZeros, 0};
  record.chunks = record.coder == kMovesRaw ? 0 : chunk_count(record.numel);
  if (head.chunks != record.chunks) return {kFieldChunks, 0};
  record.base_exponent = head.base_exponent;
  const int64_t value_bytes = dtype_bytes(record.dtype);
  if (record.coder == kMovesRaw) {
    if (head.table_bytes != 0) return {kFieldTable, 0};
    if (bytes != kHead + pad16(record.numel * value_bytes)) return {kFieldSize, 0};
    record.data = body + kHead;
    return {};
  }
  const uint8_t* table = body + kHead + pad16(4 * (record.chunks + 1));
  const int64_t table_bytes = head.table_bytes;
  record.data = table + pad16(table_bytes);
  const int64_t data_bytes = bytes - (record.data - body);
  if (data_bytes < 0) return {kFieldSize, 0};
  record.frequencies.assign(kContexts * kMaxSymbols, 0);
  const int64_t bad = read_table(table, table_bytes, symbols_of(record.dtype), record.frequencies);
  if (bad >= 0) return {kFieldTable, bad};
  record.offsets.resize(record.chunks + 1);
  for (int64_t c = 0; c <= record.chunks; ++c) {
    record.offsets[c] = int64_t{read_at<uint32_t>(body + kHead, c)} * 16;
    const int64_t least = c == 0 ? 0 : record.offsets[c - 1];
    const int64_t most =
        c == 0 ? 0 : std::min(data_bytes, least + pad16(record.count(c - 1) * value_bytes));
    if (record.offsets[c] < least || record.offsets[c] > most) return {kFieldOffsets, c};
  }
  if (record.offsets.back() != data_bytes) return {kFieldOffsets, record.chunks};
  for (int64_t c = 0; c < record.chunks; ++c) {
    const bool fits = record.offsets[c + 1] - record.offsets[c] >= 4 * kStates;
    if (!fits && !record.is_raw(c)) return {kFieldChunk, c};
  }
  return {};
}

}  // namespace megatron_sparse
