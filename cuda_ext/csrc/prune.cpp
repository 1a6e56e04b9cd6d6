// prune_ on the CPU: checks, threads, and the call of the kernel.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "check.h"
#include "isa.h"
#include "prune.h"

namespace megatron_sparse {
namespace {

// Elements of one unit of work: two buffers of it fit a core's second-level cache, and it divides
// 2^32, so that the upper half of the element's index is constant in it.
constexpr int64_t kTile = int64_t{1} << 15;

Tensor prune_cpu(const Tensor& grad, const Tensor& residual, const Tensor& range_offsets,
                 const Tensor& thresholds, double leak, int64_t wire_dtype, int64_t key,
                 std::optional<Tensor> tie_chances) {
  const PruneRequest request = {grad,        residual, range_offsets, thresholds,
                                tie_chances, leak,     key,           wire_dtype};
  const PruneTypes types = check_prune(request);
  const int64_t* offsets = check_ranges(request);
  const int64_t numel = grad.numel(), range_count = thresholds.numel();

  Tensor nnz = torch::stable::new_zeros(range_offsets, {range_count});
  int64_t* counts = static_cast<int64_t*>(nnz.mutable_data_ptr());
  const float* thresholds_data = static_cast<const float*>(thresholds.const_data_ptr());
  const float* chances = request.chances();
  char* grad_data = static_cast<char*>(grad.mutable_data_ptr());
  char* residual_data = static_cast<char*>(residual.mutable_data_ptr());
  const int64_t grad_bytes = dtype_bytes(types.grad), residual_bytes = dtype_bytes(types.residual);
  const auto kernel = kernels().prune[types.grad][types.residual][wire_dtype][key >= 0];
  const PruneSeeds seeds = prune_seeds(key);

  torch::stable::parallel_for(0, (numel + kTile - 1) / kTile, 1, [&](int64_t begin, int64_t end) {
    int64_t at = begin * kTile;
    const int64_t stop = std::min(numel, end * kTile);
    int64_t range = std::upper_bound(offsets, offsets + range_count + 1, at) - offsets - 1;
    int64_t count = 0;
    while (at < stop) {
      const int64_t tile_stop = std::min(stop, (at / kTile + 1) * kTile);
      const int64_t span_stop = std::min(tile_stop, offsets[range + 1]);
      const PruneCall call = {
          grad_data + at * grad_bytes,
          residual_data + at * residual_bytes,
          span_stop - at,
          static_cast<uint64_t>(at),
          limit_at(thresholds_data, chances, range),
          static_cast<float>(leak),
          seeds,
      };
      count += kernel(call);
      at = span_stop;
      if (at == offsets[range + 1] || at == stop) {
        // Other threads may work in the same range. A sum of integers does not depend on the order.
        __atomic_fetch_add(&counts[range], count, __ATOMIC_RELAXED);
        count = 0;
        while (at < stop && at == offsets[range + 1]) ++range;
      }
    }
  });
  return nnz;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("prune_", TORCH_BOX(&megatron_sparse::prune_cpu));
}
