// Row-sparse gradients on CUDA; row_sparse.cpp is the same for the CPU.
//
// Sets of row indices are sorted, so everything is a search: a local index in the union (the
// match), a row of the union among the local ones (the compacted buffer, every byte of it written
// once), and an entry's place in the merged order of all sets, which is the sum of its places in
// each of them. A search takes log2 reads; in a merge a thread would have to wait for its
// neighbours. No atomics decide a place or the order of a sum, so results do not depend on the
// schedule.
//
// Bytes: the match 8 read and 8 written a local index; the buffer one row read and written; the sum
// of repeated rows reads each row once. The union: 8 n log2 an entry, from caches, and 3 x 8.
#include "elementwise.h"
#include "lanes.h"
#include "launch_grid.cuh"
#include "raw_type.cuh"
#include "row_sparse_launch.h"
#include "tile_scan.cuh"

namespace megatron_sparse {
namespace {

constexpr int kRowThreads = 256;

// The first place in [0, count) whose index is not below `wanted`, or with PAST above it.
template <bool PAST>
__device__ __forceinline__ int64_t search(const int64_t* sorted, int64_t count, int64_t wanted) {
  int64_t low = 0;
  for (int64_t high = count; low < high;) {
    const int64_t middle = low + (high - low) / 2;
    if (PAST ? sorted[middle] <= wanted : sorted[middle] < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Keeps the lowest place, whichever thread finds one first: "nothing", as an unsigned number, is
// the largest.
__device__ __forceinline__ void report_place(int64_t* status, int64_t place) {
  atomicMin(reinterpret_cast<unsigned long long*>(status), static_cast<unsigned long long>(place));
}

__device__ __forceinline__ bool ascends(const int64_t* indices, int64_t at) {
  return indices[at] > (at == 0 ? -1 : indices[at - 1]);
}

__global__ void __launch_bounds__(kRowThreads)
    row_ascend_kernel(const int64_t* indices, int64_t count, int64_t* status) {
  for (int64_t i = first_item(); i < count; i += item_stride()) {
    if (!ascends(indices, i)) report_place(status, i);
  }
}

__global__ void __launch_bounds__(kRowThreads) row_match_kernel(RowMatchArguments call) {
  for (int64_t i = first_item(); i < call.local_count; i += item_stride()) {
    const int64_t wanted = call.local[i];
    const int64_t at = search<false>(call.all, call.all_count, wanted);
    call.positions[i] = at;
    if (at == call.all_count || call.all[at] != wanted) report_place(&call.status[2], i);
  }
}

// A warp takes a row of the union. Vector: the type that moves at a time.
template <class Vector>
__global__ void __launch_bounds__(kRowThreads) row_expand_kernel(RowExpandArguments call) {
  const int lane = threadIdx.x % 32;
  const int64_t vectors = call.row_bytes / static_cast<int64_t>(sizeof(Vector));
  for (int64_t row = first_item() / 32; row < call.all_count; row += item_stride() / 32) {
    const int64_t wanted = call.all[row];
    const int64_t at = search<false>(call.local, call.local_count, wanted);
    const bool found = at < call.local_count && call.local[at] == wanted;
    const Vector* from = static_cast<const Vector*>(call.rows) + at * vectors;
    Vector* to = static_cast<Vector*>(call.out) + row * vectors;
    for (int64_t v = lane; v < vectors; v += 32) to[v] = found ? from[v] : Vector{};
    if (found && lane == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&call.status[2]), 1ull);
    }
  }
}

__global__ void __launch_bounds__(kRowThreads) row_sum_check_kernel(RowSumArguments call) {
  for (int64_t i = first_item(); i < call.order_count; i += item_stride()) {
    if (call.order[i] < 0 || call.order[i] >= call.row_count) report_place(&call.status[0], i);
  }
  for (int64_t s = first_item(); s <= call.segments; s += item_stride()) {
    const int64_t here = call.offsets[s];
    const bool fits = s == 0 ? here == 0 : here > call.offsets[s - 1];
    if (!fits || (s == call.segments && here != call.order_count)) {
      report_place(&call.status[1], s);
    }
  }
}

// A thread sums one column of one group, in fp32 and in the order given.
template <int VALUE>
__global__ void __launch_bounds__(kRowThreads) row_sum_kernel(RowSumArguments call) {
  using L = ScalarLanes;
  using Raw = typename RawType<VALUE>::type;
  if (call.status[0] != kNothingFound || call.status[1] != kNothingFound) return;
  const Raw* rows = static_cast<const Raw*>(call.rows);
  Raw* out = static_cast<Raw*>(call.out);
  for (int64_t i = first_item(); i < call.segments * call.width; i += item_stride()) {
    const int64_t segment = i / call.width, column = i - segment * call.width;
    const int64_t begin = call.offsets[segment], end = call.offsets[segment + 1];
    const Raw first = rows[call.order[begin] * call.width + column];
    if (end - begin == 1) {  // bit for bit, NaN payloads and -0.0 included
      out[i] = first;
      continue;
    }
    float sum = widen<L, VALUE>(first);
    for (int64_t j = begin + 1; j < end; ++j) {
      sum += widen<L, VALUE>(rows[call.order[j] * call.width + column]);
    }
    out[i] = static_cast<Raw>(convert_bits<L, VALUE>(L::as_bits(sum)));
  }
}

struct UnionWorkspace {
  int64_t* sorted;    // [count]: all entries, ascending
  ScanState* states;  // zeroed, one for each tile
  unsigned* ticket;   // zeroed
  int64_t zeroed_bytes;
  int64_t bytes;
};

UnionWorkspace lay_out_union(void* base, int64_t count) {
  Carver memory(base);
  UnionWorkspace w = {};
  w.states = memory.take<ScanState>(scan_tiles(count));
  w.ticket = memory.take<unsigned>(1);
  w.zeroed_bytes = memory.used();
  w.sorted = memory.take<int64_t>(count);
  w.bytes = memory.used();
  return w;
}

// The set that an entry is of; sets may be empty.
__device__ __forceinline__ int64_t set_of(const RowUnionArguments& call, int64_t entry) {
  return search<true>(call.offsets, call.sets + 1, entry) - 1;
}

__global__ void __launch_bounds__(kRowThreads) row_union_check_kernel(RowUnionArguments call) {
  for (int64_t i = first_item(); i < call.count; i += item_stride()) {
    const int64_t row = call.indices[i];
    const int64_t before = i == call.offsets[set_of(call, i)] ? -1 : call.indices[i - 1];
    if (row <= before || row >= call.num_rows) report_place(&call.status[1], i);
  }
}

// Equal rows stand in the order of their sets.
__global__ void __launch_bounds__(kRowThreads)
    row_union_merge_kernel(RowUnionArguments call, UnionWorkspace work) {
  const int64_t wrong = call.status[1];
  if (wrong != kNothingFound) {
    if (first_item() == 0) {
      const int64_t set = set_of(call, wrong);
      call.status[2] = 1;
      call.status[3] = set;
      call.status[4] = wrong - call.offsets[set];
      call.status[5] = call.indices[wrong];
    }
    return;
  }
  for (int64_t i = first_item(); i < call.count; i += item_stride()) {
    const int64_t row = call.indices[i], own = set_of(call, i);
    int64_t place = i - call.offsets[own];
    for (int64_t s = 0; s < call.sets; ++s) {
      const int64_t* set = call.indices + call.offsets[s];
      const int64_t count = call.offsets[s + 1] - call.offsets[s];
      if (s < own) place += search<true>(set, count, row);
      if (s > own) place += search<false>(set, count, row);
    }
    work.sorted[place] = row;
  }
}

__global__ void __launch_bounds__(kScanThreads)
    row_union_unique_kernel(RowUnionArguments call, UnionWorkspace work) {
  __shared__ TileScan shared;
  if (call.status[1] != kNothingFound) return;
  const int64_t tiles = scan_tiles(call.count);
  for (int64_t tile = take_tile(shared, work.ticket); tile < tiles;
       tile = take_tile(shared, work.ticket)) {
    const int64_t begin = tile * kScanTile + threadIdx.x * kScanItems;
    unsigned kept = 0;
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) {
      const int64_t i = begin + k;
      const bool is_first = i < call.count && (i == 0 || work.sorted[i] != work.sorted[i - 1]);
      kept |= static_cast<unsigned>(is_first) << k;
    }
    int64_t place = tile_prefix(shared, work.states, tile, __popc(kept));
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) {
      if (kept >> k & 1) call.merged[place++] = work.sorted[begin + k];
    }
    if (tile + 1 == tiles && threadIdx.x == kScanThreads - 1) call.status[0] = place;
  }
}

// The widest vector that divides a row and both addresses.
bool fits_vector(const RowExpandArguments& call, int64_t bytes) {
  return call.row_bytes % bytes == 0 && reinterpret_cast<uintptr_t>(call.rows) % bytes == 0 &&
         reinterpret_cast<uintptr_t>(call.out) % bytes == 0;
}

void launch_ascend(const int64_t* indices, int64_t count, int64_t* status, cudaStream_t stream) {
  if (count == 0) return;
  const cudaLaunchConfig_t items = grid_of_items(count, kRowThreads, stream);
  cudaLaunchKernelEx(&items, row_ascend_kernel, indices, count, status);
}

}  // namespace

