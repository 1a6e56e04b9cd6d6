// Capacity on CUDA, between compaction and placing: takes back the elements that a segment has
// staged beyond its limit. prune_pass.h has the rule; the result has the same bits as the CPU's.
//
// A warp takes one tile after the other. Bytes: two prefixes a tile and, if a segment has too many
// elements, 1/8 an element of bits read and written, and value and residual of the removed ones.
#pragma once

#include "tile_words.cuh"

namespace megatron_sparse {

constexpr int kLimitThreads = 256;
constexpr int kLimitWarps = kLimitThreads / 32;

struct LimitArguments {
  const int64_t* segment_offsets;  // [segment_count + 1]
  const int64_t* most_nnz;         // [segment_count]
  int64_t segment_count;
  const int64_t* status;
  void* residual;
  float leak;
  bool stochastic;
  HashSeed residual_seed;
};

template <int D>
__device__ __forceinline__ typename RawType<D>::type raw_nan() {
  return static_cast<typename RawType<D>::type>(store_bits<ScalarLanes, D>(kNan));
}

// Gives an element's staged value back to its residual; false if it is infinite or NaN.
template <int VALUE, int RESIDUAL>
__device__ __forceinline__ bool give_back(const LimitArguments& call, int64_t at, uint32_t value) {
  using RawResidual = typename RawType<RESIDUAL>::type;
  constexpr Grid grid = static_cast<Grid>(VALUE);
  RawResidual* rest = static_cast<RawResidual*>(call.residual) + at;
  // Values round to themselves, and nothing ties.
  const PruneSeeds seeds = {call.residual_seed, call.residual_seed, call.residual_seed};
  const uint32_t high = static_cast<uint32_t>(at >> 32);
  const uint32_t low = static_cast<uint32_t>(at);
  const Pruned<ScalarLanes> done =
      call.stochastic ? prune_element<ScalarLanes, VALUE, RESIDUAL, grid, true>(
                            value, *rest, drop_finite(), call.leak, seeds, high, low)
                      : prune_element<ScalarLanes, VALUE, RESIDUAL, grid, false>(
                            value, *rest, drop_finite(), call.leak, seeds, high, low);
  *rest = static_cast<RawResidual>(done.residual);
  return !done.nonzero;
}

template <int VALUE, int RESIDUAL>
__global__ void __launch_bounds__(kLimitThreads, 4)
    limit_kernel(Workspace work, LimitArguments call) {
  using Raw = typename RawType<VALUE>::type;
  __shared__ TileWords tiles[kLimitWarps];
  if (call.status[0] != kEncodeOk) return;
  TileWords& bits = tiles[threadIdx.x / 32];
  const int64_t tile_count = work.tile_begin[call.segment_count];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kLimitWarps;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kLimitWarps + threadIdx.x / 32;
       tile < tile_count; tile += warps) {
    const int64_t segment = find_range(work.tile_begin, call.segment_count, tile);
    const int64_t most = call.most_nnz[segment], first_tile = work.tile_begin[segment];
    const int64_t first_value = prefix_after(work.nnz_states, first_tile - 1);
    if (prefix_after(work.nnz_states, tile) - first_value <= most) continue;
    const int64_t staged = prefix_after(work.nnz_states, tile - 1);
    const int64_t stay = most - (staged - first_value);  // below 0 where nothing stays
    Raw* values = static_cast<Raw*>(work.values);
    uint32_t* words = work.words + tile * kTileWords;
    load_tile_words(bits, words);
    const int64_t begin = call.segment_offsets[segment] + (tile - first_tile) * kPiciTile;
    for (int w = threadIdx.x % 32; w < kTileWords; w += 32) {
      uint32_t left = bits.word[w];
      int64_t k = bits.before[w];
      for (; left != 0 && k < stay; left &= left - 1) ++k;
      if (left == 0) continue;
      words[w] = bits.word[w] ^ left;
      for (; left != 0; left &= left - 1, ++k) {
        const int64_t at = begin + 32 * w + __ffs(static_cast<int>(left)) - 1;
        if (give_back<VALUE, RESIDUAL>(call, at, values[staged + k])) continue;
        // All threads that write here write the same value.
        if (most > 0) {
          values[first_value + most - 1] = raw_nan<VALUE>();
        } else {
          static_cast<typename RawType<RESIDUAL>::type*>(call.residual)[at] = raw_nan<RESIDUAL>();
        }
      }
    }
  }
}

}  // namespace megatron_sparse
