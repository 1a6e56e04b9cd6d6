// The loops of records of format Rice: levels and codes of values, gaps between entries.
// Included once for each instruction set, like vector_lanes.h.
#pragma once

#include "codec_cpu.h"
#include "elementwise.h"
#include "kernels.h"
#include "lane_masks.h"
#include "lanes.h"
#include "rice_levels.h"

namespace megatron_sparse {
namespace MS_ISA {

MS_INLINE float as_float(uint32_t bits) {
  return ScalarLanes::as_float(bits);
}
MS_INLINE uint32_t as_bits(float value) {
  return ScalarLanes::as_bits(value);
}

// Writes bit p of the 32 numbers, for each p below BITS, as word p.
template <int BITS>
MS_INLINE void store_planes(const uint32_t* numbers, uint32_t* words) {
  constexpr int W = MS_WIDTH;
  for (int p = 0; p < BITS; ++p) {
    uint32_t word = 0;
    for (int i = 0; i < kPlane; i += W) {
      word |= lanes_with(load_raw<kFp32>(numbers, i), uint32_t{1} << p) << i;
    }
    words[p] = word;
  }
}

// Of the 32 numbers whose bit p is in word p, a vector from number i on.
MS_INLINE VectorLanes::U numbers_of_planes(const uint8_t* words, int bits, int i) {
  VectorLanes::U number = {};
  for (int p = 0; p < bits; ++p) {
    number = with_bit(number, read_at<uint32_t>(words, p) >> i & kAllLanes, p);
  }
  return number;
}

// The levels of a group of magnitudes a[0 .. count), which are padded with zeros to a whole group.
// `whole`: zero must be a level.
template <int BITS>
MS_INLINE uint32_t levels_of(const float* a, int64_t count, bool whole) {
  // Without copies of the group: compilers make a slow string instruction of one.
  uint32_t high = 0, low = ~uint32_t{0};
  for (int i = 0; i < kRiceGroup; ++i) high = as_bits(a[i]) > high ? as_bits(a[i]) : high;
  if (whole) return whole_levels<BITS>(high);
  for (int64_t i = 0; i < count; ++i) low = as_bits(a[i]) < low ? as_bits(a[i]) : low;
  float sum[kRiceGroup] = {};
  if constexpr (fits_mean(BITS)) {
    std::memcpy(sum, a, sizeof sum);
    for (int half = kRiceGroup / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
    }
  }
  return entry_levels<BITS>(high, low, sum[0], static_cast<int>(count));
}

template <int RESIDUAL>
MS_INLINE float load_residual(const void* residual, int64_t at) {
  if constexpr (RESIDUAL == kFp32) return static_cast<const float*>(residual)[at];
  return as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(residual)[at]) << 16);
}

template <int RESIDUAL>
MS_INLINE void store_residual(const RiceValues& call, int64_t at, float rest) {
  if constexpr (RESIDUAL == kFp32) {
    static_cast<float*>(call.residual)[at] = rest;
  } else {
    static_cast<uint16_t*>(call.residual)[at] =
        static_cast<uint16_t>(narrow_residual(rest, call.seed, call.stochastic, call.first + at));
  }
}

// Adds the residual to a group's numbers. Without indices the loop is one of vectors.
template <int RESIDUAL>
MS_INLINE void add_residual(const RiceValues& call, int64_t begin, int64_t count, float* x) {
  if (call.residual == nullptr || call.residual_is_zero) return;
  if (call.index == nullptr) {
    for (int64_t i = 0; i < count; ++i) x[i] += load_residual<RESIDUAL>(call.residual, begin + i);
    return;
  }
  const int32_t* index = call.index + begin;
  for (int64_t i = 0; i < count; ++i) x[i] += load_residual<RESIDUAL>(call.residual, index[i]);
}

template <int RESIDUAL>
MS_INLINE void leave_residual(const RiceValues& call, int64_t begin, int64_t count,
                              const float* rest) {
  if (call.index == nullptr) {
    if constexpr (RESIDUAL == kFp32) {
      std::memcpy(static_cast<float*>(call.residual) + begin, rest, 4 * count);
    } else {
      for (int64_t i = 0; i < count; ++i) store_residual<RESIDUAL>(call, begin + i, rest[i]);
    }
    return;
  }
  const int32_t* index = call.index + begin;
  for (int64_t i = 0; i < count; ++i) store_residual<RESIDUAL>(call, index[i], rest[i]);
}

