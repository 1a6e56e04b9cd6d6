// The steps that the encoders' launchers share: cut, compact, place.
#pragma once

#include "compact_kernel.cuh"
#include "launch_grid.cuh"

namespace megatron_sparse {

inline Workspace workspace_of(const EncodeArguments& a) {
  const int64_t value_bytes = dtype_bytes(a.value_dtype);
  // Elements that a limit takes back must have been staged; else values that have no room in the
  // message need none here.
  const int64_t most = a.most_nnz != nullptr ? a.numel : a.capacity / value_bytes;
  return lay_out_workspace(a.workspace, {a.numel, a.segment_count, value_bytes, most,
                                         a.block_size != 0, false, 0, false});
}

// Clears the workspace's counters and the slots, if any, and cuts the segments into tiles.
void launch_cut(const EncodeArguments& arguments, const Workspace& work, cudaStream_t stream);

template <class Source>
void launch_compact(const EncodeArguments& a, const Source& source, const Workspace& work,
                    cudaStream_t stream) {
  const cudaLaunchConfig_t config =
      grid_for(most_tiles(a.numel, a.segment_count), multiprocessors() * Source::kBlocks,
               kCompactThreads, stream);
  cudaLaunchKernelEx(&config, compact_kernel<Source>, source, work, a.segment_offsets,
                     a.segment_count, a.value_dtype, a.block_size);
}

// The pass over the gradient as it is.
void launch_compact_grad(const EncodeArguments& arguments, const Workspace& work,
                         cudaStream_t stream);

// Prunes gradient and residual, compacts what is selected and, with a capacity, takes back what
// exceeds it; after the cut.
void launch_prune(const EncodeArguments& arguments, const PruneArguments& prune,
                  const Workspace& work, cudaStream_t stream);

// Plans the records and moves the kept elements into them; writes nothing between slots.
void launch_place(const EncodeArguments& arguments, const Workspace& work, cudaStream_t stream,
                  const SpoiledBy& spoiled = {});

}  // namespace megatron_sparse
