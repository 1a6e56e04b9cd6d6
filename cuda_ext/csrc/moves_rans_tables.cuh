// The rans coder of moves on CUDA, up to its frequency tables: the base exponent, the numbers of
// symbols, and frequencies that add up to kScale in each context.
//
// Bytes of device memory: two numbers read for each one that is counted. Counts are sums of
// integers, so the order in which blocks add them does not matter.
#pragma once

#include "moves_encode_work.cuh"

namespace megatron_sparse {

inline constexpr int kBaseThreads = 1024, kCountThreads = 256;
inline constexpr int kQuantiseThreads = 32 * kContexts;  // a warp for each context
inline constexpr int kCountCopies = 4;  // lanes with equal symbols disturb each other less
inline constexpr int kLaneSymbols = (kMaxSymbols + 31) / 32;

MS_INLINE int count_stride(int64_t numel) {
  return numel > kCountAll ? kCountStride : 1;
}

// What push_symbol needs of a symbol: shift << 28 | start << 14 | increment << 13 | frequency, and
// a reciprocal: floor((state + increment) reciprocal / 2^(32 + shift)) is the quotient. Rounded to
// the nearer side, a reciprocal of 32 bits is exact for all states.
__device__ __forceinline__ uint2 rans_entry(uint32_t start, uint32_t frequency) {
  uint32_t shift = 0, increment = 1, reciprocal = ~0u;  // of frequency 1
  if (frequency > 1) {
    shift = 31 - static_cast<uint32_t>(__clz(static_cast<int>(frequency - 1)));
    const uint64_t one = uint64_t{1} << (shift + 32), below = one / frequency;
    const uint32_t rest = static_cast<uint32_t>(one - below * frequency);
    const bool up = 2 * rest >= frequency;
    increment = rest != 0 && !up;
    reciprocal = static_cast<uint32_t>(below + (up ? 1 : 0));
  }
  return {shift << 28 | start << 14 | increment << 13 | frequency, reciprocal};
}

__device__ __forceinline__ uint32_t push_symbol(uint32_t state, uint2 entry) {
  const uint32_t increment = entry.x >> 13 & 1, start = entry.x >> 14 & (kScale - 1);
  const uint32_t quotient = __umulhi(state + increment, entry.y) >> (entry.x >> 28);
  return state + start + quotient * (kScale - (entry.x & 0x1fffu));
}

// One block: the exponent of context 0; few sampled numbers lie above context 15.
template <int D>
__global__ void __launch_bounds__(kBaseThreads)
    moves_base_kernel(MovesEncodeArguments call, MovesEncodeWork work) {
  __shared__ unsigned counts[256], highest;
  if (threadIdx.x < 256) counts[threadIdx.x] = highest = 0;
  __syncthreads();
  const MovesRaw<D>* old = static_cast<const MovesRaw<D>*>(call.old);
  const int64_t samples = min(call.numel, int64_t{kExponentSamples});
#pragma unroll
  for (int64_t i = threadIdx.x; i < kExponentSamples; i += kBaseThreads) {
    if (i >= samples) break;
    const unsigned exponent = exponent_of<D>(old[i * call.numel / samples]);
    atomicAdd(&counts[exponent], 1u);
    atomicMax(&highest, exponent);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int top = static_cast<int>(highest);
  for (int64_t above = 0; top > 0 && above + counts[top] <= samples / 256; --top) {
    above += counts[top];
  }
  work.tables->base = static_cast<uint32_t>(max(top - (kContexts - 1), 0));
}

// The symbol of a move, and how many raw bits follow it: the lowest ones of z >> 1.
__device__ __forceinline__ uint32_t symbol_of(uint32_t z, uint32_t& raw_bits) {
  raw_bits = z < kDirect ? 0 : 30 - static_cast<uint32_t>(__clz(static_cast<int>(z)));
  return z < kDirect ? z : 2 * raw_bits + 10 + (z & 1);
}

// Counts the symbols of each context in every `stride`th block of kCountBlock numbers.
template <int D>
__global__ void __launch_bounds__(kCountThreads, 8)
    moves_count_kernel(MovesEncodeArguments call, MovesEncodeWork work) {
  __shared__ unsigned counts[kCountCopies][kTableEntries];
  unsigned* const all = &counts[0][0];
  for (int k = threadIdx.x; k < kCountCopies * kTableEntries; k += kCountThreads) all[k] = 0;
  __syncthreads();
  const MovesRaw<D>* old = static_cast<const MovesRaw<D>*>(call.old);
  const MovesRaw<D>* now = static_cast<const MovesRaw<D>*>(call.now);
  const uint32_t base = work.tables->base;
  unsigned* const own = counts[threadIdx.x % kCountCopies];
  const int64_t apart = int64_t{kCountBlock} * count_stride(call.numel);
  for (int64_t begin = blockIdx.x * apart; begin < call.numel; begin += gridDim.x * apart) {
    constexpr int kItems = kCountBlock / kCountThreads;
    uint32_t was[kItems], is[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int64_t i = begin + j * kCountThreads + threadIdx.x;
      const uint32_t down = i < call.numel ? call.down[i / 32] : 0;
      was[j] = i < call.numel ? mirrored<D>(old[i], down, i % 32) : 0;
      is[j] = i < call.numel ? mirrored<D>(now[i], down, i % 32) : 0;
    }
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      if (begin + j * kCountThreads + threadIdx.x >= call.numel) break;
      uint32_t raw_bits;
      const uint32_t symbol = symbol_of(zigzag_of<D>(was[j], is[j]), raw_bits);
      atomicAdd(&own[context_of<D>(was[j], base) * kMaxSymbols + symbol], 1u);
    }
  }
  __syncthreads();
  for (int k = threadIdx.x; k < kTableEntries; k += kCountThreads) {
    unsigned long long sum = 0;
    for (int copy = 0; copy < kCountCopies; ++copy) sum += counts[copy][k];
    if (sum != 0) atomicAdd(&work.counts[k], sum);
  }
}

// The largest frequency's lane adds `difference` to it; of equal ones that of the lowest symbol.
__device__ __forceinline__ void change_largest(uint32_t (&frequency)[kLaneSymbols],
                                               int difference) {
  const int lane = threadIdx.x % 32;
  unsigned best = 0;
#pragma unroll
  for (int k = 0; k < kLaneSymbols; ++k) {
    best = max(best, frequency[k] << 8 | static_cast<unsigned>(255 - (32 * k + lane)));
  }
  best = __reduce_max_sync(kAllLanes, best);
#pragma unroll
  for (int k = 0; k < kLaneSymbols; ++k) {
    if (255 - (32 * k + lane) == static_cast<int>(best & 255)) frequency[k] += difference;
  }
}

// One block, a warp for each context: frequencies, the encoder's table, and the record's.
template <int D>
__global__ void __launch_bounds__(kQuantiseThreads)
    moves_quantise_kernel(MovesEncodeArguments call, MovesEncodeWork work) {
  __shared__ int stored[kContexts];
  const int lane = threadIdx.x % 32, context = threadIdx.x / 32;
  const unsigned missed = count_stride(call.numel) > 1 ? 1 : 0;
  unsigned long long count[kLaneSymbols], total = 0;
#pragma unroll
  for (int k = 0; k < kLaneSymbols; ++k) {
    const int symbol = 32 * k + lane;
    count[k] = 0;
    if (symbol < symbols_of(D)) count[k] = work.counts[context * kMaxSymbols + symbol] + missed;
    total += count[k];
  }
  total = warp_sum(total);
  uint32_t frequency[kLaneSymbols];
  unsigned sum = 0;
#pragma unroll
  for (int k = 0; k < kLaneSymbols; ++k) {
    frequency[k] = 0;
    if (count[k] != 0) {
      const unsigned long long rounded = ((count[k] << kScaleBits) + total / 2) / total;
      frequency[k] = rounded == 0 ? 1 : static_cast<uint32_t>(rounded);
    }
    sum += frequency[k];
  }
  sum = __reduce_add_sync(kAllLanes, sum);
  if (total != 0) {
    if (sum < kScale) change_largest(frequency, static_cast<int>(kScale - sum));
    for (; sum > kScale; --sum) change_largest(frequency, -1);
  }
  unsigned last = 0;
  uint32_t start = 0;
#pragma unroll
  for (int k = 0; k < kLaneSymbols; ++k) {
    const int symbol = 32 * k + lane;
    const uint32_t end = start + warp_inclusive_sum(frequency[k]);
    if (symbol < kMaxSymbols) {
      work.tables->entries[context * kMaxSymbols + symbol] =
          rans_entry(end - frequency[k], frequency[k]);
    }
    if (frequency[k] != 0) last = static_cast<unsigned>(symbol) + 1;
    start = __shfl_sync(kAllLanes, end, 31);
  }
  last = __reduce_max_sync(kAllLanes, last);
  if (lane == 0) stored[context] = static_cast<int>(last);
  __syncthreads();
  int64_t before = 0, bytes = kContexts;
  for (int c = 0; c < kContexts; ++c) {
    if (c < context) before += stored[c];
    bytes += 2 * stored[c];
  }
  const int64_t chunks = chunk_count(call.numel);
  uint8_t* table = call.out + kMovesSectionsAt + offset_table_bytes(chunks);
  uint16_t* frequencies = reinterpret_cast<uint16_t*>(table + kContexts) + before;
#pragma unroll
  for (int k = 0; k < kLaneSymbols; ++k) {
    const int symbol = 32 * k + lane;
    if (symbol < stored[context]) frequencies[symbol] = static_cast<uint16_t>(frequency[k]);
  }
  if (lane == 0) table[context] = static_cast<uint8_t>(stored[context]);
  if (threadIdx.x == 0) work.tables->table_bytes = static_cast<uint32_t>(bytes);
  if (threadIdx.x < pad16(bytes) - bytes) table[bytes + threadIdx.x] = 0;
}

}  // namespace megatron_sparse
