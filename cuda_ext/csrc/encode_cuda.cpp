// encode and prune_encode on CUDA: device, stream, launch. Their schemas are library.cpp's.
//
// They need no count and no size on the host: status, sizes and counts come back on the device.
// Nor do they read a table: the kernels check segment_offsets and segment_kinds and set the status.
#include "cuda_binding.h"
#include "encode_request.h"
#include "rice_encode_launch.h"

namespace megatron_sparse {
namespace {

RiceArguments rice_of(const EncodeRequest& r, const PruneArguments* pruning) {
  RiceArguments rice = {r.dtype(),
                        static_cast<int>(r.log2_span),
                        r.without_indices,
                        r.residual.has_value() ? r.residual->mutable_data_ptr() : nullptr,
                        kFp32,
                        -1,
                        false};
  if (pruning == nullptr) return rice;
  if (is_quantised(rice.dtype)) rice.residual = pruning->residual;
  rice.at_once =
      is_quantised(rice.dtype) && !rice.without_indices && rice.log2_span <= kMostOnceSpan;
  rice.residual_dtype = pruning->residual_dtype;
  rice.key = pruning->key;
  return rice;
}

// The report is one tensor, so that reading it is one copy: the status (4 words), the bytes of each
// segment's record, and the non-zero elements of each segment.
Tensor run(const EncodeRequest& r, const PruneArguments* pruning) {
  check_alignment(r.out, 16, "encode: out");
  torch::stable::accelerator::DeviceGuard guard(r.grad.get_device_index());
  const int64_t segment_count = r.segment_count();
  Tensor report = new_words(r.grad, 4 + 2 * segment_count);
  int64_t* status = words_of(report);
  EncodeArguments call = {r.grad.const_data_ptr(),
                          r.grad.numel(),
                          dtype_code(r.grad, "encode: grad"),
                          staged_dtype(r.dtype()),
                          entries_of(r.segment_offsets),
                          static_cast<const uint8_t*>(r.segment_kinds.const_data_ptr()),
                          segment_count,
                          static_cast<uint32_t>(r.step),
                          r.block_size,
                          static_cast<uint8_t*>(r.out.mutable_data_ptr()),
                          r.out.numel(),
                          nullptr,
                          status + 4,
                          status + 4 + segment_count,
                          status,
                          entries_or_null(r.slots),
                          entries_or_null(r.capacity)};
  const RiceArguments rice = rice_of(r, pruning);
  const Tensor workspace = new_workspace(
      r.grad, r.is_rice() ? rice_encode_workspace_bytes(call, rice) : encode_workspace_bytes(call));
  call.workspace = workspace.mutable_data_ptr();
  void* stream = current_stream(r.grad);
  if (r.is_rice() && pruning != nullptr) {
    launch_rice_prune_encode(call, rice, *pruning, stream);
  } else if (r.is_rice()) {
    launch_rice_encode(call, rice, stream);
  } else if (pruning != nullptr) {
    launch_prune_encode(call, *pruning, stream);
  } else {
    launch_encode(call, stream);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return report;
}

Tensor encode_cuda(const EncodeRequest& r) {
  return run(r, nullptr);
}

Tensor prune_encode_cuda(const EncodeRequest& r, const PruneRequest& p) {
  const PruneTypes types = check_prune(p);
  MS_CHECK(!r.capacity.has_value() || r.block_size == 0, "prune_encode: blocks have no capacity",
           "another format", "blocks");
  const PruneArguments pruning = {p.old_residual.const_data_ptr(),
                                  p.residual.mutable_data_ptr(),
                                  entries_of(p.range_offsets),
                                  static_cast<const float*>(p.thresholds.const_data_ptr()),
                                  p.chances(),
                                  p.thresholds.numel(),
                                  static_cast<float>(p.leak),
                                  p.key,
                                  types.residual};
  return run(r, &pruning);
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("encode", TORCH_BOX(&megatron_sparse::encode<megatron_sparse::encode_cuda>));
  m.impl("prune_encode",
         TORCH_BOX(&megatron_sparse::prune_encode<megatron_sparse::prune_encode_cuda>));
}
