// Instances of prune_'s CUDA kernel and their launch.
#include "prune_kernel.cuh"
#include "prune_launch.h"

namespace megatron_sparse {
namespace {

bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <int GRAD, int RESIDUAL, Grid G, bool STOCHASTIC>
void launch(const PruneLaunch& call, cudaStream_t stream) {
  const int64_t tiles = (call.numel + kTile - 1) / kTile;
  const bool aligned = is_aligned(call.grad, kVector * dtype_bytes(GRAD)) &&
                       is_aligned(call.residual, kVector * dtype_bytes(RESIDUAL));
  constexpr int64_t kMaxBlocks = 0x7fffffff;
  const unsigned blocks = static_cast<unsigned>(tiles < kMaxBlocks ? tiles : kMaxBlocks);
  prune_kernel<GRAD, RESIDUAL, G, STOCHASTIC><<<blocks, kThreads, 0, stream>>>(call, aligned);
}

template <int GRAD, int RESIDUAL, Grid G>
void launch_rounding(const PruneLaunch& call, bool stochastic, cudaStream_t stream) {
  if (stochastic) {
    launch<GRAD, RESIDUAL, G, true>(call, stream);
  } else {
    launch<GRAD, RESIDUAL, G, false>(call, stream);
  }
}

template <int GRAD, Grid G>
void launch_residual(const PruneLaunch& call, int residual, bool stochastic, cudaStream_t stream) {
  if (residual == kBf16) {
    launch_rounding<GRAD, kBf16, G>(call, stochastic, stream);
  } else {
    launch_rounding<GRAD, kFp32, G>(call, stochastic, stream);
  }
}

}  // namespace

void launch_prune(const PruneArguments& a, void* stream_pointer) {
  if (a.numel == 0) return;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const uint64_t key = static_cast<uint64_t>(a.key);
  const bool stochastic = a.key >= 0;
  const PruneLaunch call = {a.grad,
                            a.residual,
                            a.range_offsets,
                            a.thresholds,
                            reinterpret_cast<unsigned long long*>(a.nnz),
                            a.range_count,
                            a.numel,
                            a.leak,
                            hash_seed(key, kDrawValue),
                            hash_seed(key, kDrawResidual)};
  const Grid grid = grid_of(a.grad_dtype, a.wire_dtype);
  if (a.grad_dtype == kFp32) {
    if (grid == Grid::kFp32)
      launch_residual<kFp32, Grid::kFp32>(call, a.residual_dtype, stochastic, stream);
    if (grid == Grid::kBf16)
      launch_residual<kFp32, Grid::kBf16>(call, a.residual_dtype, stochastic, stream);
    if (grid == Grid::kFp16)
      launch_residual<kFp32, Grid::kFp16>(call, a.residual_dtype, stochastic, stream);
  } else if (a.grad_dtype == kBf16) {
    if (grid == Grid::kBf16)
      launch_residual<kBf16, Grid::kBf16>(call, a.residual_dtype, stochastic, stream);
    if (grid == Grid::kBf16AndFp16)
      launch_residual<kBf16, Grid::kBf16AndFp16>(call, a.residual_dtype, stochastic, stream);
  } else {
    if (grid == Grid::kFp16)
      launch_residual<kFp16, Grid::kFp16>(call, a.residual_dtype, stochastic, stream);
    if (grid == Grid::kBf16AndFp16)
      launch_residual<kFp16, Grid::kBf16AndFp16>(call, a.residual_dtype, stochastic, stream);
  }
}

}  // namespace megatron_sparse
