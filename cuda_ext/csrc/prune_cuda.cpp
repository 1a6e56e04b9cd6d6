// prune_ on CUDA: checks, device, stream, launch.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include "prune.h"
#include "prune_launch.h"

namespace megatron_sparse {
namespace {

Tensor prune_cuda(const Tensor& grad, const Tensor& residual, const Tensor& range_offsets,
                  const Tensor& thresholds, double leak, int64_t wire_dtype, int64_t key) {
  const PruneTypes types = check_prune(grad, residual, thresholds, leak, wire_dtype);
  const auto device = grad.get_device_index();
  const auto here = [device](const Tensor& tensor) {
    return tensor.is_cuda() && tensor.get_device_index() == device;
  };
  MS_CHECK(here(residual) && here(range_offsets) && here(thresholds),
           "prune_: a tensor is on the wrong device", "all on grad's CUDA device", "another");
  const int64_t range_count = thresholds.numel();
  // The content of range_offsets is on the device and is not looked at: the kernel finds a range of
  // the table for every element whatever it holds.
  check_vector(range_offsets, "prune_: range_offsets", ScalarType::Long, range_count + 1);
  MS_CHECK(range_count > 0 || grad.numel() == 0, "prune_: thresholds is empty",
           "one for each range", 0);

  torch::stable::accelerator::DeviceGuard guard(device);
  Tensor nnz = torch::stable::new_zeros(range_offsets, {range_count});
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  launch_prune(
      {grad.mutable_data_ptr(), residual.mutable_data_ptr(),
       static_cast<const int64_t*>(range_offsets.const_data_ptr()),
       static_cast<const float*>(thresholds.const_data_ptr()),
       static_cast<int64_t*>(nnz.mutable_data_ptr()), range_count, grad.numel(),
       static_cast<float>(leak), key, types.grad, types.residual, static_cast<int>(wire_dtype)},
      stream);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return nnz;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("prune_", TORCH_BOX(&megatron_sparse::prune_cuda));
}
