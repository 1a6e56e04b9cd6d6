// prune_ on the CPU, tile by tile.
#include <torch/csrc/stable/library.h>

#include "prune_pass.h"

namespace megatron_sparse {
namespace {

// Elements of one unit of work: two buffers of it fit a core's second-level cache.
constexpr int64_t kTile = int64_t{1} << 15;

Tensor prune_cpu(const Tensor& grad, const Tensor& residual, const Tensor& range_offsets,
                 const Tensor& thresholds, double leak, int64_t wire_dtype, int64_t key,
                 std::optional<Tensor> tie_chances) {
  const PrunePass pass(
      {grad, residual, residual, range_offsets, thresholds, tie_chances, leak, key, wire_dtype});
  Tensor nnz = torch::stable::new_zeros(range_offsets, {thresholds.numel()});
  int64_t* counts = static_cast<int64_t*>(nnz.mutable_data_ptr());
  for_each_chunk(grad.numel(), kTile, [&](int64_t, int64_t begin, int64_t end) {
    pass.for_spans(begin, end, [&](const PruneCall& call, int64_t range) {
      // Other threads may work in the same range. A sum of integers does not depend on the order.
      __atomic_fetch_add(&counts[range], pass.prune(call), __ATOMIC_RELAXED);
    });
  });
  return nnz;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("prune_", TORCH_BOX(&megatron_sparse::prune_cpu));
}
