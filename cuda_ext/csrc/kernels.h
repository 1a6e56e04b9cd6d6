// The CPU kernels, compiled once for each instruction set; isa.cpp chooses among them at run time.
// They know nothing of torch, are single-threaded, and give the same bits on every instruction set.
#pragma once

#include <cstdint>

#include "counter_hash.h"

namespace megatron_sparse {

struct PruneCall {
  void* grad;      // element 0 is the element `index` of the bucket
  void* residual;  // likewise
  int64_t numel;   // no element may lie across a multiple of 2^32
  uint64_t index;
  float threshold;
  float leak;
  HashSeed value_seed;
  HashSeed residual_seed;
};

struct Kernels {
  // Prunes in place; returns how many stored values are not zero. [grad][residual is bf16][wire]
  // [stochastic].
  int64_t (*prune[3][2][3][2])(const PruneCall&);

  // How many of `numel` elements are not zero (-0.0 is, NaN is not). [dtype]
  int64_t (*count_nonzero[3])(const void* values, int64_t numel);

  // Writes the `count` non-zero elements' indices, from `first` upwards, and their values, and not
  // a byte more; `count` is what count_nonzero says. [grad dtype][value dtype]
  void (*compress[3][3])(const void* grad, int64_t numel, int32_t first, int64_t count,
                         void* indices, void* values);

  // Converts to nearest even. [grad dtype][value dtype]
  void (*convert[3][3])(const void* grad, int64_t numel, void* values);

  // acc[i] += values[i]. [value dtype]
  void (*add_dense[3])(float* acc, const void* values, int64_t numel);

  // acc[indices[k]] += values[k]; the indices were checked. [value dtype]
  void (*add_sparse[3])(float* acc, const void* indices, const void* values, int64_t count);
};

const Kernels& kernels_portable();
#ifdef MS_X86
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

}  // namespace megatron_sparse