void launch_row_sparse_match(const RowMatchArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  cudaMemsetAsync(call.status, 0xff, 3 * sizeof *call.status, stream);
  launch_ascend(call.local, call.local_count, &call.status[0], stream);
  launch_ascend(call.all, call.all_count, &call.status[1], stream);
  if (call.local_count == 0) return;
  const cudaLaunchConfig_t items = grid_of_items(call.local_count, kRowThreads, stream);
  cudaLaunchKernelEx(&items, row_match_kernel, call);
}

void launch_row_sparse_expand(const RowExpandArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  cudaMemsetAsync(call.status, 0xff, 2 * sizeof *call.status, stream);
  cudaMemsetAsync(&call.status[2], 0, sizeof *call.status, stream);
  launch_ascend(call.local, call.local_count, &call.status[0], stream);
  launch_ascend(call.all, call.all_count, &call.status[1], stream);
  if (call.all_count == 0) return;
  const cudaLaunchConfig_t warps = grid_of_items(call.all_count * 32, kRowThreads, stream);
  if (fits_vector(call, 16)) {
    cudaLaunchKernelEx(&warps, row_expand_kernel<uint4>, call);
  } else if (fits_vector(call, 4)) {
    cudaLaunchKernelEx(&warps, row_expand_kernel<uint32_t>, call);
  } else {
    cudaLaunchKernelEx(&warps, row_expand_kernel<uint16_t>, call);
  }
}

