// The partition hash of many entries on CUDA: hash_partition.h, one thread an entry.
//
// 8 bytes an entry read and 8 written.
#include "hash_launch.h"
#include "hash_partition.h"
#include "launch_grid.cuh"

namespace megatron_sparse {
namespace {

constexpr int kMapThreads = 256;

template <HashMap MAP>
__global__ void __launch_bounds__(kMapThreads)
    hash_map_kernel(HashMapArguments call, Permutation permutation) {
  for (int64_t i = first_item(); i < call.count; i += item_stride()) {
    const int64_t entry = call.entries[i];
    if (entry < 0 || entry >= call.numel) {
      // "Nothing", as an unsigned number, is the largest.
      atomicMin(reinterpret_cast<unsigned long long*>(call.status),
                static_cast<unsigned long long>(i));
      continue;
    }
    const uint32_t x = static_cast<uint32_t>(entry);
    if constexpr (MAP == HashMap::kUnpermute) {
      call.out[i] = unpermute_walk(permutation, unpermute_turn(permutation, x));
    } else {
      const uint32_t position = permute_walk(permutation, permute_turn(permutation, x));
      call.out[i] = MAP == HashMap::kPermute ? static_cast<int64_t>(position)
                                             : partition_at(call.numel, call.partitions, position);
    }
  }
}

}  // namespace

void launch_hash_map(const HashMapArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  cudaMemsetAsync(call.status, 0xff, sizeof *call.status, stream);
  if (call.count == 0) return;
  const Permutation permutation = make_permutation(call.numel, static_cast<uint64_t>(call.seed));
  const cudaLaunchConfig_t all = grid_of_items(call.count, kMapThreads, stream);
  with_constant<HashMap::kPermute, HashMap::kUnpermute, HashMap::kPartition>(
      call.map,
      [&](auto map) { cudaLaunchKernelEx(&all, hash_map_kernel<map.value>, call, permutation); });
}

}  // namespace megatron_sparse
