// The checks and arguments that the bindings of encode_records and prune_encode_records share.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "encode_launch.h"

namespace megatron_sparse {

struct EncodeRequest {
  const Tensor& grad;
  const Tensor& segment_offsets;
  const Tensor& segment_formats;
  int64_t value_dtype;
  int64_t step;
  int64_t block_size;
  const Tensor& out;
  std::optional<Tensor> slots;
  std::optional<Tensor> most_nnz;
};

inline void check_encode(const EncodeRequest& r) {
  const auto device = r.grad.get_device_index();
  const auto here = [device](const Tensor& tensor) {
    return tensor.is_cuda() && tensor.get_device_index() == device;
  };
  check_flat(r.grad, "encode: grad");
  MS_CHECK(here(r.grad) && here(r.segment_offsets) && here(r.segment_formats) && here(r.out),
           "encode: a tensor is on the wrong device", "all on grad's CUDA device", "another");
  dtype_code(r.grad, "encode: grad");
  check_dtype_code(r.value_dtype, "encode: value_dtype");
  const int64_t segment_count = r.segment_formats.numel();
  // The contents of these two are on the device, so the kernels check them and set the status.
  check_vector(r.segment_formats, "encode: segment_formats", ScalarType::Byte, -1);
  check_vector(r.segment_offsets, "encode: segment_offsets", ScalarType::Long, segment_count + 1);
  MS_CHECK(r.step >= 0, "encode: step is out of range", "0 or more", r.step);
  check_vector(r.out, "encode: out", ScalarType::Byte, -1);
  MS_CHECK(reinterpret_cast<uintptr_t>(r.out.const_data_ptr()) % 16 == 0,
           "encode: out is not aligned", "an address that 16 divides", "another");
  MS_CHECK(r.grad.numel() <= kMaxNumel, "encode: grad is too long", "at most 2^40 elements",
           r.grad.numel());
  MS_CHECK(segment_count > 0 || r.grad.numel() == 0, "encode: segment_formats is empty",
           "one for each segment", 0);
  MS_CHECK(segment_count < int64_t{1} << 31, "encode: there are too many segments",
           "fewer than 2^31", segment_count);
  const auto check_table = [&](const std::optional<Tensor>& table, const char* name, int64_t size) {
    if (!table.has_value()) return;
    check_vector(*table, name, ScalarType::Long, size);
    MS_CHECK(here(*table), name << " is on the wrong device", "grad's CUDA device", "another");
  };
  check_table(r.slots, "encode: slots", segment_count + 1);
  check_table(r.most_nnz, "encode: capacity", segment_count);
  MS_CHECK(!r.most_nnz.has_value() || r.block_size == 0, "encode: blocks have no capacity",
           "another format", "blocks");
  const int64_t block = r.block_size;
  MS_CHECK(block == 0 || (block >= 64 && block <= 4096 && (block & (block - 1)) == 0),
           "encode: block_size is out of range", "0, or a power of two from 64 to 4096", block);
}

// Allocates report and workspace, of bytes(arguments), and calls `launch` with the arguments and
// the current stream; the device guard is the caller's. The report is one tensor, so that reading
// it is one copy: the status (4 words), the bytes of each segment's record, and the non-zero
// elements of each segment.
template <class Bytes, class Launch>
Tensor run_encoder(const EncodeRequest& r, Bytes bytes, Launch launch) {
  const int64_t segment_count = r.segment_formats.numel();
  Tensor report = torch::stable::new_empty(r.segment_offsets, {4 + 2 * segment_count});
  int64_t* status = static_cast<int64_t*>(report.mutable_data_ptr());
  EncodeArguments arguments = {
      r.grad.const_data_ptr(),
      r.grad.numel(),
      dtype_code(r.grad, "encode: grad"),
      static_cast<int>(r.value_dtype),
      static_cast<const int64_t*>(r.segment_offsets.const_data_ptr()),
      static_cast<const uint8_t*>(r.segment_formats.const_data_ptr()),
      segment_count,
      static_cast<uint32_t>(r.step),
      r.block_size,
      static_cast<uint8_t*>(r.out.mutable_data_ptr()),
      r.out.numel(),
      nullptr,
      status + 4,
      status + 4 + segment_count,
      status,
      r.slots.has_value() ? static_cast<const int64_t*>(r.slots->const_data_ptr()) : nullptr,
      r.most_nnz.has_value() ? static_cast<const int64_t*>(r.most_nnz->const_data_ptr()) : nullptr,
  };
  const Tensor workspace = torch::stable::new_empty(r.out, {bytes(arguments)});
  arguments.workspace = workspace.mutable_data_ptr();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(r.grad.get_device_index(), &stream));
  launch(arguments, stream);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return report;
}

}  // namespace megatron_sparse
