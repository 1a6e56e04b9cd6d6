// Instances of prune_encode's CUDA kernel and their launch.
#include "encode_steps.cuh"
#include "limit_kernel.cuh"
#include "prune_encode_kernel.cuh"

namespace megatron_sparse {
namespace {

template <int GRAD, int RESIDUAL, Grid G, bool STOCHASTIC>
void launch(const EncodeArguments& a, const PruneArguments& p, const Workspace& work,
            cudaStream_t stream) {
  const PruneSource<GRAD, RESIDUAL, G, STOCHASTIC> source = {
      a.grad,        p.residual,    p.range_offsets, p.thresholds,
      p.tie_chances, p.range_count, p.leak,          prune_seeds(p.key)};
  launch_compact(a, source, work, stream);
}

template <int GRAD, Grid G>
void launch_types(const EncodeArguments& a, const PruneArguments& p, const Workspace& work,
                  cudaStream_t stream) {
  const bool stochastic = p.key >= 0;
  if (p.residual_dtype == kBf16) {
    if (stochastic) {
      launch<GRAD, kBf16, G, true>(a, p, work, stream);
    } else {
      launch<GRAD, kBf16, G, false>(a, p, work, stream);
    }
  } else {
    if (stochastic) {
      launch<GRAD, kFp32, G, true>(a, p, work, stream);
    } else {
      launch<GRAD, kFp32, G, false>(a, p, work, stream);
    }
  }
}

template <int VALUE>
void launch_limit(const EncodeArguments& a, const PruneArguments& p, const Workspace& work,
                  cudaStream_t stream) {
  const LimitArguments call = {
      a.segment_offsets, a.most_nnz,
      a.segment_count,   a.status,
      p.residual,        p.leak,
      p.key >= 0,        hash_seed(static_cast<uint64_t>(p.key), kDrawResidual)};
  const int64_t tiles = most_tiles(a.numel, a.segment_count);
  const cudaLaunchConfig_t config = grid_for((tiles + kLimitWarps - 1) / kLimitWarps,
                                             multiprocessors() * 8, kLimitThreads, stream);
  if (p.residual_dtype == kBf16) {
    cudaLaunchKernelEx(&config, limit_kernel<VALUE, kBf16>, work, call);
  } else {
    cudaLaunchKernelEx(&config, limit_kernel<VALUE, kFp32>, work, call);
  }
}

}  // namespace

void launch_prune(const EncodeArguments& a, const PruneArguments& p, const Workspace& work,
                  cudaStream_t stream) {
  const Grid grid = grid_of(a.grad_dtype, a.value_dtype);
  if (a.grad_dtype == kFp32) {
    if (grid == Grid::kFp32) launch_types<kFp32, Grid::kFp32>(a, p, work, stream);
    if (grid == Grid::kBf16) launch_types<kFp32, Grid::kBf16>(a, p, work, stream);
    if (grid == Grid::kFp16) launch_types<kFp32, Grid::kFp16>(a, p, work, stream);
  } else if (a.grad_dtype == kBf16) {
    if (grid == Grid::kBf16) launch_types<kBf16, Grid::kBf16>(a, p, work, stream);
    if (grid == Grid::kBf16AndFp16) launch_types<kBf16, Grid::kBf16AndFp16>(a, p, work, stream);
  } else {
    if (grid == Grid::kFp16) launch_types<kFp16, Grid::kFp16>(a, p, work, stream);
    if (grid == Grid::kBf16AndFp16) launch_types<kFp16, Grid::kBf16AndFp16>(a, p, work, stream);
  }
  if (a.most_nnz != nullptr) {
    if (a.value_dtype == kFp32) launch_limit<kFp32>(a, p, work, stream);
    if (a.value_dtype == kBf16) launch_limit<kBf16>(a, p, work, stream);
    if (a.value_dtype == kFp16) launch_limit<kFp16>(a, p, work, stream);
  }
}

void launch_prune_encode(const EncodeArguments& a, const PruneArguments& p, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Workspace work = workspace_of(a);
  launch_cut(a, work, stream);
  if (a.segment_count == 0) return;
  launch_prune(a, p, work, stream);
  launch_place(a, work, stream);
}

}  // namespace megatron_sparse
