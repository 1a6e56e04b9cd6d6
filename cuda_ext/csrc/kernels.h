// The CPU kernels, compiled once for each instruction set; isa.cpp chooses among them at run time.
// They know nothing of torch, are single-threaded, and give the same bits on every instruction set.
#pragma once

#include <cstdint>

#include "hash_partition.h"
#include "limit.h"

namespace megatron_sparse {

struct PruneCall {
  void* grad;                // element 0 is the element `index` of the bucket
  const void* old_residual;  // likewise; read
  void* residual;            // likewise; written; may be `old_residual`
  int64_t numel;             // no element may lie across a multiple of 2^32
  uint64_t index;
  Limit limit;
  float leak;
  PruneSeeds seeds;
};

// Where a run of elements is staged (stage.h): the first one's bit is `bit` of `words`, and of
// `signs`, which may be null. Values may be stored up to a vector behind the last one.
struct StagedSpan {
  uint64_t* words;
  uint64_t* signs;
  int64_t bit;
  void* values;
};

// A chunk's values, to be quantised (rice.h).
struct RiceValues {
  const void* values;  // `count` of fp32
  int64_t count;
  const int32_t* index;  // their elements in the chunk; null where all elements have a value
  void* residual;        // of the chunk's elements, fp32 or bf16; null for none
  uint64_t first;        // the chunk's first element in the bucket
  HashSeed seed;         // of the rounding of a bf16 residual
  bool stochastic;
  void* words;                    // where the result goes; may be where the values are
  bool residual_is_zero = false;  // of the elements that have a value, before the call
};

struct Kernels {
  // Prunes in place; returns how many stored values are not zero. [grad][residual is bf16][wire]
  // [stochastic].
  int64_t (*prune[3][2][3][2])(const PruneCall&);

  // Prunes likewise, but only reads the gradient and stages its pruned values; wire is also the
  // dtype of the staged values. [grad][residual is bf16][wire][stochastic]
  int64_t (*prune_stage[3][2][3][2])(const PruneCall&, const StagedSpan&);

  // Stages a gradient as it is, from bit 0 on and without signs; returns how many elements are not
  // zero (-0.0 is, NaN is not). [grad dtype][value dtype]
  int64_t (*stage[3][3])(const void* grad, int64_t numel, const StagedSpan&);

  // How many bits are set in 64-bit words of any alignment.
  int64_t (*count_bits)(const void* words, int64_t word_count);

  // Writes the positions of the set bits, from `first` upwards, and not a byte more; `count` is the
  // result of count_bits.
  void (*list_bits)(const void* words, int64_t word_count, int32_t first, int64_t count,
                    void* indices);

  // Restores the elements: `words` marks the non-zero ones, `values` holds them, and `signs` (or
  // null) marks those that are -0.0. Reads up to a vector behind the last value. [value dtype]
  void (*expand[3])(const uint64_t* words, const uint64_t* signs, const void* values, int64_t numel,
                    void* out);

  // Converts to nearest even. [grad dtype][value dtype]
  void (*convert[3][3])(const void* grad, int64_t numel, void* values);

  // acc[i] += values[i]. [value dtype]
  void (*add_dense[3])(float* acc, const void* values, int64_t numel);

  // acc[indices[k]] += values[k]; the indices were checked. [value dtype]
  void (*add_sparse[3])(float* acc, const void* indices, const void* values, int64_t count);

  // The same for an accumulator that is in a cache. [value dtype]
  void (*add_sparse_cached[3])(float* acc, const void* indices, const void* values, int64_t count);

  // Copies `count` numbers to memory that is not read soon.
  void (*copy_past_caches)(const float* from, int64_t count, float* to);

  // acc[i] += the next value for each set bit i of `words`, of which there are `count`; 64-bit
  // words of any alignment, bits beyond numel are zero. [value dtype]
  void (*add_bits[3])(float* acc, const void* words, int64_t numel, const void* values,
                      int64_t count);

  // The permuted positions of elements below numel, in place, and their inverse.
  void (*permute)(const Permutation&, uint32_t* x, int64_t count);
  void (*unpermute)(const Permutation&, uint32_t* x, int64_t count);

  // The coder of moves (moves_rans_cpu.h says what each does). [dtype]
  void (*moves_count[3])(const void* old, const void* now, const uint32_t* down, int64_t numel,
                         uint32_t base, int stride, uint64_t* counts);
  uint16_t* (*rans_encode[3])(const void* old, const void* now, const uint32_t* down, int64_t numel,
                              uint32_t base, const uint32_t* table, uint32_t* states,
                              uint16_t* end);
  int64_t (*rans_decode[3])(const void* old, const uint32_t* down, int64_t numel, uint32_t base,
                            const uint32_t* table, uint32_t* states, const uint16_t* words,
                            int64_t word_count, void* out);
  void (*moves_keep[3])(void* held, const void* now, int64_t numel, uint32_t* down);
  uint32_t (*mixed_sum)(const void* words, int64_t count, uint32_t first);

  // Quantises now - old by groups (quantise.h), and adds what codes say. [bits are 8, not 4]
  void (*quantise_difference[2])(const float* now, const float* old, int64_t numel,
                                 uint16_t* scales, uint8_t* codes);
  void (*add_quantised[2])(const uint8_t* scales, const uint8_t* codes, int64_t numel, float* held);

  // The parts of records of format Rice (rice_cpu.h says what each does).
  // [bits: 8, 4, 3, 2][residual is bf16]
  void (*rice_quantise[4][2])(const RiceValues&);
  void (*rice_round[2])(const RiceValues&);
  void (*rice_dequantise[4])(const void* words, int64_t count, float* values);
  int64_t (*rice_code_gaps)(const int32_t* index, int64_t count, int r, uint32_t* words);
  void (*rice_positions)(const void* words, int64_t count, int r, int64_t unary, int32_t* index);
};

const Kernels& kernels_portable();
#ifdef MS_X86
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

}  // namespace megatron_sparse
