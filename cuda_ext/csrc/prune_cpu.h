// Pruning with error feedback, one span of one range; see elementwise.h for the arithmetic.
// Memory traffic: each buffer is read and written once, in place.
#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "vector_lanes.h"

namespace megatron_sparse {
namespace MS_ISA {

template <int GRAD, int RESIDUAL, Grid G, bool STOCHASTIC>
int64_t prune_span(const PruneCall& call) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  const uint32_t high = static_cast<uint32_t>(call.index >> 32);
  L::U low = first_lanes() + static_cast<uint32_t>(call.index);
  int64_t nnz = 0, i = 0;
  while (i + W <= call.numel) {
    // Lane counters are 32 bits wide; they are added to the total long before they overflow.
    const int64_t stop = i + W * (int64_t{1} << 20);
    L::M count = {};
    for (; i + W <= call.numel && i < stop; i += W) {
      const Pruned<L> done = prune_element<L, GRAD, RESIDUAL, G, STOCHASTIC>(
          load_raw<GRAD>(call.grad, i), load_raw<RESIDUAL>(call.old_residual, i), call.limit,
          call.leak, call.seeds, high, low);
      store_raw<GRAD>(call.grad, i, done.grad);
      store_raw<RESIDUAL>(call.residual, i, done.residual);
      count -= done.nonzero;
      low += W;
    }
    for (int lane = 0; lane < W; ++lane) nnz += count[lane];
  }
  if (const int64_t rest = call.numel - i; rest > 0) {
    const Pruned<L> done = prune_element<L, GRAD, RESIDUAL, G, STOCHASTIC>(
        load_raw_some<GRAD>(call.grad, i, rest),
        load_raw_some<RESIDUAL>(call.old_residual, i, rest), call.limit, call.leak, call.seeds,
        high, low);
    store_raw_some<GRAD>(call.grad, i, rest, done.grad);
    store_raw_some<RESIDUAL>(call.residual, i, rest, done.residual);
    for (int lane = 0; lane < rest; ++lane) nnz -= done.nonzero[lane];
  }
  return nnz;
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
