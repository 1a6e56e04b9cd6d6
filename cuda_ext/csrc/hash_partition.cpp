// The partition hash on the CPU, for tensors of elements or positions.
#include <torch/csrc/stable/library.h>

#include "hash_check.h"
#include "isa.h"

namespace megatron_sparse {
namespace {

Tensor hash_map_cpu(const Tensor& entries, int64_t numel, int64_t partitions, int64_t seed,
                    int64_t code) {
  const HashMap map = check_map(code);
  check_hash(numel, partitions, "hash_map");
  const int64_t* in = check_entries(entries, entries_of_map(map), numel);
  const Permutation permutation = make_permutation(numel, static_cast<uint64_t>(seed));
  const Kernels& kernel = kernels();
  Tensor result = torch::stable::new_empty(entries, {entries.numel()});
  int64_t* out = static_cast<int64_t*>(result.mutable_data_ptr());
  const auto finish = [&](uint32_t x) -> int64_t {
    return map == HashMap::kPartition ? partition_at(numel, partitions, x) : int64_t{x};
  };
  for_each_chunk(entries.numel(), kHashChunk, [&](int64_t, int64_t begin, int64_t end) {
    constexpr int64_t kBlock = 512;
    uint32_t x[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t count = std::min(kBlock, end - at);
      for (int64_t i = 0; i < count; ++i) x[i] = static_cast<uint32_t>(in[at + i]);
      if (map == HashMap::kUnpermute) {
        kernel.unpermute(permutation, x, count);
      } else {
        kernel.permute(permutation, x, count);
      }
      for (int64_t i = 0; i < count; ++i) out[at + i] = finish(x[i]);
    }
  });
  return result;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def("hash_map(Tensor entries, int numel, int partitions, int seed, int map) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("hash_map", TORCH_BOX(&megatron_sparse::hash_map_cpu));
}
