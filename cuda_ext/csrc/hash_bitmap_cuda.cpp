// The hash bitmap on CUDA: device, stream, launch. Its schemas are hash_bitmap.cpp's.
//
// Status and nnz stay on the device: the caller waits for the device when it reads them.
#include "cuda_binding.h"
#include "hash_bitmap_check.h"

namespace megatron_sparse {
namespace {

Tensor hash_bitmap_pack_cuda(const Tensor& values, const Tensor& words, const Tensor& packed) {
  BitmapPackArguments call = check_bitmap_pack(values, words, packed);
  check_alignment(words, 4, "hash_bitmap_pack: words");
  check_alignment(packed, dtype_bytes(call.value_dtype), "hash_bitmap_pack: packed");
  torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  const Tensor nnz = new_words(values, 1);
  const Tensor workspace = new_workspace(values, bitmap_workspace_bytes(call.positions));
  call.nnz = words_of(nnz);
  call.workspace = workspace.mutable_data_ptr();
  launch_hash_bitmap_pack(call, current_stream(values));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return nnz;
}

Tensor hash_bitmap_add_cuda(const Tensor& acc, const Tensor& words, const Tensor& values,
                            int64_t value_dtype, int64_t nnz, int64_t partition, int64_t partitions,
                            int64_t seed, bool permuted) {
  BitmapArguments call =
      check_bitmap_add(acc, words, values, value_dtype, nnz, partition, partitions, seed, permuted);
  check_alignment(words, 4, "hash_bitmap_add_: words");
  check_alignment(values, dtype_bytes(call.value_dtype), "hash_bitmap_add_: values");
  torch::stable::accelerator::DeviceGuard guard(acc.get_device_index());
  const Tensor status = new_words(acc, 2);
  const Tensor workspace = new_workspace(acc, bitmap_workspace_bytes(call.positions));
  call.status = words_of(status);
  call.workspace = workspace.mutable_data_ptr();
  launch_hash_bitmap_add(call, current_stream(acc));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return status;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("hash_bitmap_pack", TORCH_BOX(&megatron_sparse::hash_bitmap_pack_cuda));
  m.impl("hash_bitmap_add_", TORCH_BOX(&megatron_sparse::hash_bitmap_add_cuda));
}
