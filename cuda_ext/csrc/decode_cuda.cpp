// decode_add_ on CUDA: checks, device, stream, launch. Its schema is library.cpp's.
//
// segment_offsets lies on the device, and the status stays there: the caller waits for the device
// when it reads it.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "decode_launch.h"

namespace megatron_sparse {
namespace {

Tensor decode_add_cuda(const Tensor& acc, const Tensor& message, const Tensor& segment_offsets,
                       int64_t value_dtype, int64_t step, int64_t base, bool fresh,
                       std::optional<Tensor> slots) {
  check_vector(acc, "decode_add_: acc", ScalarType::Float, -1);
  check_vector(message, "decode_add_: message", ScalarType::Byte, -1);
  check_vector(segment_offsets, "decode_add_: segment_offsets", ScalarType::Long, -1);
  const auto device = acc.get_device_index();
  const auto here = [device](const Tensor& tensor) {
    return tensor.is_cuda() && tensor.get_device_index() == device;
  };
  MS_CHECK(here(acc) && here(message) && here(segment_offsets),
           "decode_add_: a tensor is on the wrong device", "all on acc's CUDA device", "another");
  const int64_t* slot = nullptr;
  if (slots.has_value()) {
    check_vector(*slots, "decode_add_: slots", ScalarType::Long, segment_offsets.numel());
    MS_CHECK(here(*slots), "decode_add_: slots is on the wrong device", "acc's CUDA device",
             "another");
    slot = static_cast<const int64_t*>(slots->const_data_ptr());
  }
  check_dtype_code(value_dtype, "decode_add_: value_dtype");
  MS_CHECK(segment_offsets.numel() >= 1, "decode_add_: segment_offsets is empty",
           "at least one offset", 0);
  MS_CHECK(segment_offsets.numel() <= int64_t{1} << 31, "decode_add_: there are too many segments",
           "fewer than 2^31", segment_offsets.numel() - 1);
  MS_CHECK(base >= 0 && base <= kMaxNumel, "decode_add_: base is out of range", "0 to 2^40", base);
  MS_CHECK(reinterpret_cast<uintptr_t>(message.const_data_ptr()) % 16 == 0,
           "decode_add_: message is not aligned", "an address that 16 divides", "another");

  torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t segment_count = segment_offsets.numel() - 1;
  Tensor status = torch::stable::new_empty(segment_offsets, {4});
  const Tensor workspace =
      torch::stable::new_empty(message, {decode_workspace_bytes(segment_count)});
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  launch_decode_add(
      {static_cast<float*>(acc.mutable_data_ptr()), acc.numel(),
       static_cast<const uint8_t*>(message.const_data_ptr()), message.numel(),
       static_cast<const int64_t*>(segment_offsets.const_data_ptr()), segment_count, base,
       static_cast<int>(value_dtype), static_cast<uint32_t>(step), fresh,
       workspace.mutable_data_ptr(), static_cast<int64_t*>(status.mutable_data_ptr()), slot},
      stream);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return status;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("decode_add_", TORCH_BOX(&megatron_sparse::decode_add_cuda));
}
