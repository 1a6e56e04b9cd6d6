// Sums of repeated rows of row-sparse gradients on CUDA; row_sparse.cpp is the same for the CPU.
//
// No atomics decide the order of a sum, so results do not depend on the schedule. Each row is read
// once.
#include "elementwise.h"
#include "lanes.h"
#include "launch_grid.cuh"
#include "raw_type.cuh"
#include "row_sparse_launch.h"

namespace megatron_sparse {
namespace {

constexpr int kRowThreads = 256;

// Keeps the lowest place, whichever thread finds one first: "nothing", as an unsigned number, is
// the largest.
__device__ __forceinline__ void report_place(int64_t* status, int64_t place) {
  atomicMin(reinterpret_cast<unsigned long long*>(status), static_cast<unsigned long long>(place));
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

}  // namespace

void launch_row_sparse_sum(const RowSumArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  cudaMemsetAsync(call.status, 0xff, 2 * sizeof *call.status, stream);
  const cudaLaunchConfig_t checks =
      grid_of_items(call.order_count + call.segments + 1, kRowThreads, stream);
  cudaLaunchKernelEx(&checks, row_sum_check_kernel, call);
  if (call.segments * call.width == 0) return;
  const cudaLaunchConfig_t items = grid_of_items(call.segments * call.width, kRowThreads, stream);
  with_constant<kFp32, kBf16, kFp16>(call.dtype, [&](auto dtype) {
    cudaLaunchKernelEx(&items, row_sum_kernel<dtype.value>, call);
  });
}

}  // namespace megatron_sparse
