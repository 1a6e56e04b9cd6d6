// Sums of repeated rows of row-sparse gradients, on the CPU.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>
#include <vector>

#include "hash_check.h"

namespace megatron_sparse {
namespace {

constexpr int64_t kRowChunkBytes = int64_t{1} << 16;  // of rows that one task moves

// out[i] = sum of rows[order[j]] for j from offsets[i] to offsets[i + 1], in that order, in fp32.
template <class T>
void sum_segments(const Tensor& rows, const int64_t* order, const int64_t* offsets,
                  const Tensor& out) {
  const int64_t segments = out.size(0), width = out.size(1);
  const int64_t bytes = width * static_cast<int64_t>(sizeof(T));
  const int64_t chunk = std::max<int64_t>(kRowChunkBytes / std::max<int64_t>(bytes, 1), 1);
  const T* from = static_cast<const T*>(rows.const_data_ptr());
  T* to = static_cast<T*>(out.mutable_data_ptr());
  for_each_chunk(segments, chunk, [&](int64_t, int64_t begin, int64_t end) {
    std::vector<float> sum(width);
    for (int64_t s = begin; s < end; ++s) {
      T* target = to + s * width;
      const T* first = from + order[offsets[s]] * width;
      if (offsets[s + 1] - offsets[s] == 1) {  // bit for bit, NaN payloads and -0.0 included
        std::memcpy(target, first, bytes);
        continue;
      }
      for (int64_t c = 0; c < width; ++c) sum[c] = static_cast<float>(first[c]);
      for (int64_t j = offsets[s] + 1; j < offsets[s + 1]; ++j) {
        const T* row = from + order[j] * width;
        for (int64_t c = 0; c < width; ++c) sum[c] += static_cast<float>(row[c]);
      }
      for (int64_t c = 0; c < width; ++c) target[c] = static_cast<T>(sum[c]);
    }
  });
}

Tensor row_sparse_sum_cpu(const Tensor& rows, const Tensor& order, const Tensor& offsets) {
  MS_CHECK(rows.dim() == 2 && rows.is_contiguous(), "row_sparse_sum: rows has the wrong shape",
           "a contiguous 2-D tensor", "a tensor of " << rows.dim() << " dimensions");
  const int dtype = dtype_code(rows, "row_sparse_sum: rows");
  const int64_t* picked = check_entries(order, "row_sparse_sum: order", rows.size(0));
  const int64_t* cut = check_offsets(offsets, "row_sparse_sum: offsets");
  const int64_t segments = offsets.numel() - 1;
  check_cut(cut, segments, order.numel(), "row_sparse_sum: offsets");
  for (int64_t s = 0; s < segments; ++s) {
    MS_CHECK(cut[s] < cut[s + 1], "row_sparse_sum: segment " << s << " is empty",
             "at least one row", 0);
  }
  Tensor result = torch::stable::new_empty(rows, {segments, rows.size(1)});
  if (dtype == kFp32) sum_segments<float>(rows, picked, cut, result);
  if (dtype == kBf16) sum_segments<torch::headeronly::BFloat16>(rows, picked, cut, result);
  if (dtype == kFp16) sum_segments<torch::headeronly::Half>(rows, picked, cut, result);
  return result;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def("row_sparse_sum(Tensor rows, Tensor order, Tensor offsets) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("row_sparse_sum", TORCH_BOX(&megatron_sparse::row_sparse_sum_cpu));
}
