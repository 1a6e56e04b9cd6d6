// Shared by the CPU bindings of hashing and row-sparse gradients.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "hash_check.h"

namespace megatron_sparse {

inline constexpr int64_t kHashChunk = int64_t{1} << 14;

// Runs body(chunk, begin, end) for consecutive pieces of [0, count), in torch's thread pool. The
// pieces do not depend on the number of threads.
template <class Body>
void for_each_chunk(int64_t count, int64_t chunk, const Body& body) {
  const int64_t chunks = (count + chunk - 1) / chunk;
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      body(c, c * chunk, std::min((c + 1) * chunk, count));
    }
  });
}

// The first position in [0, count) for which `is_bad` holds, or `count`.
template <class Predicate>
int64_t first_bad(int64_t count, const Predicate& is_bad) {
  std::atomic<int64_t> lowest{count};
  for_each_chunk(count, kHashChunk, [&](int64_t, int64_t begin, int64_t end) {
    if (begin >= lowest.load(std::memory_order_relaxed)) return;
    for (int64_t i = begin; i < end; ++i) {
      if (!is_bad(i)) continue;
      int64_t seen = lowest.load();
      while (i < seen && !lowest.compare_exchange_weak(seen, i)) {
      }
      return;
    }
  });
  return lowest.load();
}

// An int64 CPU vector whose entries are in [0, limit).
inline const int64_t* check_entries(const Tensor& tensor, const char* name, int64_t limit) {
  check_vector(tensor, name, ScalarType::Long, -1);
  MS_CHECK(tensor.is_cpu(), name << " is on the wrong device", "cpu", "another");
  const int64_t* at = static_cast<const int64_t*>(tensor.const_data_ptr());
  const int64_t bad =
      first_bad(tensor.numel(), [&](int64_t i) { return at[i] < 0 || at[i] >= limit; });
  if (bad != tensor.numel()) refuse_entry(name, bad, limit, at[bad]);
  return at;
}

}  // namespace megatron_sparse
