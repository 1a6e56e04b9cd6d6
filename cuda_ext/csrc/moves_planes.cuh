// A tile of moves in a warp: eight neighbours in each lane, two to a word where they have 16 bits.
// So a lane's byte of a bit plane has its own eight moves' bits.
#pragma once

#include "moves_scalar.cuh"
#include "scan.cuh"

namespace megatron_sparse {

inline constexpr int kLaneMoves = kMovesTile / 32;
template <int D>
inline constexpr int kLaneWords = kLaneMoves * static_cast<int>(sizeof(MovesRaw<D>)) / 4;

// All bits of a half word that is negative.
__device__ __forceinline__ uint32_t signs_of_halves(uint32_t pair) {
#ifdef __CUDA_ARCH__
  uint32_t signs;  // no intrinsic has this mode of prmt
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(pair));
  return signs;
#else
  return (pair >> 15 & 0x00010001u) * 0xffffu;
#endif
}

__device__ __forceinline__ uint32_t ordered_pair(uint32_t bits) {
  return bits ^ (signs_of_halves(bits) | 0x80008000u);
}

template <int D>
__device__ __forceinline__ uint32_t zigzag_word(uint32_t old_bits, uint32_t new_bits) {
  if constexpr (D == kFp32) return zigzag_of<D>(old_bits, new_bits);
  const uint32_t move = __vsub2(ordered_pair(new_bits), ordered_pair(old_bits));
  return __vadd2(move, move) ^ signs_of_halves(move);
}

template <int D>
__device__ __forceinline__ uint32_t moved_word(uint32_t old_bits, uint32_t z) {
  if constexpr (D == kFp32) return moved_by<D>(old_bits, z);
  const uint32_t move = (z >> 1 & 0x7fff7fffu) ^ (z & 0x00010001u) * 0xffffu;
  const uint32_t integers = __vadd2(ordered_pair(old_bits), move);
  return ~(integers ^ (signs_of_halves(integers) & 0x7fff7fffu));
}

// Transposes 8 bytes of 8 bits: bit i of byte b becomes bit b of byte i. A product is one
// instruction where a shift and a sum would be two.
__device__ __forceinline__ uint2 transposed(uint2 bytes) {
  uint32_t x = bytes.x, y = bytes.y, t;
  t = (x ^ x >> 7) & 0x00aa00aau;
  x ^= t * 0x81u;
  t = (y ^ y >> 7) & 0x00aa00aau;
  y ^= t * 0x81u;
  t = (x ^ x >> 14) & 0x0000ccccu;
  x ^= t * 0x4001u;
  t = (y ^ y >> 14) & 0x0000ccccu;
  y ^= t * 0x4001u;
  return {(x & 0x0f0f0f0fu) | (y << 4 & 0xf0f0f0f0u), (x >> 4 & 0x0f0f0f0fu) | (y & 0xf0f0f0f0u)};
}

// Byte `k` of each of a lane's moves.
template <int D>
__device__ __forceinline__ uint2 bytes_of(const uint32_t (&z)[kLaneWords<D>], int k) {
  if constexpr (D == kFp32) {
    const uint32_t two = static_cast<uint32_t>(k | (4 + k) << 4);
    return {__byte_perm(__byte_perm(z[0], z[1], two), __byte_perm(z[2], z[3], two), 0x5410u),
            __byte_perm(__byte_perm(z[4], z[5], two), __byte_perm(z[6], z[7], two), 0x5410u)};
  } else {
    const uint32_t four = k == 0 ? 0x6420u : 0x7531u;
    return {__byte_perm(z[0], z[1], four), __byte_perm(z[2], z[3], four)};
  }
}

// The moves whose byte `k` is in bytes[k].
template <int D>
__device__ __forceinline__ void from_bytes(const uint2 (&bytes)[sizeof(MovesRaw<D>)],
                                           uint32_t (&z)[kLaneWords<D>]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t pairs[sizeof(MovesRaw<D>)];  // of bytes, of moves 0 and 1, then of 2 and 3
#pragma unroll
    for (size_t k = 0; k < sizeof(MovesRaw<D>); k += 2) {
      const uint32_t low = half == 0 ? bytes[k].x : bytes[k].y;
      const uint32_t high = half == 0 ? bytes[k + 1].x : bytes[k + 1].y;
      pairs[k] = __byte_perm(low, high, 0x5140u);
      pairs[k + 1] = __byte_perm(low, high, 0x7362u);
    }
    if constexpr (D == kFp32) {
      z[4 * half] = __byte_perm(pairs[0], pairs[2], 0x5410u);
      z[4 * half + 1] = __byte_perm(pairs[0], pairs[2], 0x7632u);
      z[4 * half + 2] = __byte_perm(pairs[1], pairs[3], 0x5410u);
      z[4 * half + 3] = __byte_perm(pairs[1], pairs[3], 0x7632u);
    } else {
      z[2 * half] = pairs[0];
      z[2 * half + 1] = pairs[1];
    }
  }
}

// The bit planes 8 k to 8 k + 7, a byte each.
template <int D>
__device__ __forceinline__ uint2 planes_of(const uint32_t (&z)[kLaneWords<D>], int k) {
  return transposed(bytes_of<D>(z, k));
}

// A bit for each of a lane's moves: whether it has bits from `width` on.
template <int D>
__device__ __forceinline__ uint32_t beyond(const uint32_t (&z)[kLaneWords<D>], int width) {
  uint32_t flags = 0;
  if constexpr (D == kFp32) {
#pragma unroll
    for (int w = 0; w < kLaneMoves; ++w) {
      flags |= static_cast<uint32_t>(width < 32 && z[w] >> width != 0) << w;
    }
    return flags;
  } else {
    const uint32_t upper = ~(((1u << width) - 1) * 0x00010001u);
#pragma unroll
    for (int w = 0; w < kLaneWords<D>; ++w) {
      flags += __vminu2(z[w] & upper, 0x00010001u) * (1u << 2 * w);
    }
    return (flags | flags >> 15) & 255;
  }
}

// Exchanges bytes of four neighbouring lanes: byte j of the k-th becomes byte k of the j-th. Of
// four bit planes' bytes this makes, in lane i, word i / 4 of plane i % 4.
__device__ __forceinline__ uint32_t exchanged(uint32_t bytes) {
  const int lane = threadIdx.x % 32;
  bytes =
      __byte_perm(bytes, __shfl_xor_sync(kAllLanes, bytes, 1), lane % 2 == 0 ? 0x6240u : 0x3715u);
  return __byte_perm(bytes, __shfl_xor_sync(kAllLanes, bytes, 2),
                     lane / 2 % 2 == 0 ? 0x5410u : 0x3276u);
}

}  // namespace megatron_sparse
