// Vector lanes in the compilers' own vector extension: one source for SSE2/NEON, AVX2 and AVX-512.
// The file that includes this is compiled once for each instruction set, with MS_WIDTH lanes and
// inside a namespace of its own (MS_ISA).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "dtypes.h"
#include "limit.h"
#include "portability.h"

namespace megatron_sparse {
namespace MS_ISA {

struct VectorLanes {
  static constexpr int kWidth = MS_WIDTH;
  typedef float F __attribute__((vector_size(4 * MS_WIDTH)));
  typedef uint32_t U __attribute__((vector_size(4 * MS_WIDTH)));
  typedef int32_t M __attribute__((vector_size(4 * MS_WIDTH)));
  typedef uint16_t H __attribute__((vector_size(2 * MS_WIDTH)));

  MS_INLINE_MEMBER static F as_float(U u) { return reinterpret_cast<F>(u); }
  MS_INLINE_MEMBER static U as_bits(F f) { return reinterpret_cast<U>(f); }
  // Through signed integers, for which every instruction set has a conversion; values < 2^31.
  MS_INLINE_MEMBER static U to_integer(F f) {
    return reinterpret_cast<U>(__builtin_convertvector(f, M));
  }
  MS_INLINE_MEMBER static F to_float(U u) {
    return __builtin_convertvector(reinterpret_cast<M>(u), F);
  }
  // Whether a tie must be drawn in any lane.
  MS_INLINE_MEMBER static bool any_tie(F f, const Limit& limit) {
    if (!(limit.chance > 0)) return false;
    const float threshold = limit.threshold;
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(f), _mm512_set1_ps(threshold), _CMP_EQ_OQ) !=
           0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(reinterpret_cast<__m256>(f == threshold)) != 0;
#else
    const M equal = f == threshold;
    int32_t any = 0;
    for (int lane = 0; lane < kWidth; ++lane) any |= equal[lane];
    return any != 0;
#endif
  }
  template <class T>
  MS_INLINE_MEMBER static T select(M mask, T yes, T no) {
    return mask ? yes : no;
  }
};

MS_INLINE VectorLanes::U first_lanes() {
  VectorLanes::U u;
  for (int i = 0; i < MS_WIDTH; ++i) u[i] = i;
  return u;
}

// The raw bits of MS_WIDTH elements of dtype D, zero-extended; no alignment is assumed.
template <int D>
MS_INLINE VectorLanes::U load_raw(const void* base, int64_t element) {
  if constexpr (D == kFp32) {
    VectorLanes::U u;
    std::memcpy(&u, static_cast<const uint32_t*>(base) + element, sizeof u);
    return u;
  } else {
#if defined(__AVX512F__)
    // One instruction; gcc 12 makes several of a conversion.
    const uint16_t* from = static_cast<const uint16_t*>(base) + element;
    return reinterpret_cast<VectorLanes::U>(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
    VectorLanes::H h;
    std::memcpy(&h, static_cast<const uint16_t*>(base) + element, sizeof h);
    return __builtin_convertvector(h, VectorLanes::U);
#endif
  }
}

template <int D>
MS_INLINE void store_raw(void* base, int64_t element, VectorLanes::U u) {
  if constexpr (D == kFp32) {
    std::memcpy(static_cast<uint32_t*>(base) + element, &u, sizeof u);
  } else {
#if defined(__AVX512F__)
    uint16_t* to = static_cast<uint16_t*>(base) + element;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(u)));
#else
    const VectorLanes::H h = __builtin_convertvector(u, VectorLanes::H);
    std::memcpy(static_cast<uint16_t*>(base) + element, &h, sizeof h);
#endif
  }
}

// The same for the first `count` < MS_WIDTH elements; the other lanes are zero and not stored.
template <int D>
MS_INLINE VectorLanes::U load_raw_some(const void* base, int64_t element, int64_t count) {
  alignas(64) char room[4 * MS_WIDTH] = {};
  const int64_t bytes = dtype_bytes(D);
  std::memcpy(room, static_cast<const char*>(base) + element * bytes, count * bytes);
  return load_raw<D>(room, 0);
}

template <int D>
MS_INLINE void store_raw_some(void* base, int64_t element, int64_t count, VectorLanes::U u) {
  alignas(64) char room[4 * MS_WIDTH];
  const int64_t bytes = dtype_bytes(D);
  store_raw<D>(room, 0, u);
  std::memcpy(static_cast<char*>(base) + element * bytes, room, count * bytes);
}

// The same for elements up to `numel`, which may lie before or behind any lane.
template <int D>
MS_INLINE VectorLanes::U load_until(const void* base, int64_t begin, int64_t numel) {
  if (begin + MS_WIDTH <= numel) return load_raw<D>(base, begin);
  return load_raw_some<D>(base, begin, begin < numel ? numel - begin : 0);
}

template <int D>
MS_INLINE void store_until(void* base, int64_t begin, int64_t numel, VectorLanes::U u) {
  if (begin + MS_WIDTH <= numel) return store_raw<D>(base, begin, u);
  if (begin < numel) store_raw_some<D>(base, begin, numel - begin, u);
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
