// Scalar lanes: the vocabulary in which elementwise.h is written, for CUDA threads.
// vector_lanes.h is the same for CPU vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "limit.h"
#include "portability.h"

namespace megatron_sparse {

struct ScalarLanes {
  using F = float;
  using U = uint32_t;
  using M = bool;

  MS_INLINE_MEMBER static F as_float(U u) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    F f;
    std::memcpy(&f, &u, sizeof f);
    return f;
#endif
  }
  MS_INLINE_MEMBER static U as_bits(F f) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(f);
#else
    U u;
    std::memcpy(&u, &f, sizeof u);
    return u;
#endif
  }
  MS_INLINE_MEMBER static U to_integer(F f) { return static_cast<U>(f); }
  MS_INLINE_MEMBER static F to_float(U u) { return static_cast<F>(u); }
  // Whether a tie must be drawn; its chance may still be 0.
  MS_INLINE_MEMBER static bool any_tie(F f, const Limit& limit) { return f == limit.threshold; }
  template <class T>
  MS_INLINE_MEMBER static T select(M mask, T yes, T no) {
    return mask ? yes : no;
  }
};

}  // namespace megatron_sparse
