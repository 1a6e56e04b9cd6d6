// The partition hash on the CPU, for tensors of elements or positions.
#include <torch/csrc/stable/library.h>

#include "hash_partition_check.h"
#include "isa.h"

namespace megatron_sparse {
namespace {

// Applies `map` to blocks of entries, in place, and `finish` to every result.
template <class Map, class Finish>
Tensor map_entries(const Tensor& entries, const int64_t* in, const Map& map, const Finish& finish) {
  Tensor result = torch::stable::new_empty(entries, {entries.numel()});
  int64_t* out = static_cast<int64_t*>(result.mutable_data_ptr());
  for_each_chunk(entries.numel(), kHashChunk, [&](int64_t, int64_t begin, int64_t end) {
    constexpr int64_t kBlock = 512;
    uint32_t x[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t count = std::min(kBlock, end - at);
      for (int64_t i = 0; i < count; ++i) x[i] = static_cast<uint32_t>(in[at + i]);
      map(x, count);
      for (int64_t i = 0; i < count; ++i) out[at + i] = finish(x[i]);
    }
  });
  return result;
}

Tensor hash_permute_cpu(const Tensor& elements, int64_t numel, int64_t seed) {
  check_hash(numel, 1, "hash_permute");
  const int64_t* in = check_entries(elements, "hash_permute: elements", numel);
  const Permutation p = make_permutation(numel, static_cast<uint64_t>(seed));
  const Kernels& kernel = kernels();
  return map_entries(
      elements, in, [&](uint32_t* x, int64_t count) { kernel.permute(p, x, count); },
      [](uint32_t x) { return x; });
}

Tensor hash_unpermute_cpu(const Tensor& positions, int64_t numel, int64_t seed) {
  check_hash(numel, 1, "hash_unpermute");
  const int64_t* in = check_entries(positions, "hash_unpermute: positions", numel);
  const Permutation p = make_permutation(numel, static_cast<uint64_t>(seed));
  const Kernels& kernel = kernels();
  return map_entries(
      positions, in, [&](uint32_t* x, int64_t count) { kernel.unpermute(p, x, count); },
      [](uint32_t x) { return x; });
}

Tensor hash_partition_of_cpu(const Tensor& elements, int64_t numel, int64_t partitions,
                             int64_t seed, bool general) {
  check_hash(numel, partitions, "hash_partition_of");
  const int64_t* in = check_entries(elements, "hash_partition_of: elements", numel);
  const uint64_t key = static_cast<uint64_t>(seed);
  if (general) {
    const HashSeed words = hash_seed(key, kDrawGeneral);
    const uint32_t n = static_cast<uint32_t>(partitions);
    return map_entries(
        elements, in, [](uint32_t*, int64_t) {},
        [words, n](uint32_t x) { return general_partition(words, n, x); });
  }
  const Permutation p = make_permutation(numel, key);
  const Kernels& kernel = kernels();
  return map_entries(
      elements, in, [&](uint32_t* x, int64_t count) { kernel.permute(p, x, count); },
      [numel, partitions](uint32_t x) { return partition_at(numel, partitions, x); });
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def("hash_permute(Tensor elements, int numel, int seed) -> Tensor");
  m.def("hash_unpermute(Tensor positions, int numel, int seed) -> Tensor");
  m.def(
      "hash_partition_of(Tensor elements, int numel, int partitions, int seed, bool general) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("hash_permute", TORCH_BOX(&megatron_sparse::hash_permute_cpu));
  m.impl("hash_unpermute", TORCH_BOX(&megatron_sparse::hash_unpermute_cpu));
  m.impl("hash_partition_of", TORCH_BOX(&megatron_sparse::hash_partition_of_cpu));
}
