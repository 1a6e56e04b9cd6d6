// Records of moves on CUDA: device, stream, launch. Their schemas are moves.cpp's; the caller has
// checked the tensors.
//
// Results stay on the device: the caller waits for the device when it reads them.
#include "cuda_binding.h"
#include "moves.h"
#include "moves_launch.h"

namespace megatron_sparse {
namespace {

// Returns the record's bytes, one int64.
Tensor moves_encode_cuda(const Tensor& old, const Tensor& now, const Tensor& down, int64_t step,
                         const Tensor& out) {
  const int dtype = dtype_code(now, "moves_encode: new");
  const int64_t numel = now.numel();
  check_alignment(out, 16, "moves_encode: out");
  torch::stable::accelerator::DeviceGuard guard(now.get_device_index());
  Tensor size = new_words(now, 1);
  const Tensor workspace = new_workspace(now, moves_encode_workspace_bytes(numel, dtype));
  launch_moves_encode({old.const_data_ptr(), now.const_data_ptr(),
                       static_cast<const uint32_t*>(down.const_data_ptr()), numel, dtype,
                       static_cast<uint32_t>(step), static_cast<uint8_t*>(out.mutable_data_ptr()),
                       words_of(size), workspace.mutable_data_ptr()},
                      current_stream(now));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return size;
}

// Of each record the field that is wrong and where, or zeros; what is held has changed only then.
Tensor moves_decode_cuda(const std::vector<Tensor>& held, const std::vector<Tensor>& down,
                         const std::vector<Tensor>& records, const std::vector<int64_t>& coders) {
  const int dtype = dtype_code(held[0], "moves_decode_: held");
  const int64_t count = static_cast<int64_t>(held.size());
  torch::stable::accelerator::DeviceGuard guard(held[0].get_device_index());
  Tensor statuses = new_words(held[0], 2 * count);
  std::vector<MovesDecodeArguments> calls;
  for (int64_t i = 0; i < count; ++i) {
    check_vector(held[i], "moves_decode_: held", held[0].scalar_type(), -1);
    check_alignment(records[i], 16, "moves_decode_: record");
    calls.push_back({held[i].mutable_data_ptr(), static_cast<uint32_t*>(down[i].mutable_data_ptr()),
                     held[i].numel(), dtype, static_cast<int>(coders[i]),
                     static_cast<const uint8_t*>(records[i].const_data_ptr()) + kMovesBodyAt,
                     records[i].numel() - kMovesBodyAt, words_of(statuses) + 2 * i});
  }
  const Tensor workspace =
      new_workspace(held[0], moves_decode_workspace_bytes(calls.data(), count));
  launch_moves_decode(calls.data(), count, workspace.mutable_data_ptr(), current_stream(held[0]));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return statuses;
}

void moves_keep_cuda(const Tensor& held, const Tensor& now, const Tensor& down) {
  torch::stable::accelerator::DeviceGuard guard(held.get_device_index());
  launch_moves_keep(
      {held.mutable_data_ptr(), now.const_data_ptr(), now.numel(),
       dtype_code(now, "moves_keep_: new"), static_cast<uint32_t*>(down.mutable_data_ptr())},
      current_stream(held));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("moves_encode", TORCH_BOX(&megatron_sparse::moves_encode_cuda));
  m.impl("moves_decode_", TORCH_BOX(&megatron_sparse::moves_decode_cuda));
  m.impl("moves_keep_", TORCH_BOX(&megatron_sparse::moves_keep_cuda));
}
