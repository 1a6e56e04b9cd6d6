// Instances of prune_encode's CUDA kernel and their launch.
#include "encode_steps.cuh"
#include "limit_kernel.cuh"
#include "prune_encode_kernel.cuh"

namespace megatron_sparse {

void launch_prune(const EncodeArguments& a, const PruneArguments& p, const Workspace& work,
                  cudaStream_t stream) {
  with_constant<kFp32, kBf16, kFp16>(a.grad_dtype, [&](auto grad) {
    with_constant<kFp32, kBf16, kFp16>(a.value_dtype, [&](auto value) {
      with_constant<kFp32, kBf16>(p.residual_dtype, [&](auto residual) {
        with_constant<true, false>(p.key >= 0, [&](auto stochastic) {
          using Source = PruneSource<decltype(grad)::value, decltype(residual)::value,
                                     grid_of(decltype(grad)::value, decltype(value)::value),
                                     decltype(stochastic)::value>;
          const Source source = {a.grad,          p.old_residual, p.residual,
                                 p.range_offsets, p.thresholds,   p.tie_chances,
                                 p.range_count,   p.leak,         prune_seeds(p.key)};
          launch_compact(a, source, work, stream);
        });
      });
    });
  });
  if (a.most_nnz == nullptr) return;
  const LimitArguments limit = {
      a.segment_offsets, a.most_nnz,
      a.segment_count,   a.status,
      p.residual,        p.leak,
      p.key >= 0,        hash_seed(static_cast<uint64_t>(p.key), kDrawResidual)};
  const int64_t tiles = most_tiles(a.numel, a.segment_count);
  const cudaLaunchConfig_t config = grid_for((tiles + kLimitWarps - 1) / kLimitWarps,
                                             multiprocessors() * 8, kLimitThreads, stream);
  with_constant<kFp32, kBf16, kFp16>(a.value_dtype, [&](auto value) {
    with_constant<kFp32, kBf16>(p.residual_dtype, [&](auto residual) {
      constexpr auto kernel = limit_kernel<decltype(value)::value, decltype(residual)::value>;
      cudaLaunchKernelEx(&config, kernel, work, limit);
    });
  });
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
