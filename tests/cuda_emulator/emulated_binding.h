// Included before the bindings: torch's own headers, and then the emulated GPU in CUDA's place.
//
// A tensor of the emulated GPU is a CPU tensor here. What the bindings allocate lies between
// guards, which `emulator_end_call` checks.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "cuda_runtime.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// traffic.cpp's, in a library that counts bytes.
extern "C" __attribute__((weak)) void emulator_watch(const void* begin, size_t bytes);
EXPORT void emulator_poison(const void* from, size_t bytes, int on);

namespace cuda_emulator {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGuard = 256, kAligned = 256;

// Memory that a binding has allocated, with guards around its content.
struct Allocation {
  Tensor memory;
  uint8_t *begin, *content, *content_end, *end;
};
inline thread_local std::vector<Allocation> allocations;  // of the call that runs

inline int64_t bytes_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Long:
      return 8;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Byte:
      return 1;
    default:
      throw Error("the emulator does not know the size of this dtype");
  }
}

inline Tensor guarded_empty(const Tensor& like, const std::vector<int64_t>& size,
                            std::optional<ScalarType> wanted = std::nullopt) {
  const ScalarType dtype = wanted.value_or(like.scalar_type());
  const int64_t width = bytes_of(dtype);
  int64_t count = 1;
  for (const int64_t length : size) count *= length;
  const Tensor memory =
      torch::stable::new_empty(like, {count + 2 * kGuard + kAligned / width}, dtype);
  uint8_t* begin = static_cast<uint8_t*>(memory.mutable_data_ptr());
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin) % kAligned);
  const int64_t first = kGuard + (kAligned - past) % kAligned / width;
  uint8_t* content = begin + first * width;
  const Allocation made = {memory, begin, content, content + count * width,
                           begin + memory.numel() * width};
  std::fill(made.begin, made.end, 0xA5);
  std::fill(made.content, made.content_end, 0xCD);
  emulator_poison(made.begin, made.content - made.begin, 1);
  emulator_poison(made.content_end, made.end - made.content_end, 1);
  if (counted && emulator_watch != nullptr) emulator_watch(content, count * width);
  allocations.push_back(made);
  const Tensor flat = torch::stable::narrow(const_cast<Tensor&>(memory), 0, first, count);
  return size.size() == 1 ? flat : torch::stable::view(flat, size);
}

}  // namespace cuda_emulator

namespace torch::stable {
using cuda_emulator::guarded_empty;
namespace accelerator {
struct NoGuard {
  explicit NoGuard(DeviceIndex) {}
  ~NoGuard() {}
};
}  // namespace accelerator
}  // namespace torch::stable

#define is_cuda is_cpu
#define new_empty guarded_empty
#define DeviceGuard NoGuard
#define aoti_torch_get_current_cuda_stream(device, stream) \
  (static_cast<void>(device), *(stream) = nullptr, AOTI_TORCH_SUCCESS)
#undef STD_CUDA_CHECK
#define STD_CUDA_CHECK(call) static_cast<void>(call)
#undef STD_CUDA_KERNEL_LAUNCH_CHECK
#define STD_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(0)
// Ops of a name space of this library's own, EMULATED: the CPU's have the other one.
#undef STABLE_TORCH_LIBRARY_FRAGMENT
#define STABLE_TORCH_LIBRARY_FRAGMENT(name_space, m) \
  _STABLE_TORCH_LIBRARY_FRAGMENT(EMULATED, m, C10_UID)
#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(name_space, key, m) \
  _STABLE_TORCH_LIBRARY_IMPL(EMULATED, CPU, m, C10_UID)