// Quantises the values of a chunk, and leaves in the residual what the levels lose. Group by group,
// so that the words may overwrite the values.
template <int BITS, int RESIDUAL>
void rice_quantise(const RiceValues& call) {
  const uint8_t* from = static_cast<const uint8_t*>(call.values);
  uint8_t* to = static_cast<uint8_t*>(call.words);
  for (int64_t begin = 0; begin < call.count; begin += kRiceGroup) {
    const int64_t count = call.count - begin < kRiceGroup ? call.count - begin : kRiceGroup;
    alignas(64) float x[kRiceGroup], a[kRiceGroup], rest[kRiceGroup];
    alignas(64) uint32_t codes[kRiceGroup];
    for (int i = 0; i < kRiceGroup; i += MS_WIDTH) {
      store_raw<kFp32>(x, i, load_until<kFp32>(from, begin + i, call.count));
    }
    add_residual<RESIDUAL>(call, begin, count, x);
    for (int i = 0; i < kRiceGroup; ++i) a[i] = as_float(as_bits(x[i]) & kMagnitude);
    const uint32_t word = levels_of<BITS>(a, count, call.index == nullptr);
    std::memcpy(to, &word, sizeof word);
    to += sizeof word;
    if (word == kNanLevels) {
      for (int i = 0; i < kRiceGroup; ++i) codes[i] = 0, rest[i] = 0;
    } else {
      const Levels levels = levels_from(word);
      for (int i = 0; i < kRiceGroup; ++i) {
        const CodedValue coded = code_value<BITS>(levels, x[i]);
        rest[i] = coded.rest;
        codes[i] = coded.code;
      }
      for (int64_t i = count; i < kRiceGroup; ++i) codes[i] = 0;
    }
    for (int64_t i = 0; i < count; i += kPlane) {
      uint32_t planes[BITS];
      store_planes<BITS>(codes + i, planes);
      std::memcpy(to, planes, sizeof planes);
      to += sizeof planes;
    }
    if (call.residual != nullptr) leave_residual<RESIDUAL>(call, begin, count, rest);
  }
}

// Rounds the values of a chunk of a kept segment to bf16, each on its own, and leaves in the
// residual what is cut off. Finite values stay finite.
template <int RESIDUAL>
void rice_round(const RiceValues& call) {
  const float* values = static_cast<const float*>(call.values);
  uint16_t* to = static_cast<uint16_t*>(call.words);
  for (int64_t i = 0; i < call.count; ++i) {
    float x = values[i];
    if (call.residual != nullptr) x += load_residual<RESIDUAL>(call.residual, i);
    const RoundedValue rounded = round_kept(x);
    to[i] = static_cast<uint16_t>(rounded.sent);
    if (call.residual != nullptr) store_residual<RESIDUAL>(call, i, rounded.rest);
  }
}

// The values of a chunk's words; writes whole groups.
template <int BITS>
void rice_dequantise(const void* words, int64_t count, float* values) {
  const uint8_t* from = static_cast<const uint8_t*>(words);
  for (int64_t begin = 0; begin < count; begin += kRiceGroup, values += kRiceGroup) {
    const Levels levels = levels_from(read_at<uint32_t>(from));
    from += sizeof(uint32_t);
    alignas(64) uint32_t codes[kRiceGroup] = {};
    for (int64_t i = 0; i < kRiceGroup && begin + i < count; i += kPlane, from += 4 * BITS) {
      for (int part = 0; part < kPlane; part += MS_WIDTH) {
        store_raw<kFp32>(codes, i + part, numbers_of_planes(from, BITS, part));
      }
    }
    for (int i = 0; i < kRiceGroup; ++i) values[i] = level_value<BITS>(levels, codes[i]);
  }
}

// Words of bits that follow each other without a gap.
class BitWriter {
 public:
  MS_INLINE_MEMBER explicit BitWriter(uint32_t* to) : to_(to) {}

  // Appends the lowest `count` <= 32 bits of a word that has no others.
  MS_INLINE_MEMBER void append(uint32_t word, int count) {
    open_ |= static_cast<uint64_t>(word) << filled_;
    filled_ += count;
    if (filled_ < 32) return;
    *to_++ = static_cast<uint32_t>(open_);
    open_ >>= 32;
    filled_ -= 32;
  }

