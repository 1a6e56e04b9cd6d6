// The number of blocks of a launch, its scratch memory, and the choice among a kernel's instances;
// shared by the launchers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace megatron_sparse {

inline int64_t multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

inline cudaLaunchConfig_t grid_for(int64_t blocks, int64_t most, int threads, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks < most ? blocks : most));
  config.blockDim = dim3(threads);
  config.stream = stream;
  return config;
}

// Enough blocks of `threads` for one thread an item, and no more than can be resident.
inline cudaLaunchConfig_t grid_of_items(int64_t items, int threads, cudaStream_t stream) {
  return grid_for((items + threads - 1) / threads, multiprocessors() * 8, threads, stream);
}

// Calls launch(c), where c.value is the one of the constants that `value` equals: what templates of
// kernels depend on. The last constant stands for all other values.
template <auto FIRST, auto... OTHERS, class T, class Launch>
void with_constant(T value, const Launch& launch) {
  if constexpr (sizeof...(OTHERS) > 0) {
    if (value != FIRST) return with_constant<OTHERS...>(value, launch);
  }
  launch(std::integral_constant<decltype(FIRST), FIRST>());
}

// The warps of a block, of which there are at most `most`, if items are to be spread evenly.
inline int warps_for(int64_t items, int most) {
  const int64_t each = (items + multiprocessors() - 1) / multiprocessors();
  return static_cast<int>(each < 1 ? 1 : each < most ? each : most);
}

// This thread's first item of a grid-stride loop, and the distance to its next.
__device__ __forceinline__ int64_t first_item() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ int64_t item_stride() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

// Cuts scratch memory into pieces at multiples of 256 bytes; from a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  T* take(int64_t count) {
    const uintptr_t at = base_ + static_cast<uintptr_t>(used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return reinterpret_cast<T*>(at);
  }

  int64_t used() const { return used_; }

 private:
  uintptr_t base_;
  int64_t used_ = 0;
};

}  // namespace megatron_sparse
