// Records of moves on CUDA: checks, device, stream, launch. Their schemas are moves.cpp's.
//
// Results stay on the device: the caller waits for the device when it reads them.
#include "cuda_binding.h"
#include "moves_check.h"
#include "moves_launch.h"

namespace megatron_sparse {
namespace {

// Returns the record's bytes, one int64.
Tensor moves_encode_cuda(const Tensor& old, const Tensor& now, int64_t step, const Tensor& out) {
  const int dtype = check_moves_encode(old, now, out);
  const int64_t numel = now.numel();
  check_alignment(out, 16, "moves_encode: out");
  torch::stable::accelerator::DeviceGuard guard(now.get_device_index());
  Tensor size = new_words(now, 1);
  const Tensor workspace = new_workspace(now, moves_encode_workspace_bytes(numel, dtype));
  launch_moves_encode(
      {old.const_data_ptr(), now.const_data_ptr(), numel, dtype, static_cast<uint32_t>(step),
       static_cast<uint8_t*>(out.mutable_data_ptr()), words_of(size), workspace.mutable_data_ptr()},
      current_stream(now));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return size;
}

// The field that is wrong and where, or zeros; what is held has changed only then.
Tensor moves_decode_cuda(const Tensor& held, const Tensor& record, int64_t coder) {
  const int dtype = check_moves_decode(held, record, coder);
  check_alignment(record, 16, "moves_decode_: record");
  torch::stable::accelerator::DeviceGuard guard(held.get_device_index());
  Tensor status = new_words(held, 2);
  const int code = static_cast<int>(coder);
  const Tensor workspace =
      new_workspace(held, moves_decode_workspace_bytes(held.numel(), dtype, code));
  launch_moves_decode(
      {held.mutable_data_ptr(), held.numel(), dtype, code,
       static_cast<const uint8_t*>(record.const_data_ptr()) + kMovesBodyAt,
       record.numel() - kMovesBodyAt, words_of(status), workspace.mutable_data_ptr()},
      current_stream(held));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return status;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("moves_encode", TORCH_BOX(&megatron_sparse::moves_encode_cuda));
  m.impl("moves_decode_", TORCH_BOX(&megatron_sparse::moves_decode_cuda));
}
