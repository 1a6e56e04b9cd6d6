// The CUDA kernel of prune_. Free of torch headers.
//
// A block takes tiles of kTile consecutive elements; a thread loads kVector neighbours at a time
// (one 16-byte or 8-byte access where the buffers are aligned). A tile that lies in one range,
// which nearly all do, uses one threshold and one atomic addition to that range's count.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "elementwise.h"
#include "lanes.h"
#include "raw_type.cuh"

namespace megatron_sparse {

constexpr int kThreads = 256;
constexpr int kVector = 4;
constexpr int kRounds = 4;
constexpr int kBlocks =
    5;  // resident on a multiprocessor: leaves 48 registers, enough not to spill
constexpr int kTile = kThreads * kVector * kRounds;

struct PruneLaunch {
  void* grad;
  void* residual;
  const int64_t* range_offsets;  // on the device, [range_count + 1]
  const float* thresholds;       // on the device, [range_count]
  unsigned long long* nnz;       // on the device, [range_count], zeroed
  int64_t range_count;
  int64_t numel;
  float leak;
  HashSeed value_seed;
  HashSeed residual_seed;
};

template <class T>
struct alignas(kVector * sizeof(T)) Pack {
  T value[kVector];
};

// The last range that begins at or before `at`: never empty, and inside the table whatever it
// holds.
__device__ __forceinline__ int64_t find_range(const int64_t* offsets, int64_t count, int64_t at) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (offsets[middle] <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Infinity is never dropped; a NaN threshold keeps everything.
__device__ __forceinline__ float clamp_threshold(float threshold) {
  return threshold > 3.402823466e+38f ? 3.402823466e+38f : threshold;
}

template <int GRAD, int RESIDUAL, Grid G, bool STOCHASTIC>
__global__ void __launch_bounds__(kThreads, kBlocks)
    prune_kernel(PruneLaunch launch, bool aligned) {
  using L = ScalarLanes;
  using RawGrad = typename RawType<GRAD>::type;
  using RawResidual = typename RawType<RESIDUAL>::type;
  RawGrad* grad = static_cast<RawGrad*>(launch.grad);
  RawResidual* residual = static_cast<RawResidual*>(launch.residual);
  __shared__ int64_t tile_range;
  __shared__ unsigned int tile_nnz;

  const int64_t tile_count = (launch.numel + kTile - 1) / kTile;
  for (int64_t tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
    const int64_t tile_begin = tile * kTile;
    const int64_t tile_end = min(tile_begin + kTile, launch.numel);
    __syncthreads();  // the tile before may still be read
    if (threadIdx.x == 0) {
      tile_range = find_range(launch.range_offsets, launch.range_count, tile_begin);
      tile_nnz = 0;
    }
    __syncthreads();
    const int64_t first_range = tile_range;
    const bool uniform = launch.range_offsets[first_range + 1] >= tile_end;
    const float tile_threshold = clamp_threshold(launch.thresholds[first_range]);
    // A tile's size divides 2^32, so the upper half of the index is constant in it.
    const uint32_t high = static_cast<uint32_t>(tile_begin >> 32);
    const HashSeed value_seed = hash_seed_at(launch.value_seed, high);
    const HashSeed residual_seed = hash_seed_at(launch.residual_seed, high);
    unsigned int count = 0;

#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int64_t at = tile_begin + (round * kThreads + threadIdx.x) * kVector;
      if (at >= tile_end) continue;
      const bool whole = aligned && at + kVector <= tile_end;
      Pack<RawGrad> g;
      Pack<RawResidual> e;
      if (whole) {
        g = *reinterpret_cast<const Pack<RawGrad>*>(grad + at);
        e = *reinterpret_cast<const Pack<RawResidual>*>(residual + at);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const bool inside = at + i < tile_end;
          g.value[i] = inside ? grad[at + i] : 0;
          e.value[i] = inside ? residual[at + i] : 0;
        }
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        float threshold = tile_threshold;
        int64_t range = first_range;
        if (!uniform) {
          range = find_range(launch.range_offsets, launch.range_count, at + i);
          threshold = clamp_threshold(launch.thresholds[range]);
        }
        const Pruned<L> done = prune_element<L, GRAD, RESIDUAL, G, STOCHASTIC>(
            g.value[i], e.value[i], threshold, launch.leak, value_seed, residual_seed,
            static_cast<uint32_t>(at + i));
        g.value[i] = static_cast<RawGrad>(done.grad);
        e.value[i] = static_cast<RawResidual>(done.residual);
        // Elements past the end were loaded as zeros and are pruned to zeros: nothing to count.
        if (uniform) {
          count += done.nonzero;
        } else if (done.nonzero) {
          atomicAdd(&launch.nnz[range], 1ull);
        }
      }
      if (whole) {
        *reinterpret_cast<Pack<RawGrad>*>(grad + at) = g;
        *reinterpret_cast<Pack<RawResidual>*>(residual + at) = e;
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (at + i < tile_end) {
            grad[at + i] = g.value[i];
            residual[at + i] = e.value[i];
          }
        }
      }
    }
    if (uniform) {
      for (int offset = 16; offset > 0; offset /= 2) {
        count += __shfl_down_sync(0xffffffffu, count, offset);
      }
      if ((threadIdx.x & 31) == 0 && count != 0) atomicAdd(&tile_nnz, count);
      __syncthreads();
      if (threadIdx.x == 0 && tile_nnz != 0) {
        atomicAdd(&launch.nnz[first_range], static_cast<unsigned long long>(tile_nnz));
      }
    }
  }
}

}  // namespace megatron_sparse
