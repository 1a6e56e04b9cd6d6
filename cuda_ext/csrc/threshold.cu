// sample_threshold on CUDA: the same bits as threshold.cpp, in two launches.
//
// The first one gathers the magnitudes of all samples, which lie apart in memory: the whole grid
// takes them, however few the ranges are. In the second one a block takes a range and finds the
// magnitude of the wanted rank by four passes over their bytes, the highest first, each with a
// histogram in shared memory; the last one counts the ties. A sample is a sector of 32 bytes of
// each buffer and 4 bytes of scratch memory, which the second launch finds in the caches.
#include <algorithm>

#include "launch_grid.cuh"
#include "load_value.h"
#include "sample_position.h"
#include "scan.cuh"
#include "threshold_launch.h"

namespace megatron_sparse {
namespace {

constexpr int kGatherThreads = 256;
constexpr int kSelectThreads = 512;
constexpr int kSelectItems = 8;   // magnitudes that a thread requests together
constexpr int kMostRows = 65535;  // of a grid
constexpr int kDigits = 256;
constexpr int kDigitsOfLane = kDigits / 32;

// Scratch entries of a range. All ranges together have no more samples than the bucket has
// elements.
int64_t scratch_stride(int64_t range_count, int64_t numel, int64_t samples) {
  const int64_t most = samples < numel ? samples : numel;
  return most * range_count <= numel ? most : 0;
}

struct Digit {
  uint32_t value;
  int64_t rank;  // of the wanted magnitude among those that have it
};

// Called by one warp: the digit, from the largest down, in which a magnitude of a rank lies.
__device__ __forceinline__ void find_digit(const unsigned* counts, int64_t rank, Digit* found) {
  const int lane = threadIdx.x % 32;
  const int first = kDigits - 1 - lane * kDigitsOfLane;
  int64_t own = 0;
  for (int i = 0; i < kDigitsOfLane; ++i) own += counts[first - i];
  int64_t before = warp_inclusive_sum(own) - own;
  // Exactly one lane's digits hold the rank.
  if (rank < before || rank >= before + own) return;
  int i = 0;
  while (rank >= before + counts[first - i]) before += counts[first - i++];
  *found = {static_cast<uint32_t>(first - i), rank - before};
}

struct Range {
  int64_t begin;
  int64_t numel;
  int64_t samples;  // 0 if the range is sent whole
  uint32_t* magnitudes;
};

__device__ __forceinline__ Range range_of(const ThresholdArguments& call, int64_t stride,
                                          int64_t r) {
  const int64_t begin = call.range_offsets[r], n = call.range_offsets[r + 1] - begin;
  const bool is_sampled = n > 0 && call.densities[r] < 1;
  uint32_t* const scratch = static_cast<uint32_t*>(call.workspace);
  return {begin, n, !is_sampled ? 0 : min(n, call.samples),
          scratch + (stride > 0 ? r * stride : begin)};
}

// Rows of blocks take ranges, and the blocks of a row its samples.
__global__ void __launch_bounds__(kGatherThreads)
    gather_samples_kernel(ThresholdArguments call, int64_t stride) {
  for (int64_t r = blockIdx.y; r < call.range_count; r += gridDim.y) {
    const Range range = range_of(call, stride, r);
    const HashSeed seed = hash_seed(static_cast<uint64_t>(call.keys[r]), kDrawSample);
    for (int64_t j = first_item(); j < range.samples; j += item_stride()) {
      const uint32_t random = hash_at(seed, static_cast<uint64_t>(j));
      const int64_t at = range.begin + sample_position(range.numel, range.samples, j, random);
      float x = load_as_float(call.grad, call.grad_dtype, at);
      if (call.residual != nullptr) x += load_as_float(call.residual, call.residual_dtype, at);
      range.magnitudes[j] = magnitude_bits(x);
    }
  }
}

// Called by a block: counts the next 8 bits of the magnitudes whose bits above are `threshold`'s.
__device__ __forceinline__ void count_digits(const Range& range, uint32_t threshold, int shift,
                                             unsigned* counts) {
  constexpr int kStep = kSelectThreads * kSelectItems;
  for (int64_t first = threadIdx.x; first < range.samples; first += kStep) {
    uint32_t loaded[kSelectItems];
#pragma unroll
    for (int i = 0; i < kSelectItems; ++i) {
      const int64_t j = first + i * kSelectThreads;
      loaded[i] = j < range.samples ? range.magnitudes[j] : 0;
    }
#pragma unroll
    for (int i = 0; i < kSelectItems; ++i) {
      const bool exists = first + i * kSelectThreads < range.samples;
      const bool fits = shift == 24 || loaded[i] >> (shift + 8) == threshold >> (shift + 8);
      if (exists && fits) atomicAdd(&counts[(loaded[i] >> shift) % kDigits], 1u);
    }
  }
}

__global__ void __launch_bounds__(kSelectThreads)
    select_threshold_kernel(ThresholdArguments call, int64_t stride) {
  __shared__ unsigned counts[kDigits];
  __shared__ Digit digit;
  for (int64_t r = blockIdx.x; r < call.range_count; r += gridDim.x) {
    const Range range = range_of(call, stride, r);
    if (range.samples == 0) {
      if (threadIdx.x == 0) {
        call.thresholds[r] = -1;
        call.tie_chances[r] = 0;
        call.ties[r] = 0;
      }
      continue;
    }
    uint32_t threshold = 0;
    const double wanted = wanted_samples(call.densities[r], range.samples);
    const int64_t first_rank = threshold_rank(wanted, range.samples);
    int64_t rank = first_rank;
    for (int shift = 24; shift >= 0; shift -= 8) {
      for (int i = threadIdx.x; i < kDigits; i += kSelectThreads) counts[i] = 0;
      __syncthreads();
      count_digits(range, threshold, shift, counts);
      __syncthreads();
      if (threadIdx.x < 32) find_digit(counts, rank, &digit);
      __syncthreads();
      threshold |= digit.value << shift;
      rank = digit.rank;
    }
    if (threadIdx.x == 0) {
      // The last pass counted the samples that equal the threshold; `rank` is one of theirs.
      const int64_t equal = counts[threshold % kDigits];
      call.thresholds[r] = ScalarLanes::as_float(threshold);
      call.tie_chances[r] = settle_single(tie_chance(threshold, wanted, first_rank - rank, equal),
                                          equal, call.keys[r]);
      call.ties[r] = equal;
    }
    // The next range's writes to shared memory come after the reads of all threads.
    __syncthreads();
  }
}

}  // namespace

int64_t threshold_workspace_bytes(int64_t range_count, int64_t numel, int64_t samples) {
  const int64_t stride = scratch_stride(range_count, numel, samples);
  return static_cast<int64_t>(sizeof(uint32_t)) * (stride > 0 ? stride * range_count : numel);
}

void launch_sample_threshold(const ThresholdArguments& call, void* stream_pointer) {
  if (call.range_count == 0) return;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const int64_t stride = scratch_stride(call.range_count, call.numel, call.samples);
  const int64_t resident = multiprocessors() * 8;
  const int64_t rows = std::min<int64_t>(call.range_count, kMostRows);
  const int64_t most = std::min(call.samples, call.numel);  // of a range
  cudaLaunchConfig_t gather =
      grid_for(std::max<int64_t>((most + kGatherThreads - 1) / kGatherThreads, 1),
               std::max<int64_t>(resident / rows, 1), kGatherThreads, stream);
  gather.gridDim.y = static_cast<unsigned>(rows);
  cudaLaunchKernelEx(&gather, gather_samples_kernel, call, stride);
  const cudaLaunchConfig_t select =
      grid_for(call.range_count, multiprocessors() * 2, kSelectThreads, stream);
  cudaLaunchKernelEx(&select, select_threshold_kernel, call, stride);
}

}  // namespace megatron_sparse
