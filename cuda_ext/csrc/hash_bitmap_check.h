// The arguments of the hash bitmap's ops on either device, and the checks that read no content.
#pragma once

#include "hash_check.h"

namespace megatron_sparse {

// Without nnz and workspace.
inline BitmapPackArguments check_bitmap_pack(const Tensor& values, const Tensor& words,
                                             const Tensor& packed) {
  check_flat(values, "hash_bitmap_pack: values");
  const int64_t positions = values.numel();
  const int dtype = dtype_code(values, "hash_bitmap_pack: values");
  check_vector(words, "hash_bitmap_pack: words", ScalarType::Byte, 8 * ((positions + 63) / 64),
               values);
  check_vector(packed, "hash_bitmap_pack: packed", ScalarType::Byte, positions * dtype_bytes(dtype),
               values);
  return {values.const_data_ptr(),
          dtype,
          positions,
          static_cast<uint32_t*>(words.mutable_data_ptr()),
          packed.mutable_data_ptr(),
          nullptr,
          nullptr};
}

// Without status and workspace.
inline BitmapArguments check_bitmap_add(const Tensor& acc, const Tensor& words,
                                        const Tensor& values, int64_t value_dtype, int64_t nnz,
                                        int64_t partition, int64_t partitions, int64_t seed,
                                        bool permuted) {
  check_vector(acc, "hash_bitmap_add_: acc", ScalarType::Float, -1);
  BitmapArguments call = {};
  call.numel = acc.numel();
  check_hash(call.numel, partitions, "hash_bitmap_add_");
  MS_CHECK(partition >= 0 && partition < partitions, "hash_bitmap_add_: partition is out of range",
           "0 to " << partitions - 1, partition);
  call.first = partition_begin(call.numel, partitions, partition);
  call.positions = partition_begin(call.numel, partitions, partition + 1) - call.first;
  call.permuted = permuted;
  check_vector(words, "hash_bitmap_add_: words", ScalarType::Byte, 8 * ((call.positions + 63) / 64),
               acc);
  MS_CHECK(nnz >= 0 && nnz <= call.positions, "hash_bitmap_add_: nnz is out of range",
           "0 to " << call.positions, nnz);
  check_dtype_code(value_dtype, "hash_bitmap_add_: value_dtype");
  call.value_dtype = static_cast<int>(value_dtype);
  check_vector(values, "hash_bitmap_add_: values", ScalarType::Byte,
               nnz * dtype_bytes(call.value_dtype), acc);
  call.words = static_cast<const uint32_t*>(words.const_data_ptr());
  call.nnz = nnz;
  call.seed = seed;
  call.values = static_cast<const uint8_t*>(values.const_data_ptr());
  call.acc = static_cast<float*>(acc.mutable_data_ptr());
  return call;
}

}  // namespace megatron_sparse
