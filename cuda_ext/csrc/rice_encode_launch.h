// The launchers of the CUDA encoders of messages of kind Rice, between nvcc (no torch) and the
// bindings.
#pragma once

#include "encode_launch.h"

namespace megatron_sparse {

inline constexpr int kMostOnceSpan = 13;  // of chunks that a block holds in shared memory

// Beside EncodeArguments, whose value_dtype is that of the staged values (fp32 where they will be
// quantised), whose segment_kinds are kKindRice, or kKindDense for segments that are sent whole,
// and whose block_size is 0.
struct RiceArguments {
  int dtype;  // of the values on the wire
  int log2_span;
  bool without_indices;  // every element of every segment has a value
  // Of quantised values, or null: fp32 or bf16 for every element. It is added to what is sent, and
  // receives what the levels lose. With pruning it is PruneArguments' residual.
  void* residual;
  int residual_dtype;
  int64_t key;  // of a bf16 residual's rounding; negative for rounding to nearest
  // Whether a launch codes what it has pruned: quantised values with indices, in short chunks.
  bool at_once;
};

int64_t rice_encode_workspace_bytes(const EncodeArguments& arguments, const RiceArguments& rice);

// As launch_encode and launch_prune_encode. Four launches, one more with a limit; three if chunks
// are coded at once. Without indices two: every element is sent, whatever the limit; if the message
// does not fit, no residual changes.
void launch_rice_encode(const EncodeArguments& arguments, const RiceArguments& rice, void* stream);
void launch_rice_prune_encode(const EncodeArguments& arguments, const RiceArguments& rice,
                              const PruneArguments& prune, void* stream);

}  // namespace megatron_sparse
