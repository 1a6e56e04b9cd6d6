// Shared by the CUDA bindings: checks of devices, the current stream, and reading a kernel's
// status.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <cstddef>
#include <vector>

#include "check.h"

namespace megatron_sparse {

inline void check_alignment(const Tensor& tensor, int64_t bytes, std::string_view name) {
  MS_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0,
           name << " is not aligned", "an address that " << bytes << " divides", "another");
}

inline void* current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

inline Tensor new_words(const Tensor& like, int64_t count) {
  return torch::stable::new_empty(like, {count}, ScalarType::Long);
}

inline Tensor new_workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}

inline int64_t* words_of(const Tensor& tensor) {
  return static_cast<int64_t*>(tensor.mutable_data_ptr());
}

inline const int64_t* entries_of(const Tensor& tensor) {
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

inline const int64_t* entries_or_null(const std::optional<Tensor>& table) {
  return table.has_value() ? entries_of(*table) : nullptr;
}

// Copies words to the host and waits for them, which waits for everything launched before.
inline std::vector<int64_t> read_words(const int64_t* words, int64_t count, void* stream) {
  std::vector<int64_t> read(count);
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  STD_CUDA_CHECK(cudaMemcpyAsync(read.data(), words, static_cast<size_t>(count) * sizeof *words,
                                 cudaMemcpyDeviceToHost, queue));
  STD_CUDA_CHECK(cudaStreamSynchronize(queue));
  return read;
}

}  // namespace megatron_sparse
