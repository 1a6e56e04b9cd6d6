// The partition hash's permutation (hash_partition.h) of many entries, for each instruction set:
// the turns are straight-line code that the compiler vectorises; few entries need more turns.
#pragma once

#include "hash_partition.h"

namespace megatron_sparse {
namespace MS_ISA {

// The permutation is copied: the compiler must assume that it might overlap the entries.
inline void permute(const Permutation& permutation, uint32_t* x, int64_t count) {
  const Permutation p = permutation;
  for (int64_t i = 0; i < count; ++i) x[i] = permute_turn(p, x[i]);
  for (int64_t i = 0; i < count; ++i) x[i] = permute_walk(p, x[i]);
}

inline void unpermute(const Permutation& permutation, uint32_t* x, int64_t count) {
  const Permutation p = permutation;
  for (int64_t i = 0; i < count; ++i) x[i] = unpermute_turn(p, x[i]);
  for (int64_t i = 0; i < count; ++i) x[i] = unpermute_walk(p, x[i]);
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
