// Loops in torch's thread pool, for the CPU's parts of the ops.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>

#include "check.h"

namespace megatron_sparse {

// What an op returns on the CPU: a few words.
inline Tensor result_of(const Tensor& like, std::initializer_list<int64_t> words) {
  Tensor result =
      torch::stable::new_empty(like, {static_cast<int64_t>(words.size())}, ScalarType::Long);
  std::copy(words.begin(), words.end(), static_cast<int64_t*>(result.mutable_data_ptr()));
  return result;
}

// Runs body(i) for each i in [0, count).
template <class Body>
void for_each(int64_t count, const Body& body) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) body(i);
  });
}

// Runs body(chunk, begin, end) for consecutive pieces of [0, count), which do not depend on the
// number of threads.
template <class Body>
void for_each_chunk(int64_t count, int64_t chunk, const Body& body) {
  for_each((count + chunk - 1) / chunk,
           [&](int64_t c) { body(c, c * chunk, std::min((c + 1) * chunk, count)); });
}

// The first position in [0, count) for which `is_bad` holds, or `count`; looks at pieces of `chunk`
// positions, and perhaps not at those behind it.
template <class Predicate>
int64_t first_bad(int64_t count, int64_t chunk, const Predicate& is_bad) {
  std::atomic<int64_t> lowest{count};
  for_each_chunk(count, chunk, [&](int64_t, int64_t begin, int64_t end) {
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

}  // namespace megatron_sparse