  // Fills the last word with zeros; returns the end of the words.
  MS_INLINE_MEMBER uint32_t* finish() {
    if (filled_ > 0) *to_++ = static_cast<uint32_t>(open_);
    return to_;
  }

 private:
  uint32_t* to_;
  uint64_t open_ = 0;
  int filled_ = 0;
};

// Codes the gaps before the entries, of which index[-1] = -1 precedes the first; returns the words.
inline int64_t rice_code_gaps(const int32_t* index, int64_t count, int r, uint32_t* words) {
  using L = VectorLanes;
  constexpr int W = MS_WIDTH;
  uint32_t* remainders = words;
  BitWriter unary(words + r * planes_of(count));
  for (int64_t i = 0; i < count; i += kPlane) {
    const int64_t some = count - i < kPlane ? count - i : kPlane;
    // The place of each entry's one bit behind the block's first bit.
    L::U places[kPlane / W], behind = first_lanes();
    uint32_t planes[kMostSpan] = {};
    for (int part = 0; part < kPlane; part += W, behind += W) {
      const int64_t at = i + part;
      L::U gap = load_until<kFp32>(index, at, count);
      gap -= load_until<kFp32>(index, at - 1, count - 1) + 1;
      if (at + W > count) {
        const uint32_t lanes = at < count ? static_cast<uint32_t>(count - at) : 0;
        gap = L::select(first_lanes() < lanes, gap, L::U{});
      }
      for (int p = 0; p < r; ++p) planes[p] |= lanes_with(gap, uint32_t{1} << p) << part;
      const L::U quotients = running_sum(gap >> r);
      places[part / W] = quotients + behind;
      behind += quotients[W - 1];
    }
    for (int p = 0; p < r; ++p) *remainders++ = planes[p];
    const int64_t last = some - 1;
    const uint32_t bits = places[last / W][last % W] + 1;
    for (uint32_t first = 0; first < bits; first += 32) {
      uint32_t word = 0;
      for (int part = 0; part < kPlane; part += W) {
        const L::U place = places[part / W] - first;
        word |= bits_of_all(L::select(place < 32u, (L::U{} + 1u) << (place & 31u), L::U{}));
      }
      const int left = bits - first < 32 ? static_cast<int>(bits - first) : 32;
      if (left < 32) word &= (uint32_t{1} << left) - 1;
      unary.append(word, left);
    }
  }
  return unary.finish() - words;
}

// The elements of a chunk's checked entries. `words` begins with the remainders; the unary part has
// `unary` words. Writes `count` numbers.
inline void rice_positions(const void* words, int64_t count, int r, int64_t unary, int32_t* index) {
  const uint8_t* from = static_cast<const uint8_t*>(words);
  const uint8_t* ones = from + 4 * r * planes_of(count);
  const int64_t pairs = unary / 2;
  uint32_t last = unary % 2 != 0 ? read_at<uint32_t>(ones, 2 * pairs) : 0;
  int32_t* next = index + count - __builtin_popcount(last);
  list_bits(ones, pairs, 0, next - index, index);
  for (; last != 0; last &= last - 1) {
    *next++ = static_cast<int32_t>(64 * pairs) + __builtin_ctz(last);
  }
  if (r == 0) return;
  // An entry's element is one for each entry before it, and the sum of the gaps up to it: of their
  // quotients, which the place of its one bit tells, and of their remainders.
  using L = VectorLanes;
  constexpr int W = MS_WIDTH;
  L::U before = first_lanes(), sum = {};
  for (int64_t i = 0; i < count; i += kPlane, from += 4 * r) {
    for (int part = 0; part < kPlane && i + part < count; part += W, before += W) {
      sum = running_sum(numbers_of_planes(from, r, part)) + sum[W - 1];
      const L::U ones = load_until<kFp32>(index, i + part, count);
      store_until<kFp32>(index, i + part, count, ((ones - before) << r) + before + sum);
    }
  }
}

template <int BITS>
constexpr void fill_rice(Kernels& kernels, int dtype) {
  kernels.rice_quantise[dtype - kQ8][kFp32] = rice_quantise<BITS, kFp32>;
  kernels.rice_quantise[dtype - kQ8][kBf16] = rice_quantise<BITS, kBf16>;
  kernels.rice_dequantise[dtype - kQ8] = rice_dequantise<BITS>;
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
