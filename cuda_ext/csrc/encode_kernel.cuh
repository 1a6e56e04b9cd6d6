// The source of encode: the gradient as it is, 1 read of it. 16-byte loads, scalar heads and tails.
#pragma once

#include "compact_kernel.cuh"

namespace megatron_sparse {

template <int GRAD>
struct GradSource {
  using Raw = typename RawType<GRAD>::type;
  static constexpr int kGrad = GRAD;
  static constexpr int kVector = 16 / sizeof(Raw);
  static constexpr int kBlocks = kCompactBlocks;

  const void* grad;

  __device__ __forceinline__ void fill(const TilePlace& place, Raw* raw) const {
    using Vector = Neighbours<Raw, kVector>;
    constexpr int kRounds = kPiciTile / (kVector * kCompactThreads);
    const Raw* from = static_cast<const Raw*>(grad) + place.begin;
    const int shifted_end = place.length + place.head;
    Vector loaded[kRounds];
    // All whole vectors are requested before the first is used.
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int at = (round * kCompactThreads + threadIdx.x) * kVector;
      if (at >= place.head && at + kVector <= shifted_end) {
        loaded[round] = *reinterpret_cast<const Vector*>(from + (at - place.head));
      }
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int at = (round * kCompactThreads + threadIdx.x) * kVector;
      if (at >= place.head && at + kVector <= shifted_end) {
        *reinterpret_cast<Vector*>(raw + at) = loaded[round];
      }
    }
    const int edge = edge_element<kVector>(place);
    if (edge >= 0) raw[edge + place.head] = from[edge];
  }
};

}  // namespace megatron_sparse