void launch_row_sparse_sum(const RowSumArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  cudaMemsetAsync(call.status, 0xff, 2 * sizeof *call.status, stream);
  const cudaLaunchConfig_t checks =
      grid_of_items(call.order_count + call.segments + 1, kRowThreads, stream);
  cudaLaunchKernelEx(&checks, row_sum_check_kernel, call);
  if (call.segments * call.width == 0) return;
  const cudaLaunchConfig_t items = grid_of_items(call.segments * call.width, kRowThreads, stream);
  if (call.dtype == kFp32) {
    cudaLaunchKernelEx(&items, row_sum_kernel<kFp32>, call);
  } else if (call.dtype == kBf16) {
    cudaLaunchKernelEx(&items, row_sum_kernel<kBf16>, call);
  } else {
    cudaLaunchKernelEx(&items, row_sum_kernel<kFp16>, call);
  }
}

int64_t row_union_workspace_bytes(int64_t count) {
  return lay_out_union(nullptr, count).bytes;
}

void launch_row_sparse_union(const RowUnionArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const UnionWorkspace work = lay_out_union(call.workspace, call.count);
  cudaMemsetAsync(call.status, 0, 6 * sizeof *call.status, stream);
  cudaMemsetAsync(&call.status[1], 0xff, sizeof *call.status, stream);
  if (call.count == 0) return;
  cudaMemsetAsync(work.states, 0, static_cast<size_t>(work.zeroed_bytes), stream);
  const cudaLaunchConfig_t items = grid_of_items(call.count, kRowThreads, stream);
  cudaLaunchKernelEx(&items, row_union_check_kernel, call);
  cudaLaunchKernelEx(&items, row_union_merge_kernel, call, work);
  const cudaLaunchConfig_t tiles =
      grid_for(scan_tiles(call.count), multiprocessors() * 4, kScanThreads, stream);
  cudaLaunchKernelEx(&tiles, row_union_unique_kernel, call, work);
}

}  // namespace megatron_sparse
