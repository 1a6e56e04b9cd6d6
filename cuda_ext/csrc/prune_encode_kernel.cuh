// The source of prune_encode: x = gradient + residual, pruned as prune_ prunes it, bit for bit;
// the new residual is written, the gradient is only read.
//
// Bytes an element of g-byte gradient, e-byte residual and v-byte values, at density d:
//   this launch        g + e read, e + 1/8 + d v written
//   place_kernel.cuh   1/8 + d v read, the message written (COO d (4 + v), Pici 1/8 + d v)
// fp32 gradient, bf16 residual, fp32 COO at 1 %: 8 (the floor) + 0.25 + 0.16 = 8.41.
//
// A selection cannot be undone: if the message does not fit (status kEncodeCapacity), the residual
// is already the new one and the step is lost. With room for the dense message it fits.
#pragma once

#include "compact_kernel.cuh"

namespace megatron_sparse {

template <int GRAD, int RESIDUAL, Grid G, bool STOCHASTIC>
struct PruneSource {
  using Raw = typename RawType<GRAD>::type;
  using RawResidual = typename RawType<RESIDUAL>::type;
  static constexpr int kGrad = GRAD;
  // 16 bytes of the wider buffer: an access of a warp then has no gaps, in either buffer.
  static constexpr int kVector =
      16 / (sizeof(Raw) > sizeof(RawResidual) ? sizeof(Raw) : sizeof(RawResidual));
  static_assert(kVector * sizeof(Raw) <= 16 && kVector * sizeof(RawResidual) <= 16);
  // Two buffers are on their way in 32 registers, so 64 do not suffice. Three blocks request 96 KiB
  // of a multiprocessor at once, five times what hides the memory's latency.
  static constexpr int kBlocks = 3;

  const void* grad;
  void* residual;
  const int64_t* range_offsets;  // [range_count + 1]
  const float* thresholds;       // [range_count]
  const float* tie_chances;      // [range_count], or null
  int64_t range_count;
  float leak;
  PruneSeeds seeds;

  __device__ __forceinline__ void fill(const TilePlace& place, Raw* raw) const {
    const int64_t last = place.begin + place.length - 1;
    const int64_t range = find_range(range_offsets, range_count, place.begin);
    const RawResidual* rest = static_cast<const RawResidual*>(residual) + place.begin;
    // True in nearly all tiles. The hash's upper half changes at multiples of 2^32.
    const bool one_range = range_offsets[range + 1] > last;
    const bool one_half = place.begin >> 32 == last >> 32;
    const uintptr_t rest_begin =
        reinterpret_cast<uintptr_t>(rest) - place.head * sizeof(RawResidual);
    const bool rest_aligned = rest_begin % (kVector * sizeof(RawResidual)) == 0;
    if (one_range && one_half && rest_aligned) {
      fill_vectors(place, limit_at(thresholds, tie_chances, range), raw);
    } else {
      fill_scalars(place, raw);
    }
  }

  __device__ __forceinline__ void fill_vectors(const TilePlace& place, const Limit& limit,
                                               Raw* raw) const {
    using Vector = Neighbours<Raw, kVector>;
    using ResidualVector = Neighbours<RawResidual, kVector>;
    constexpr int kRounds = kPiciTile / (kVector * kCompactThreads);
    const Raw* from = static_cast<const Raw*>(grad) + place.begin;
    RawResidual* rest = static_cast<RawResidual*>(residual) + place.begin;
    const uint32_t high = static_cast<uint32_t>(place.begin >> 32);
    const auto prune = [&](int element, uint32_t g, uint32_t e) {
      return prune_element<ScalarLanes, GRAD, RESIDUAL, G, STOCHASTIC>(
          g, e, limit, leak, seeds, high, static_cast<uint32_t>(place.begin) + element);
    };
    const int shifted_end = place.length + place.head;
    Vector g[kRounds];
    ResidualVector e[kRounds];
    // All whole vectors are requested before the first is used.
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int at = (round * kCompactThreads + threadIdx.x) * kVector;
      if (at < place.head || at + kVector > shifted_end) continue;
      g[round] = *reinterpret_cast<const Vector*>(from + (at - place.head));
      e[round] = *reinterpret_cast<const ResidualVector*>(rest + (at - place.head));
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int at = (round * kCompactThreads + threadIdx.x) * kVector;
      if (at < place.head || at + kVector > shifted_end) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Pruned<ScalarLanes> done =
            prune(at - place.head + i, g[round].value[i], e[round].value[i]);
        g[round].value[i] = static_cast<Raw>(done.grad);
        e[round].value[i] = static_cast<RawResidual>(done.residual);
      }
      *reinterpret_cast<Vector*>(raw + at) = g[round];
      *reinterpret_cast<ResidualVector*>(rest + (at - place.head)) = e[round];
    }
    const int edge = edge_element<kVector>(place);
    if (edge >= 0) {
      const Pruned<ScalarLanes> done = prune(edge, from[edge], rest[edge]);
      raw[edge + place.head] = static_cast<Raw>(done.grad);
      rest[edge] = static_cast<RawResidual>(done.residual);
    }
  }

  // Neighbouring threads take neighbouring elements, each with its own range and seeds.
  __device__ __forceinline__ void fill_scalars(const TilePlace& place, Raw* raw) const {
#pragma unroll 1
    for (int p = threadIdx.x; p < place.length; p += kCompactThreads) {
      const int64_t at = place.begin + p;
      const uint32_t high = static_cast<uint32_t>(at >> 32);
      const Limit limit =
          limit_at(thresholds, tie_chances, find_range(range_offsets, range_count, at));
      RawResidual* rest = static_cast<RawResidual*>(residual) + at;
      const Pruned<ScalarLanes> done = prune_element<ScalarLanes, GRAD, RESIDUAL, G, STOCHASTIC>(
          static_cast<const Raw*>(grad)[at], *rest, limit, leak, seeds, high,
          static_cast<uint32_t>(at));
      raw[p + place.head] = static_cast<Raw>(done.grad);
      *rest = static_cast<RawResidual>(done.residual);
    }
  }
};

}  // namespace megatron_sparse
