// Scans: of a warp, of a block, and across blocks by decoupled look-back.
//
// Look-back (Merrill and Garland, 2016): tiles are numbered by tickets, so that a tile's
// predecessors are finished or in work by a running block, so waiting for them ends on any GPU. A
// tile publishes its own sum, looks back until it meets a predecessor whose inclusive prefix is
// known, and publishes its own prefix. Flag and number share one 64-bit word: no fence.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megatron_sparse {

constexpr unsigned kAllLanes = 0xffffffffu;

using ScanState = unsigned long long;
constexpr ScanState kSumKnown = 1ull << 62;
constexpr ScanState kPrefixKnown = 2ull << 62;
constexpr ScanState kNumberMask = kSumKnown - 1;

// The sum over this lane and the lanes before it.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// The sum over the threads before this one; `total` receives that of the whole block, which has
// THREADS threads. `shared` has room for THREADS / 32 numbers and may be used again afterwards.
template <int THREADS>
__device__ __forceinline__ int64_t block_exclusive_sum(int64_t value, int64_t* shared,
                                                       int64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t inclusive = warp_inclusive_sum(value);
  if (lane == 31) shared[warp] = inclusive;
  __syncthreads();
  int64_t before = 0;
  total = 0;
  for (int w = 0; w < THREADS / 32; ++w) {
    if (w < warp) before += shared[w];
    total += shared[w];
  }
  __syncthreads();
  return before + inclusive - value;
}

__device__ __forceinline__ ScanState read_state(const ScanState* state) {
  return *static_cast<const volatile ScanState*>(state);
}

// Called by a whole warp: publishes the tile's `sum` and returns the sum of all tiles before it.
// `states` are zero before the first tile.
__device__ __forceinline__ int64_t look_back(ScanState* states, int64_t tile, int64_t sum) {
  const int lane = threadIdx.x % 32;
  const ScanState own = static_cast<ScanState>(sum);
  if (tile == 0) {
    if (lane == 0) atomicExch(&states[0], kPrefixKnown | own);
    return 0;
  }
  if (lane == 0) atomicExch(&states[tile], kSumKnown | own);
  ScanState before = 0;
  for (int64_t last = tile - 1;; last -= 32) {
    // Lane 0 sees the nearest predecessor. What lies before the first tile is an empty prefix.
    const int64_t looked_at = last - lane;
    ScanState state = kPrefixKnown;
    unsigned prefix_lanes, needed;
    for (;;) {
      if (looked_at >= 0) state = read_state(&states[looked_at]);
      prefix_lanes = __ballot_sync(kAllLanes, state >= kPrefixKnown);
      // All lanes up to the first one with a prefix; all 32 if there is none.
      needed = prefix_lanes ^ (prefix_lanes - 1);
      if (__all_sync(kAllLanes, state != 0 || !(needed >> lane & 1))) break;
      __nanosleep(32);
    }
    before += warp_sum(needed >> lane & 1 ? state & kNumberMask : 0ull);
    if (prefix_lanes != 0) break;
  }
  if (lane == 0) atomicExch(&states[tile], kPrefixKnown | (before + own));
  return static_cast<int64_t>(before);
}

// The sum up to and including `tile`, in a later launch; -1 is before the first tile.
__device__ __forceinline__ int64_t prefix_after(const ScanState* states, int64_t tile) {
  return tile < 0 ? 0 : static_cast<int64_t>(states[tile] & kNumberMask);
}

}  // namespace megatron_sparse
