// h0 of ZEN (Algorithm 1): maps an element of a segment to one of n partitions.
//
// A pure function of (seed, element), so all ranks agree without communication: a keyed bijection
// of [0, numel). Partition p is the p-th of n equal blocks of permuted positions, so (element) <->
// (partition, position) costs O(1) memory both ways. The paper's general hash would need the sorted
// elements of each partition, 4 bytes for each element of the segment.
//
// On b bits, 2^b the least power of two >= max(numel, 2), four rounds of
//     x = ((x ^ key_r) * multiplier_r) mod 2^b;   x ^= x >> ceil(b / 2)
// each invertible: the multiplier is odd, and a shift by half the bits undoes itself. A result of
// numel or above takes another turn (cycle walking; at most half of the 2^b values do, so less than
// one extra turn each on average). Multiplying by a random odd number and taking the upper bits is
// the universal hash of Dietzfelbinger et al. (1997). key_r and multiplier_r are the two words of
// hash_seed(seed, kDrawRound + r), the second | 1. Three rounds are too few: strides of powers of
// two then exceed Theorem 2's bound more often than random mappings; with four, chi-squared over
// partitions is theirs.
//
// tests/oracles/hash_partition.py repeats it.
#pragma once

#include <cstdint>

#include "counter_hash.h"

namespace megatron_sparse {

// Draws of the counter hash, away from those of counter_hash.h.
inline constexpr uint64_t kDrawRound = 16;  // and the three after it
inline constexpr uint64_t kDrawSlot = 32;   // h_1 and those after it

inline constexpr int kPermutationRounds = 4;

// position * partitions has to be exact in a double: 2^31 * 2^16 is.
inline constexpr int64_t kMaxPartitions = int64_t{1} << 16;

struct Permutation {
  uint32_t numel;
  uint32_t mask;
  int shift;
  uint32_t key[kPermutationRounds];
  uint32_t multiplier[kPermutationRounds];
  uint32_t inverse[kPermutationRounds];  // of the multiplier, mod 2^32
};

MS_INLINE Permutation make_permutation(int64_t numel, uint64_t seed) {
  int bits = 1;
  while (int64_t{1} << bits < numel) ++bits;
  Permutation p = {};
  p.numel = static_cast<uint32_t>(numel);
  p.mask = static_cast<uint32_t>((uint64_t{1} << bits) - 1);
  p.shift = (bits + 1) / 2;
  for (int r = 0; r < kPermutationRounds; ++r) {
    const HashSeed words = hash_seed(seed, kDrawRound + static_cast<uint64_t>(r));
    const uint32_t odd = words.b | 1u;
    uint32_t inverse = odd;  // right to 3 bits; each Newton step doubles them
    for (int step = 0; step < 4; ++step) inverse *= 2u - odd * inverse;
    p.key[r] = words.a;
    p.multiplier[r] = odd;
    p.inverse[r] = inverse;
  }
  return p;
}

// One turn of the walk, and its inverse; x is below 2^b.
MS_INLINE uint32_t permute_turn(const Permutation& p, uint32_t x) {
  for (int r = 0; r < kPermutationRounds; ++r) {
    x = ((x ^ p.key[r]) * p.multiplier[r]) & p.mask;
    x ^= x >> p.shift;
  }
  return x;
}

MS_INLINE uint32_t unpermute_turn(const Permutation& p, uint32_t x) {
  for (int r = kPermutationRounds - 1; r >= 0; --r) {
    x ^= x >> p.shift;
    x = ((x * p.inverse[r]) ^ p.key[r]) & p.mask;
  }
  return x;
}

// The permuted position of an element below numel, and the element at a position. In both, the
// result starts with one turn and walks on: callers do the first turn for whole blocks.
MS_INLINE uint32_t permute_walk(const Permutation& p, uint32_t x) {
  while (x >= p.numel) x = permute_turn(p, x);
  return x;
}

MS_INLINE uint32_t unpermute_walk(const Permutation& p, uint32_t x) {
  while (x >= p.numel) x = unpermute_turn(p, x);
  return x;
}

// Partition p holds the permuted positions ceil(p numel / n) to ceil((p + 1) numel / n): sizes
// differ by one at most.
MS_INLINE int64_t partition_begin(int64_t numel, int64_t partitions, int64_t partition) {
  return (partition * numel + partitions - 1) / partitions;
}

// floor(position * partitions / numel). The product is exact, and a quotient that is not whole is
// at least 1 / numel > 2^-31 away from the next whole one, while doubles below 2^16 are 2^-37
// apart: rounding never reaches it.
MS_INLINE int64_t partition_at(int64_t numel, int64_t partitions, uint32_t position) {
  const double product = static_cast<double>(static_cast<int32_t>(position)) *
                         static_cast<double>(static_cast<int32_t>(partitions));
  return static_cast<int32_t>(product / static_cast<double>(numel));
}

// The upper half of a 32-bit hash times `limit`: below `limit`, without a division.
MS_INLINE uint32_t scale_hash(uint32_t hash, uint32_t limit) {
  return static_cast<uint32_t>((static_cast<uint64_t>(hash) * limit) >> 32);
}

}  // namespace megatron_sparse
