// The kernel of sealed records. It reads the payloads once; the host waits for nothing.
#include <algorithm>

#include "launch_grid.cuh"
#include "moves_scalar.cuh"
#include "payload_sums.h"
#include "scan.cuh"

namespace megatron_sparse {
namespace {

constexpr int kPayloadThreads = 256;

// Rows of the grid take one record after the other; the blocks of a row share it. Back to back,
// every thread follows the sizes.
__global__ void __launch_bounds__(kPayloadThreads, 4)
    payload_sum_kernel(const __grid_constant__ PayloadSums call) {
  int64_t begin = 0;
  for (int64_t record = 0; record < call.records; ++record) {
    const bool is_own = record % gridDim.y == blockIdx.y;
    if (!is_own && call.slots != nullptr) continue;
    const PayloadPlace payload = find_payload(call, record, begin);
    begin = payload.at + payload.bytes;
    if (!is_own) continue;
    const uint4* vectors = reinterpret_cast<const uint4*>(call.message + payload.at);
    uint32_t sum = 0;
#pragma unroll 4
    for (int64_t v = first_item(); v < payload.bytes / 16; v += item_stride()) {
      sum += mix_vector(vectors[v], static_cast<uint32_t>(4 * v));
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0 && sum != 0) {
      atomicAdd(reinterpret_cast<uint32_t*>(call.target(record, payload.at)), sum);
    }
  }
}

}  // namespace

void launch_payload_sums(const PayloadSums& call, void* stream) {
  if (call.records == 0) return;
  const int64_t resident = multiprocessors() * 8;
  const int64_t rows = std::min<int64_t>({call.records, resident, 65535});
  // At most four vectors a thread, if the records are of one size and there are blocks enough.
  const int64_t vectors = call.bytes / 16 / rows;
  cudaLaunchConfig_t config =
      grid_for(vectors / (4 * kPayloadThreads) + 1, std::max<int64_t>(resident / rows, 1),
               kPayloadThreads, static_cast<cudaStream_t>(stream));
  config.gridDim.y = static_cast<unsigned>(rows);
  cudaLaunchKernelEx(&config, payload_sum_kernel, call);
}

}  // namespace megatron_sparse
