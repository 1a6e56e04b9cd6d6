// The hash bitmap on CUDA: checks, device, stream, launch. Its schemas are hash_bitmap.cpp's.
//
// Status and nnz stay on the device: the caller waits for the device when it reads them.
#include "cuda_binding.h"
#include "hash_check.h"
#include "hash_launch.h"

namespace megatron_sparse {
namespace {

Tensor hash_bitmap_pack_cuda(const Tensor& values, const Tensor& words, const Tensor& packed) {
  check_flat(values, "hash_bitmap_pack: values");
  const int64_t positions = values.numel();
  const int dtype = dtype_code(values, "hash_bitmap_pack: values");
  const int64_t value_bytes = dtype_bytes(dtype);
  check_vector(words, "hash_bitmap_pack: words", ScalarType::Byte, 8 * ((positions + 63) / 64));
  check_vector(packed, "hash_bitmap_pack: packed", ScalarType::Byte, positions * value_bytes);
  check_beside(words, values, "hash_bitmap_pack: words");
  check_beside(packed, values, "hash_bitmap_pack: packed");
  check_alignment(words, 4, "hash_bitmap_pack: words");
  check_alignment(packed, value_bytes, "hash_bitmap_pack: packed");
  torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  const Tensor nnz = new_words(values, 1);
  const Tensor workspace = new_workspace(values, bitmap_workspace_bytes(positions));
  launch_hash_bitmap_pack(
      {values.const_data_ptr(), dtype, positions, static_cast<uint32_t*>(words.mutable_data_ptr()),
       packed.mutable_data_ptr(), words_of(nnz), workspace.mutable_data_ptr()},
      current_stream(values));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return nnz;
}

Tensor hash_bitmap_add_cuda(const Tensor& acc, const Tensor& words, const Tensor& values,
                            int64_t value_dtype, int64_t nnz, int64_t partition, int64_t partitions,
                            int64_t seed, std::optional<Tensor> index_set) {
  check_vector(acc, "hash_bitmap_add_: acc", ScalarType::Float, -1);
  check_beside(words, acc, "hash_bitmap_add_: words");
  check_beside(values, acc, "hash_bitmap_add_: values");
  const int64_t numel = acc.numel();
  check_hash(numel, partitions, "hash_bitmap_add_");
  check_partition(partition, partitions, "hash_bitmap_add_");
  BitmapArguments call = {};
  call.first = partition_begin(numel, partitions, partition);
  call.positions = partition_begin(numel, partitions, partition + 1) - call.first;
  if (index_set.has_value()) {
    check_vector(*index_set, "hash_bitmap_add_: index_set", ScalarType::Int, -1);
    check_beside(*index_set, acc, "hash_bitmap_add_: index_set");
    call.set = static_cast<const int32_t*>(index_set->const_data_ptr());
    call.positions = index_set->numel();
  }
  check_vector(words, "hash_bitmap_add_: words", ScalarType::Byte,
               8 * ((call.positions + 63) / 64));
  check_alignment(words, 4, "hash_bitmap_add_: words");
  MS_CHECK(nnz >= 0 && nnz <= call.positions, "hash_bitmap_add_: nnz is out of range",
           "0 to " << call.positions, nnz);
  check_dtype_code(value_dtype, "hash_bitmap_add_: value_dtype");
  const int64_t value_bytes = dtype_bytes(static_cast<int>(value_dtype));
  check_vector(values, "hash_bitmap_add_: values", ScalarType::Byte, nnz * value_bytes);
  check_alignment(values, value_bytes, "hash_bitmap_add_: values");
  torch::stable::accelerator::DeviceGuard guard(acc.get_device_index());
  const Tensor status = new_words(acc, 2);
  const Tensor workspace = new_workspace(acc, bitmap_workspace_bytes(call.positions));
  call.words = static_cast<const uint32_t*>(words.const_data_ptr());
  call.nnz = nnz;
  call.numel = numel;
  call.seed = seed;
  call.values = static_cast<const uint8_t*>(values.const_data_ptr());
  call.value_dtype = static_cast<int>(value_dtype);
  call.acc = static_cast<float*>(acc.mutable_data_ptr());
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
