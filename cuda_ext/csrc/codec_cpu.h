// The loops of the message codec: convert, list, expand, add. stage_cpu.h does the staging.
#pragma once

#include "elementwise.h"
#include "header.h"
#include "kernels.h"
#include "lane_masks.h"

namespace megatron_sparse {
namespace MS_ISA {

inline int64_t count_bits(const void* words, int64_t word_count) {
  int64_t bits = 0;
  for (int64_t k = 0; k < word_count; ++k) {
    bits += __builtin_popcountll(read_at<uint64_t>(words, k));
  }
  return bits;
}

inline void list_bits(const void* words, int64_t word_count, int32_t first, int64_t count,
                      void* indices) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  int64_t written = 0;
  const auto list_word = [&](int64_t k) {
    uint64_t word = read_at<uint64_t>(words, k);
    const int found = __builtin_popcountll(word);
    const int32_t base = first + 64 * static_cast<int32_t>(k);
    // Store whole vectors only inside of this thread's part; the memory behind it belongs to other
    // threads.
    if (found <= kFewBits && written + kFewBits <= count) {
      int32_t few[kFewBits];
      for (int n = 0; n < kFewBits; ++n, word &= word - 1) {
        few[n] = base + __builtin_ctzll(word | uint64_t{1} << 63);
      }
      std::memcpy(static_cast<int32_t*>(indices) + written, few, sizeof few);
      written += found;
      return;
    }
    L::U index = first_lanes() + static_cast<uint32_t>(base);
    for (int shift = 0; shift < 64; shift += W, index += W) {
      const uint32_t mask = static_cast<uint32_t>(word >> shift) & kAllLanes;
      const int lanes = __builtin_popcount(mask);
      const L::U packed = pack_left(index, mask);
      if (written + W <= count) {
        store_raw<kFp32>(indices, written, packed);
      } else {
        store_raw_some<kFp32>(indices, written, lanes, packed);
      }
      written += lanes;
    }
  };
  // First drop words without a bit, without branches, because these could not be predicted.
  constexpr int64_t kBlock = 512;
  uint32_t nonzero[kBlock + W];
  for (int64_t begin = 0; begin < word_count; begin += kBlock) {
    const int64_t end = begin + kBlock < word_count ? begin + kBlock : word_count;
    int some = 0;
    int64_t k = begin;
    if constexpr (kPackIsCheap) {
      L::U position = first_lanes();
      for (; k + W <= end; k += W, position += W) {
        const uint32_t mask = nonzero_words(static_cast<const char*>(words) + 8 * k);
        store_raw<kFp32>(nonzero, some, pack_left(position, mask));
        some += __builtin_popcount(mask);
      }
    }
    for (; k < end; ++k) {
      nonzero[some] = static_cast<uint32_t>(k - begin);
      some += read_at<uint64_t>(words, k) != 0;
    }
    for (int n = 0; n < some; ++n) list_word(begin + nonzero[n]);
  }
}

template <int VALUE>
void expand(const uint64_t* words, const uint64_t* signs, const void* values, int64_t numel,
            void* out) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  constexpr uint32_t minus_zero = VALUE == kFp32 ? 0x80000000u : 0x8000u;
  int64_t read = 0;
  for (int64_t i = 0; i < numel; i += W) {
    const uint32_t mask = static_cast<uint32_t>(words[i / 64] >> (i & 63)) & kAllLanes;
    L::U raw = {};
    if (mask != 0) {
      raw = spread_right(load_raw<VALUE>(values, read), mask);
      read += __builtin_popcount(mask);
    }
    if (signs != nullptr && signs[i / 64] != 0) {
      const uint32_t negative = static_cast<uint32_t>(signs[i / 64] >> (i & 63)) & kAllLanes;
      raw |= L::select(lanes_of(negative), L::U{} + minus_zero, L::U{});
    }
    store_until<VALUE>(out, i, numel, raw);
  }
}

template <int GRAD, int VALUE>
void convert(const void* grad, int64_t numel, void* values) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  if constexpr (GRAD == VALUE) {
    std::memcpy(values, grad, numel * dtype_bytes(VALUE));
    return;
  }
  int64_t i = 0;
  for (; i + W <= numel; i += W) {
    const L::U bits = L::as_bits(widen<L, GRAD>(load_raw<GRAD>(grad, i)));
    store_raw<VALUE>(values, i, convert_bits<L, VALUE>(bits));
  }
  if (i < numel) {
    const L::U bits = L::as_bits(widen<L, GRAD>(load_raw_some<GRAD>(grad, i, numel - i)));
    store_raw_some<VALUE>(values, i, numel - i, convert_bits<L, VALUE>(bits));
  }
}

