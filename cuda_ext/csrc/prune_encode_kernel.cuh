// The source of prune_encode: x = gradient + residual, pruned as prune_ prunes it, bit for bit;
// the new residual is written, the gradient is only read.
//
// Bytes an element of g-byte gradient, e-byte residual and v-byte values, at density d:
//   this launch        g + e read, e + 1/8 + d v written
//   place_kernel.cuh   1/8 + d v read, the message written (COO d (4 + v), Pici 1/8 + d v)
// fp32 gradient, bf16 residual, fp32 COO at 1 %: 8 (the floor) + 0.25 + 0.16 = 8.41.
//
// A selection cannot be undone: if the message does not fit (status kEncodeCapacity, or kEncodeSlot
// with slots), the residual is already the new one and the step is lost. With room for the dense
// message it fits.
#pragma once

#include "compact_kernel.cuh"

namespace megatron_sparse {

template <int GRAD, int RESIDUAL, Grid G, bool STOCHASTIC>
struct PruneSource {
  using Raw = typename RawType<GRAD>::type;
  using RawResidual = typename RawType<RESIDUAL>::type;
  struct Element {
    Raw grad;
    RawResidual residual;
  };
  struct Rule {
    Limit limit;
    uint32_t high;  // half of the elements' indices
    bool uniform;
  };
  static constexpr int kGrad = GRAD;
  static constexpr int kBlocks = 3;  // 72 registers a thread, of which 32 are on their way

  const void* grad;
  const void* old_residual;
  void* residual;                // may be `old_residual`
  const int64_t* range_offsets;  // [range_count + 1]
  const float* thresholds;       // [range_count]
  const float* tie_chances;      // [range_count], or null
  int64_t range_count;
  float leak;
  PruneSeeds seeds;

  __device__ __forceinline__ Rule rule_at(int64_t begin, int length) const {
    const int64_t last = begin + length - 1;
    const int64_t range = find_range(range_offsets, range_count, begin);
    return {limit_at(thresholds, tie_chances, range), static_cast<uint32_t>(begin >> 32),
            range_offsets[range + 1] > last && begin >> 32 == last >> 32};
  }
  // True for nearly all tiles.
  __device__ __forceinline__ static bool is_uniform(const Rule& rule) { return rule.uniform; }

  __device__ __forceinline__ Element load(int64_t at) const {
    return {static_cast<const Raw*>(grad)[at], static_cast<const RawResidual*>(old_residual)[at]};
  }

  // Writes the new residual of what is inside the tile.
  __device__ __forceinline__ bool take(const Rule& rule, int64_t at, bool inside, const Element& in,
                                       uint32_t& value) const {
    using L = ScalarLanes;
    const uint32_t low = static_cast<uint32_t>(at);
    const float x = widen<L, GRAD>(in.grad) + widen<L, RESIDUAL>(in.residual);
    const bool keeps = !(L::as_float(L::as_bits(x) & kMagnitude) < rule.limit.threshold);
    const bool any_keeps = __any_sync(kAllLanes, keeps);
    uint32_t rest;
    if (any_keeps) {
      const Pruned<L> done = prune_element<L, GRAD, RESIDUAL, G, STOCHASTIC>(
          in.grad, in.residual, rule.limit, leak, seeds, rule.high, low);
      value = done.grad;
      rest = done.residual;
    } else {  // at low densities, most words
      rest = residual_of<L, RESIDUAL, STOCHASTIC>(x * leak, seeds, rule.high, low);
    }
    if (inside) static_cast<RawResidual*>(residual)[at] = static_cast<RawResidual>(rest);
    return any_keeps;
  }
};

}  // namespace megatron_sparse
