// The source of encode: the gradient as it is, 1 read of it.
#pragma once

#include "compact_kernel.cuh"

namespace megatron_sparse {

template <int GRAD>
struct GradSource {
  using Element = typename RawType<GRAD>::type;
  struct Rule {};
  static constexpr int kGrad = GRAD;
  static constexpr int kBlocks = 4;  // 56 registers a thread

  const void* grad;

  __device__ __forceinline__ Rule rule_at(int64_t, int) const { return {}; }
  __device__ __forceinline__ static bool is_uniform(const Rule&) { return true; }
  __device__ __forceinline__ Element load(int64_t at) const {
    return static_cast<const Element*>(grad)[at];
  }
  __device__ __forceinline__ bool take(const Rule&, int64_t, bool, Element in,
                                       uint32_t& value) const {
    value = in;
    return __any_sync(kAllLanes, value != 0);
  }
};

}  // namespace megatron_sparse