template <int VALUE>
void add_dense(float* acc, const void* values, int64_t numel) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  int64_t i = 0;
  for (; i + W <= numel; i += W) {
    const L::F sum =
        L::as_float(load_raw<kFp32>(acc, i)) + widen<L, VALUE>(load_raw<VALUE>(values, i));
    store_raw<kFp32>(acc, i, L::as_bits(sum));
  }
  if (const int64_t rest = numel - i; rest > 0) {
    const L::F sum = L::as_float(load_raw_some<kFp32>(acc, i, rest)) +
                     widen<L, VALUE>(load_raw_some<VALUE>(values, i, rest));
    store_raw_some<kFp32>(acc, i, rest, L::as_bits(sum));
  }
}

// Entries between the one that is added and the one that is fetched. The second-level cache allows
// far more outstanding fetches than the first-level one.
inline constexpr int64_t kAhead = 256;
inline constexpr int kSecondLevel = 2;

// With `FETCH` for an accumulator in memory, without for one in a cache.
template <int VALUE, bool FETCH>
void add_sparse(float* acc, const void* indices, const void* values, int64_t count) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  // Indices are read one by one from memory: taking them out of a vector costs more.
  const auto target = [&](int64_t k) { return acc + read_at<int32_t>(indices, k); };
  // Sparse elements lie too far apart for the hardware to fetch them ahead.
  const auto fetch = [&](int64_t k) {
    if constexpr (!FETCH) return;
    for (int lane = 0; lane < W; ++lane) __builtin_prefetch(target(k + lane), 1, kSecondLevel);
  };
  // One addition at a time: scattered stores gain nothing from vectors.
  const auto add = [&](int64_t k, int64_t lanes, L::U raw) {
    alignas(64) float value[W];
    store_raw<kFp32>(value, 0, L::as_bits(widen<L, VALUE>(raw)));
    for (int64_t lane = 0; lane < lanes; ++lane) *target(k + lane) += value[lane];
  };
  for (int64_t k = 0; k < kAhead && k + W <= count; k += W) fetch(k);
  int64_t k = 0;
  for (; k + W <= count; k += W) {
    if (k + kAhead + W <= count) fetch(k + kAhead);
    add(k, W, load_raw<VALUE>(values, k));
  }
  if (k < count) add(k, count - k, load_raw_some<VALUE>(values, k, count - k));
}

// Copies numbers to memory that is not read soon, past the caches: a plain store would first fetch
// the line that it replaces.
inline void copy_past_caches(const float* from, int64_t count, float* to) {
  int64_t i = 0;
#if defined(__SSE2__)
  constexpr int W = MS_WIDTH;
  const int64_t bytes = -reinterpret_cast<intptr_t>(to) & (4 * W - 1);
  const int64_t head = bytes / 4 < count ? bytes / 4 : count;
  for (; i < head; ++i) to[i] = from[i];
  for (; i + W <= count; i += W) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
#elif defined(__AVX2__)
    _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
#else
    _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
#endif
  }
  _mm_sfence();
#endif
  for (; i < count; ++i) to[i] = from[i];
}

template <int VALUE>
void add_bits(float* acc, const void* words, int64_t numel, const void* values, int64_t count) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  int64_t read = 0;
  for (int64_t i = 0; i < numel; i += W) {
    const uint64_t word = read_at<uint64_t>(words, i / 64);
    const uint32_t mask = static_cast<uint32_t>(word >> (i & 63)) & kAllLanes;
    if (mask == 0) continue;
    const int64_t left = count - read, rest = numel - i;
    const L::U packed =
        left >= W ? load_raw<VALUE>(values, read) : load_raw_some<VALUE>(values, read, left);
    const L::F value = widen<L, VALUE>(spread_right(packed, mask));
    read += __builtin_popcount(mask);
    // Elements without a value keep their bits: adding 0 would turn -0.0 into 0.0.
    if (rest >= W) {
      const L::U old = load_raw<kFp32>(acc, i);
      const L::U sum = L::as_bits(L::as_float(old) + value);
      store_raw<kFp32>(acc, i, L::select(lanes_of(mask), sum, old));
    } else {
      const L::U old = load_raw_some<kFp32>(acc, i, rest);
      const L::U sum = L::as_bits(L::as_float(old) + value);
      store_raw_some<kFp32>(acc, i, rest, L::select(lanes_of(mask), sum, old));
    }
  }
}

template <int GRAD>
constexpr void fill_codec(Kernels& kernels) {
  kernels.convert[GRAD][kFp32] = convert<GRAD, kFp32>;
  kernels.convert[GRAD][kBf16] = convert<GRAD, kBf16>;
  kernels.convert[GRAD][kFp16] = convert<GRAD, kFp16>;
  kernels.add_dense[GRAD] = add_dense<GRAD>;
  kernels.add_sparse[GRAD] = add_sparse<GRAD, true>;
  kernels.add_sparse_cached[GRAD] = add_sparse<GRAD, false>;
  kernels.add_bits[GRAD] = add_bits<GRAD>;
  kernels.expand[GRAD] = expand<GRAD>;
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
