// The counter hash: 32 random bits that are a pure function of (key, draw, 64-bit index).
//
// This file is its definition. The torch version, which is its oracle too
// (triton_kernels/counter_hash.py), and the Triton kernel repeat it bit for bit.
//
//   s = splitmix64(key + (draw + 1) * 0x9e3779b97f4a7c15)      mod 2^64, once for each call
//   a = low32(s) ^ (high32(index) * 0x85ebca6b)                mod 2^32 from here on
//   b = high32(s) + high32(index) * 0xc2b2ae35
//   x = low32(index) ^ a
//   x ^= x >> 16;  x *= 0x21f0aaad;  x ^= x >> 15;  x += b;  x *= 0xd35a2d97;  x ^= x >> 15
//
// `draw` names the use: the rounding of a value, that of its residual and the choice among ties
// must be independent.
#pragma once

#include <cstdint>

#include "portability.h"

namespace megatron_sparse {

enum Draw : uint64_t { kDrawValue = 0, kDrawResidual = 1, kDrawSample = 2, kDrawTie = 3 };

struct HashSeed {
  uint32_t a;
  uint32_t b;
};

MS_INLINE HashSeed hash_seed(uint64_t key, uint64_t draw) {
  uint64_t s = key + (draw + 1) * 0x9e3779b97f4a7c15ull;
  s = (s ^ (s >> 30)) * 0xbf58476d1ce4e5b9ull;
  s = (s ^ (s >> 27)) * 0x94d049bb133111ebull;
  s ^= s >> 31;
  return {static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32)};
}

// The seed of all indices whose upper half is `high`.
MS_INLINE HashSeed hash_seed_at(HashSeed seed, uint32_t high) {
  return {seed.a ^ (high * 0x85ebca6bu), seed.b + high * 0xc2b2ae35u};
}

// U is uint32_t or a vector of them; `low` is the lower half of the index.
template <class U>
MS_INLINE U hash_bits(HashSeed seed_at, U low) {
  U x = low ^ seed_at.a;
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= x >> 15;
  x += seed_at.b;
  x *= 0xd35a2d97u;
  x ^= x >> 15;
  return x;
}

MS_INLINE uint32_t hash_at(HashSeed seed, uint64_t index) {
  return hash_bits(hash_seed_at(seed, static_cast<uint32_t>(index >> 32)),
                   static_cast<uint32_t>(index));
}

}  // namespace megatron_sparse
