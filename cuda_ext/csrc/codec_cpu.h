// The loops of the message codec: count, compress, convert, add.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "elementwise.h"
#include "kernels.h"
#include "vector_lanes.h"

namespace megatron_sparse {
namespace MS_ISA {

template <int D>
int64_t count_nonzero(const void* values, int64_t numel) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  constexpr uint32_t magnitude = D == kFp32 ? 0x7fffffffu : 0x7fffu;
  int64_t nnz = 0, i = 0;
  while (i + W <= numel) {
    const int64_t stop = i + W * (int64_t{1} << 20);
    L::M count = {};
    for (; i + W <= numel && i < stop; i += W) {
      count -= (load_raw<D>(values, i) & magnitude) != 0u;
    }
    for (int lane = 0; lane < W; ++lane) nnz += count[lane];
  }
  for (; i < numel; ++i) {
    nnz += (load_raw_some<D>(values, i, 1)[0] & magnitude) != 0u;
  }
  return nnz;
}

// One bit for each lane of `raw` that is not zero.
MS_INLINE uint32_t nonzero_mask(VectorLanes::U raw, uint32_t magnitude) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(raw),
                                _mm512_set1_epi32(static_cast<int>(magnitude)));
#elif defined(__AVX2__)
  const VectorLanes::M nonzero = (raw & magnitude) != 0u;
  return _mm256_movemask_ps(reinterpret_cast<__m256>(nonzero));
#else
  uint32_t mask = 0;
  for (int lane = 0; lane < MS_WIDTH; ++lane) {
    mask |= static_cast<uint32_t>((raw[lane] & magnitude) != 0) << lane;
  }
  return mask;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Row m holds the positions of the set bits of m, packed to the left.
struct CompressTable {
  uint8_t row[256][8];
  constexpr CompressTable() : row{} {
    for (int mask = 0; mask < 256; ++mask) {
      int count = 0;
      for (int bit = 0; bit < 8; ++bit) {
        if (mask >> bit & 1) row[mask][count++] = static_cast<uint8_t>(bit);
      }
    }
  }
};
inline constexpr CompressTable kCompressTable;
#endif

// The lanes of `u` that `mask` names, packed to the left; what the other lanes hold is undefined.
MS_INLINE VectorLanes::U pack_left(VectorLanes::U u, uint32_t mask) {
#if defined(__AVX512F__)
  // In a register: compressing straight into memory is microcoded, and slow, on some machines.
  return reinterpret_cast<VectorLanes::U>(
      _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), reinterpret_cast<__m512i>(u)));
#elif defined(__AVX2__)
  const __m128i row = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kCompressTable.row[mask]));
  return reinterpret_cast<VectorLanes::U>(
      _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(u), _mm256_cvtepu8_epi32(row)));
#else
  VectorLanes::U packed = {};
  int count = 0;
  for (int lane = 0; lane < MS_WIDTH; ++lane) {
    if (mask >> lane & 1) packed[count++] = u[lane];
  }
  return packed;
#endif
}

template <int GRAD, int VALUE>
void compress(const void* grad, int64_t numel, int32_t first, int64_t count, void* indices,
              void* values) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  constexpr uint32_t magnitude = GRAD == kFp32 ? 0x7fffffffu : 0x7fffu;
  L::U index = first_lanes() + static_cast<uint32_t>(first);
  int64_t written = 0;
  for (int64_t i = 0; i < numel; i += W, index += W) {
    const L::U raw =
        i + W <= numel ? load_raw<GRAD>(grad, i) : load_raw_some<GRAD>(grad, i, numel - i);
    const uint32_t mask = nonzero_mask(raw, magnitude);
    if (mask == 0) continue;
    const int found = __builtin_popcount(mask);
    const L::U packed_index = pack_left(index, mask);
    L::U packed_value = pack_left(raw, mask);
    if constexpr (GRAD != VALUE) {
      packed_value = convert_bits<L, VALUE>(L::as_bits(widen<L, GRAD>(packed_value)));
    }
    // A whole vector is stored where the room is ours: what lies behind belongs to other threads.
    if (written + W <= count) {
      store_raw<kFp32>(indices, written, packed_index);
      store_raw<VALUE>(values, written, packed_value);
    } else {
      store_raw_some<kFp32>(indices, written, found, packed_index);
      store_raw_some<VALUE>(values, written, found, packed_value);
    }
    written += found;
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

template <int VALUE>
void add_sparse(float* acc, const void* indices, const void* values, int64_t count) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  for (int64_t k = 0; k < count; k += W) {
    const int64_t lanes = count - k < W ? count - k : W;
    const bool full = lanes == W;
    const L::U index = full ? load_raw<kFp32>(indices, k) : load_raw_some<kFp32>(indices, k, lanes);
    const L::F value =
        widen<L, VALUE>(full ? load_raw<VALUE>(values, k) : load_raw_some<VALUE>(values, k, lanes));
    // One addition after the other: scattered stores gain nothing from vectors.
    for (int64_t lane = 0; lane < lanes; ++lane) acc[index[lane]] += value[lane];
  }
}

template <int GRAD>
constexpr void fill_codec(Kernels& kernels) {
  kernels.count_nonzero[GRAD] = count_nonzero<GRAD>;
  kernels.compress[GRAD][kFp32] = compress<GRAD, kFp32>;
  kernels.compress[GRAD][kBf16] = compress<GRAD, kBf16>;
  kernels.compress[GRAD][kFp16] = compress<GRAD, kFp16>;
  kernels.convert[GRAD][kFp32] = convert<GRAD, kFp32>;
  kernels.convert[GRAD][kBf16] = convert<GRAD, kBf16>;
  kernels.convert[GRAD][kFp16] = convert<GRAD, kFp16>;
  kernels.add_dense[GRAD] = add_dense<GRAD>;
  kernels.add_sparse[GRAD] = add_sparse<GRAD>;
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
