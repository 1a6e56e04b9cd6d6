// The positions of a stratified sample.
#pragma once

#include <cstdint>

#include "portability.h"

namespace megatron_sparse {

// Position of sample j of s in a range of n >= s elements: one of stratum j's, chosen by `random`.
// j < 2^31 and n <= 2^40; the splits keep every product under 2^63.
MS_INLINE int64_t sample_position(int64_t n, int64_t s, int64_t j, uint32_t random) {
  const int64_t quotient = n / s, remainder = n % s;
  const int64_t begin = j * quotient + j * remainder / s;
  const int64_t end = (j + 1) * quotient + (j + 1) * remainder / s;
  const int64_t width = end - begin, half = random >> 1;
  return begin + half * (width >> 31) + ((half * (width & 0x7fffffff)) >> 31);
}

}  // namespace megatron_sparse
