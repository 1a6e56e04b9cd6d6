// sample_threshold on CUDA: the same bits as threshold.cpp, in one launch.
//
// A block takes a range: it collects the magnitudes of its samples, which lie apart in memory, and
// finds the one of the wanted rank by four passes over their bytes, the highest first, each with a
// histogram in shared memory; the last one counts the ties. 4 to 8 bytes a sample are read from the
// bucket, and 16 from scratch memory that the caches hold.
#include "launch_grid.cuh"
#include "load_value.h"
#include "sample_position.h"
#include "scan.cuh"
#include "threshold_launch.h"

namespace megatron_sparse {
namespace {

constexpr int kThresholdThreads = 512;
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

__global__ void __launch_bounds__(kThresholdThreads)
    sample_threshold_kernel(ThresholdArguments call, int64_t stride) {
  __shared__ unsigned counts[kDigits];
  __shared__ Digit digit;
  uint32_t* const scratch = static_cast<uint32_t*>(call.workspace);
  for (int64_t r = blockIdx.x; r < call.range_count; r += gridDim.x) {
    const int64_t begin = call.range_offsets[r], n = call.range_offsets[r + 1] - begin;
    const float density = call.densities[r];
    if (n <= 0 || density >= 1) {
      if (threadIdx.x == 0) {
        call.thresholds[r] = -1;
        call.tie_chances[r] = 0;
        call.ties[r] = 0;
      }
      continue;
    }
    const int64_t s = n < call.samples ? n : call.samples;
    uint32_t* const magnitudes = scratch + (stride > 0 ? r * stride : begin);
    const HashSeed seed = hash_seed(static_cast<uint64_t>(call.keys[r]), kDrawSample);
    for (int64_t j = threadIdx.x; j < s; j += kThresholdThreads) {
      const uint32_t random = hash_at(seed, static_cast<uint64_t>(j));
      const int64_t at = begin + sample_position(n, s, j, random);
      float x = load_as_float(call.grad, call.grad_dtype, at);
      if (call.residual != nullptr) x += load_as_float(call.residual, call.residual_dtype, at);
      magnitudes[j] = magnitude_bits(x);
    }
    uint32_t threshold = 0;
    const double wanted = wanted_samples(density, s);
    const int64_t first_rank = threshold_rank(wanted, s);
    int64_t rank = first_rank;
    for (int shift = 24; shift >= 0; shift -= 8) {
      for (int i = threadIdx.x; i < kDigits; i += kThresholdThreads) counts[i] = 0;
      __syncthreads();
      for (int64_t j = threadIdx.x; j < s; j += kThresholdThreads) {
        // Each thread reads only its own writes.
        const uint32_t magnitude = magnitudes[j];
        const bool fits = shift == 24 || magnitude >> (shift + 8) == threshold >> (shift + 8);
        if (fits) atomicAdd(&counts[(magnitude >> shift) % kDigits], 1u);
      }
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
      call.tie_chances[r] = tie_chance(threshold, wanted, first_rank - rank, equal);
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

void launch_sample_threshold(const ThresholdArguments& call, void* stream) {
  if (call.range_count == 0) return;
  const int64_t stride = scratch_stride(call.range_count, call.numel, call.samples);
  const cudaLaunchConfig_t all = grid_for(call.range_count, multiprocessors() * 4,
                                          kThresholdThreads, static_cast<cudaStream_t>(stream));
  cudaLaunchKernelEx(&all, sample_threshold_kernel, call, stride);
}

}  // namespace megatron_sparse
