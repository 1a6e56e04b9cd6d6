// Instances of the encoder's kernels that do not depend on pruning, and their launch.
#include "encode_kernel.cuh"
#include "encode_steps.cuh"
#include "place_kernel.cuh"

namespace megatron_sparse {
namespace {

template <class Value>
void launch_place_values(const EncodeArguments& a, const Workspace& work, cudaStream_t stream,
                         const SpoiledBy& spoiled) {
  const int64_t tiles = a.numel / kPiciTile + a.segment_count;
  const cudaLaunchConfig_t all = grid_for((tiles + kPlaceWarps - 1) / kPlaceWarps,
                                          multiprocessors() * 8, kPlaceThreads, stream);
  cudaLaunchKernelEx(&all, place_kernel<Value>, work, a, spoiled);
}

// At most a block for each of the multiprocessors.
void launch_cut_tiles(const EncodeArguments& a, const Workspace& work, const Cleared& slots,
                      cudaStream_t stream) {
  const Cleared counters = {work.nnz_states, work.zeroed_bytes};
  const int64_t vectors = (counters.bytes + slots.bytes) / 16;
  const cudaLaunchConfig_t config =
      grid_for(vectors / kCutThreads + 1, multiprocessors(), kCutThreads, stream);
  cudaLaunchKernelEx(&config, cut_tiles_kernel, work, a.segment_offsets, a.segment_kinds,
                     a.segment_count, a.numel, a.status, counters, slots);
}

}  // namespace

int64_t encode_workspace_bytes(const EncodeArguments& arguments) {
  return workspace_of(arguments).bytes;
}

void launch_cut(const EncodeArguments& a, const Workspace& work, cudaStream_t stream) {
  launch_cut_tiles(a, work, {}, stream);
}

void launch_cut_and_clear(const EncodeArguments& a, const Workspace& work, cudaStream_t stream) {
  Cleared slots = {};
  if (a.slots != nullptr) slots = {a.out, a.capacity};
  launch_cut_tiles(a, work, slots, stream);
}

void launch_place(const EncodeArguments& a, const Workspace& work, cudaStream_t stream,
                  const SpoiledBy& spoiled) {
  if (a.value_dtype == kFp32) {
    launch_place_values<uint32_t>(a, work, stream, spoiled);
  } else {
    launch_place_values<uint16_t>(a, work, stream, spoiled);
  }
}

void launch_compact_grad(const EncodeArguments& a, const Workspace& work, cudaStream_t stream) {
  if (a.grad_dtype == kFp32) {
    launch_compact(a, GradSource<kFp32>{a.grad}, work, stream);
  } else if (a.grad_dtype == kBf16) {
    launch_compact(a, GradSource<kBf16>{a.grad}, work, stream);
  } else {
    launch_compact(a, GradSource<kFp16>{a.grad}, work, stream);
  }
}

void launch_encode(const EncodeArguments& a, void* stream_pointer, const SpoiledBy& spoiled) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Workspace work = workspace_of(a);
  launch_cut_and_clear(a, work, stream);
  if (a.segment_count == 0) return;
  launch_compact_grad(a, work, stream);
  launch_place(a, work, stream, spoiled);
}

}  // namespace megatron_sparse
