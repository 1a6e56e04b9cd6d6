// Row-sparse gradients on the CPU: sums of repeated rows, the union of all ranks' row indices, the
// match of local indices in it, and the compacted buffer that a dense all-reduce can carry.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "hash_partition_check.h"

namespace megatron_sparse {
namespace {

constexpr int64_t kRowChunkBytes = int64_t{1} << 16;  // of rows that one task moves
constexpr int64_t kUnionSlice = int64_t{1} << 14;     // indices that one task merges, approximately

struct Rows {
  int64_t count;
  int64_t width;  // elements of a row
  int64_t bytes;  // of a row
};

Rows check_rows(const Tensor& rows, const char* name) {
  MS_CHECK(rows.dim() == 2 && rows.is_contiguous(), name << " has the wrong shape",
           "a contiguous 2-D tensor", "a tensor of " << rows.dim() << " dimensions");
  MS_CHECK(rows.is_cpu(), name << " is on the wrong device", "cpu", "another");
  return {rows.size(0), rows.size(1), rows.size(1) * dtype_bytes(dtype_code(rows, name))};
}

const int64_t* check_ascending(const Tensor& indices, const char* name) {
  check_vector(indices, name, ScalarType::Long, -1);
  MS_CHECK(indices.is_cpu(), name << " is on the wrong device", "cpu", "another");
  const int64_t* at = static_cast<const int64_t*>(indices.const_data_ptr());
  const int64_t bad =
      first_bad(indices.numel(), [at](int64_t i) { return at[i] <= (i == 0 ? -1 : at[i - 1]); });
  if (bad != indices.numel()) {
    refuse(ascend_error_text(name, bad, bad == 0 ? -1 : at[bad - 1], at[bad]));
  }
  return at;
}

int64_t rows_per_chunk(int64_t row_bytes) {
  return std::max<int64_t>(kRowChunkBytes / std::max<int64_t>(row_bytes, 1), 1);
}

// out[i] = sum of rows[order[j]] for j from offsets[i] to offsets[i + 1], in that order, in fp32.
template <class T>
void sum_segments(const T* rows, const int64_t* order, const int64_t* offsets, int64_t segments,
                  const Rows& shape, T* out) {
  const int64_t width = shape.width;
  for_each_chunk(segments, rows_per_chunk(shape.bytes), [&](int64_t, int64_t begin, int64_t end) {
    std::vector<float> sum(width);
    for (int64_t s = begin; s < end; ++s) {
      T* target = out + s * width;
      const T* first = rows + order[offsets[s]] * width;
      if (offsets[s + 1] - offsets[s] == 1) {  // bit for bit, NaN payloads and -0.0 included
        std::memcpy(target, first, shape.bytes);
        continue;
      }
      for (int64_t c = 0; c < width; ++c) sum[c] = static_cast<float>(first[c]);
      for (int64_t j = offsets[s] + 1; j < offsets[s + 1]; ++j) {
        const T* row = rows + order[j] * width;
        for (int64_t c = 0; c < width; ++c) sum[c] += static_cast<float>(row[c]);
      }
      for (int64_t c = 0; c < width; ++c) target[c] = static_cast<T>(sum[c]);
    }
  });
}

Tensor row_sparse_sum_cpu(const Tensor& rows, const Tensor& order, const Tensor& offsets) {
  const Rows shape = check_rows(rows, "row_sparse_sum: rows");
  const int64_t* picked = check_entries(order, "row_sparse_sum: order", shape.count);
  const int64_t* cut = check_offsets(offsets, "row_sparse_sum: offsets");
  const int64_t segments = offsets.numel() - 1;
  check_cut(cut, segments, order.numel(), "row_sparse_sum: offsets");
  for (int64_t s = 0; s < segments; ++s) {
    MS_CHECK(cut[s] < cut[s + 1], "row_sparse_sum: segment " << s << " is empty",
             "at least one row", 0);
  }
  Tensor result = torch::stable::new_empty(rows, {segments, shape.width});
  const void* from = rows.const_data_ptr();
  void* to = result.mutable_data_ptr();
  switch (dtype_code(rows, "row_sparse_sum: rows")) {
    case kFp32:
      sum_segments(static_cast<const float*>(from), picked, cut, segments, shape,
                   static_cast<float*>(to));
      break;
    case kBf16:
      using torch::headeronly::BFloat16;
      sum_segments(static_cast<const BFloat16*>(from), picked, cut, segments, shape,
                   static_cast<BFloat16*>(to));
      break;
    case kFp16:
      using torch::headeronly::Half;
      sum_segments(static_cast<const Half*>(from), picked, cut, segments, shape,
                   static_cast<Half*>(to));
      break;
  }
  return result;
}

using Range = std::pair<const int64_t*, const int64_t*>;

// The union of ascending ranges, pairwise in a tree: every index is read log2(ranges) times.
std::vector<int64_t> merge_ranges(const std::vector<Range>& ranges) {
  std::vector<std::vector<int64_t>> level;
  for (size_t i = 0; i < ranges.size(); i += 2) {
    const Range second = i + 1 < ranges.size() ? ranges[i + 1] : Range{nullptr, nullptr};
    std::vector<int64_t>& merged = level.emplace_back();
    merged.reserve((ranges[i].second - ranges[i].first) + (second.second - second.first));
    std::set_union(ranges[i].first, ranges[i].second, second.first, second.second,
                   std::back_inserter(merged));
  }
  if (level.empty()) return {};
  if (level.size() == 1) return std::move(level.front());
  std::vector<Range> next;
  for (const std::vector<int64_t>& one : level) {
    next.emplace_back(one.data(), one.data() + one.size());
  }
  return merge_ranges(next);
}

// The status is {wrong, set, position, value}: the first entry that is out of range or not above
// the one before it in its set. The sets come from peers.
std::tuple<Tensor, Tensor> row_sparse_union_cpu(const Tensor& indices, const Tensor& offsets,
                                                int64_t num_rows) {
  check_vector(indices, "row_sparse_union: indices", ScalarType::Long, -1);
  MS_CHECK(indices.is_cpu(), "row_sparse_union: indices is on the wrong device", "cpu", "another");
  const int64_t* cut = check_offsets(offsets, "row_sparse_union: offsets");
  const int64_t sets = offsets.numel() - 1, count = indices.numel();
  check_cut(cut, sets, count, "row_sparse_union: offsets");
  const int64_t* at = static_cast<const int64_t*>(indices.const_data_ptr());

  Tensor status = torch::stable::new_zeros(offsets, {4});
  int64_t* fields = static_cast<int64_t*>(status.mutable_data_ptr());
  int64_t largest = 0;
  for (int64_t s = 0; s < sets; ++s) {
    const int64_t* set = at + cut[s];
    const int64_t entries = cut[s + 1] - cut[s];
    const int64_t bad = first_bad(entries, [set, num_rows](int64_t i) {
      return set[i] <= (i == 0 ? -1 : set[i - 1]) || set[i] >= num_rows;
    });
    if (bad < entries) {
      fields[0] = 1;
      fields[1] = s;
      fields[2] = bad;
      fields[3] = set[bad];
      return {torch::stable::new_empty(indices, {0}), status};
    }
    if (entries > cut[largest + 1] - cut[largest]) largest = s;
  }

  // Slices of the row range, cut at equal distances of the largest set, are merged independently.
  const int64_t slices = std::max<int64_t>((count + kUnionSlice - 1) / kUnionSlice, 1);
  std::vector<std::vector<int64_t>> merged(slices);
  torch::stable::parallel_for(0, slices, 1, [&](int64_t first, int64_t last) {
    for (int64_t slice = first; slice < last; ++slice) {
      std::vector<Range> ranges;
      for (int64_t s = 0; s < sets; ++s) {
        const int64_t* begin = at + cut[s];
        const int64_t* end = at + cut[s + 1];
        const auto border = [&](int64_t which) {
          if (which == 0) return begin;
          if (which == slices) return end;
          const int64_t entries = cut[largest + 1] - cut[largest];
          return std::lower_bound(begin, end, at[cut[largest] + which * entries / slices]);
        };
        ranges.emplace_back(border(slice), border(slice + 1));
      }
      merged[slice] = merge_ranges(ranges);
    }
  });
  std::vector<int64_t> begin(slices + 1, 0);
  for (int64_t slice = 0; slice < slices; ++slice) {
    begin[slice + 1] = begin[slice] + static_cast<int64_t>(merged[slice].size());
  }
  Tensor result = torch::stable::new_empty(indices, {begin[slices]});
  int64_t* out = static_cast<int64_t*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, slices, 1, [&](int64_t first, int64_t last) {
    for (int64_t slice = first; slice < last; ++slice) {
      std::copy(merged[slice].begin(), merged[slice].end(), out + begin[slice]);
    }
  });
  return {result, status};
}

// Finds the place of each local index in the union: one search for each chunk, then a merge.
Tensor row_sparse_match_cpu(const Tensor& local, const Tensor& all) {
  const int64_t* wanted = check_ascending(local, "row_sparse_match: local");
  const int64_t* union_begin = check_ascending(all, "row_sparse_match: union");
  const int64_t* union_end = union_begin + all.numel();
  Tensor result = torch::stable::new_empty(local, {local.numel()});
  int64_t* out = static_cast<int64_t*>(result.mutable_data_ptr());
  for_each_chunk(local.numel(), kHashChunk, [&](int64_t, int64_t begin, int64_t end) {
    const int64_t* at = std::lower_bound(union_begin, union_end, wanted[begin]);
    for (int64_t i = begin; i < end; ++i) {
      while (at != union_end && *at < wanted[i]) ++at;
      out[i] = at != union_end && *at == wanted[i] ? at - union_begin : -1;
    }
  });
  const int64_t missing = first_bad(local.numel(), [out](int64_t i) { return out[i] < 0; });
  if (missing != local.numel()) refuse(missing_error_text(wanted[missing]));
  return result;
}

// The compacted buffer: row i is the local row of union[i], or zero. Every byte is written once.
Tensor row_sparse_expand_cpu(const Tensor& local, const Tensor& rows, const Tensor& all) {
  const Rows shape = check_rows(rows, "row_sparse_expand: rows");
  const int64_t* have = check_ascending(local, "row_sparse_expand: local");
  const int64_t* wanted = check_ascending(all, "row_sparse_expand: union");
  MS_CHECK(local.numel() == shape.count, "row_sparse_expand: rows has the wrong length",
           local.numel(), shape.count);
  const int64_t* have_end = have + local.numel();
  Tensor result = torch::stable::new_empty(rows, {all.numel(), shape.width});
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(result.mutable_data_ptr());
  std::atomic<int64_t> found{0};
  for_each_chunk(
      all.numel(), rows_per_chunk(shape.bytes), [&](int64_t, int64_t begin, int64_t end) {
        const int64_t* at = std::lower_bound(have, have_end, wanted[begin]);
        int64_t matches = 0;
        for (int64_t i = begin; i < end; ++i) {
          while (at != have_end && *at < wanted[i]) ++at;
          if (at != have_end && *at == wanted[i]) {
            std::memcpy(to + i * shape.bytes, from + (at - have) * shape.bytes, shape.bytes);
            ++matches;
          } else {
            std::memset(to + i * shape.bytes, 0, shape.bytes);
          }
        }
        found += matches;
      });
  if (found != local.numel()) refuse(absent_error_text(local.numel(), found));
  return result;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def("row_sparse_sum(Tensor rows, Tensor order, Tensor offsets) -> Tensor");
  m.def("row_sparse_union(Tensor indices, Tensor offsets, int num_rows) -> (Tensor, Tensor)");
  m.def("row_sparse_match(Tensor local, Tensor union) -> Tensor");
  m.def("row_sparse_expand(Tensor local, Tensor rows, Tensor union) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("row_sparse_sum", TORCH_BOX(&megatron_sparse::row_sparse_sum_cpu));
  m.impl("row_sparse_union", TORCH_BOX(&megatron_sparse::row_sparse_union_cpu));
  m.impl("row_sparse_match", TORCH_BOX(&megatron_sparse::row_sparse_match_cpu));
  m.impl("row_sparse_expand", TORCH_BOX(&megatron_sparse::row_sparse_expand_cpu));
}
