// Records of moves on CUDA: checks, device, stream, launch. Their schemas are moves.cpp's.
//
// Results stay on the device: the caller waits for the device when it reads them.
#include "cuda_binding.h"
#include "moves.h"
#include "moves_launch.h"

namespace megatron_sparse {
namespace {

void check_numbers(const Tensor& tensor, const char* name, int dtype, int64_t numel) {
  check_flat(tensor, name);
  const int code = dtype_code(tensor, name);
  MS_CHECK(code == dtype, name << " has the wrong dtype", "dtype code " << dtype, code);
  MS_CHECK(tensor.numel() == numel, name << " has the wrong length", numel, tensor.numel());
  MS_CHECK(numel <= kMaxMoves, name << " is too long", "at most 2^34 numbers", numel);
}

// Returns the record's bytes, one int64.
Tensor moves_encode_cuda(const Tensor& old, const Tensor& now, int64_t step, const Tensor& out) {
  const int dtype = dtype_code(now, "moves_encode: new");
  const int64_t numel = now.numel();
  check_numbers(now, "moves_encode: new", dtype, numel);
  check_numbers(old, "moves_encode: old", dtype, numel);
  check_beside(old, now, "moves_encode: old");
  check_vector(out, "moves_encode: out", ScalarType::Byte, moves_room_bytes(numel, dtype));
  check_beside(out, now, "moves_encode: out");
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
  const int dtype = dtype_code(held, "moves_decode_: held");
  check_numbers(held, "moves_decode_: held", dtype, held.numel());
  check_vector(record, "moves_decode_: record", ScalarType::Byte, -1);
  check_beside(record, held, "moves_decode_: record");
  check_alignment(record, 16, "moves_decode_: record");
  MS_CHECK(coder == kMovesRaw || coder == kMovesRans, "moves_decode_: coder is unknown",
           "0 (raw) or 1 (rans)", coder);
  MS_CHECK(record.numel() >= kMovesBodyAt && record.numel() % 16 == 0,
           "moves_decode_: record has the wrong length", "a multiple of 16, 48 at least",
           record.numel());
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
