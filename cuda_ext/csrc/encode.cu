// Instances of the encoder's kernels that do not depend on pruning, and their launch.
#include "cut_tiles.cuh"
#include "encode_steps.cuh"
#include "place_kernel.cuh"

namespace megatron_sparse {
namespace {

// The gradient as it is, 1 read of it.
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

__global__ void __launch_bounds__(kCutThreads)
    cut_tiles_kernel(const __grid_constant__ TileCut cut) {
  cut_tiles(cut, blockIdx.x, gridDim.x);
}

}  // namespace

int64_t encode_workspace_bytes(const EncodeArguments& arguments) {
  return workspace_of(arguments).bytes;
}

void launch_cut(const EncodeArguments& a, const Workspace& work, cudaStream_t stream) {
  const TileCut cut = tile_cut_of(a, work);
  const int64_t blocks = cut_blocks(cut);
  const cudaLaunchConfig_t config = grid_for(blocks, blocks, kCutThreads, stream);
  cudaLaunchKernelEx(&config, cut_tiles_kernel, cut);
}

void launch_place(const EncodeArguments& a, const Workspace& work, cudaStream_t stream,
                  const SpoiledBy& spoiled) {
  const int64_t tiles = most_tiles(a.numel, a.segment_count);
  const cudaLaunchConfig_t all = grid_for((tiles + kPlaceWarps - 1) / kPlaceWarps,
                                          multiprocessors() * 8, kPlaceThreads, stream);
  // Values are moved as they are: bf16 and fp16 do not differ.
  with_constant<kFp32, kBf16>(a.value_dtype, [&](auto value) {
    cudaLaunchKernelEx(&all, place_kernel<typename RawType<value.value>::type>, work, a, spoiled);
  });
}

void launch_compact_grad(const EncodeArguments& a, const Workspace& work, cudaStream_t stream) {
  with_constant<kFp32, kBf16, kFp16>(a.grad_dtype, [&](auto grad) {
    launch_compact(a, GradSource<grad.value>{a.grad}, work, stream);
  });
}

void launch_encode(const EncodeArguments& a, void* stream_pointer, const SpoiledBy& spoiled) {
  launch_cut(a, workspace_of(a), static_cast<cudaStream_t>(stream_pointer));
  launch_encode_cut(a, stream_pointer, spoiled);
}

void launch_encode_cut(const EncodeArguments& a, void* stream_pointer, const SpoiledBy& spoiled) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Workspace work = workspace_of(a);
  if (a.segment_count == 0) return;
  launch_compact_grad(a, work, stream);
  launch_place(a, work, stream, spoiled);
}

}  // namespace megatron_sparse
