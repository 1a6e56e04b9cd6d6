// Row-sparse gradients on CUDA: checks, device, stream, launch. Their schemas are row_sparse.cpp's.
//
// Each call waits for its launches and reads a few words: the errors found, and the size of the
// union. Tables of offsets lie on the device, too.
#include "cuda_binding.h"
#include "error_text.h"
#include "row_sparse_launch.h"

namespace megatron_sparse {
namespace {

// A strictly ascending set of row indices; the device checks its content.
void check_set(const Tensor& indices, const Tensor& beside, const char* name) {
  check_vector(indices, name, ScalarType::Long, -1);
  check_beside(indices, beside, name);
}

// Refuses a set that the kernels found not to ascend, and names the entry.
void check_ascends(int64_t found, const Tensor& indices, const char* name, void* stream) {
  if (found == kNothingFound) return;
  const int64_t first = found == 0 ? 0 : found - 1;
  const std::vector<int64_t> there =
      read_words(entries_of(indices) + first, found - first + 1, stream);
  refuse(ascend_error_text(name, found, found == 0 ? -1 : there.front(), there.back()));
}

void check_rows(const Tensor& rows, const char* name) {
  MS_CHECK(rows.dim() == 2 && rows.is_contiguous(), name << " has the wrong shape",
           "a contiguous 2-D tensor", "a tensor of " << rows.dim() << " dimensions");
}

Tensor row_sparse_sum_cuda(const Tensor& rows, const Tensor& order, const Tensor& offsets) {
  check_rows(rows, "row_sparse_sum: rows");
  const int dtype = dtype_code(rows, "row_sparse_sum: rows");
  check_set(order, rows, "row_sparse_sum: order");
  check_set(offsets, rows, "row_sparse_sum: offsets");
  MS_CHECK(offsets.numel() >= 1, "row_sparse_sum: offsets is empty", "at least one offset", 0);
  const int64_t segments = offsets.numel() - 1;
  torch::stable::accelerator::DeviceGuard guard(rows.get_device_index());
  const Tensor result = torch::stable::new_empty(rows, {segments, rows.size(1)});
  const Tensor status = new_words(rows, 2);
  void* stream = current_stream(rows);
  launch_row_sparse_sum(
      {rows.const_data_ptr(), rows.size(0), rows.size(1), dtype, entries_of(order), order.numel(),
       entries_of(offsets), segments, result.mutable_data_ptr(), words_of(status)},
      stream);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const std::vector<int64_t> found = read_words(words_of(status), 2, stream);
  if (found[0] != kNothingFound) {
    refuse(entry_error_text("row_sparse_sum: order", found[0], rows.size(0),
                            read_words(entries_of(order) + found[0], 1, stream)[0]));
  }
  if (found[1] != kNothingFound) {
    refuse(cut_error_text(found[1], order.numel(),
                          read_words(entries_of(offsets) + found[1], 1, stream)[0]));
  }
  return result;
}

std::tuple<Tensor, Tensor> row_sparse_union_cuda(const Tensor& indices, const Tensor& offsets,
                                                 int64_t num_rows) {
  check_set(offsets, offsets, "row_sparse_union: offsets");
  check_set(indices, offsets, "row_sparse_union: indices");
  MS_CHECK(offsets.numel() >= 1, "row_sparse_union: offsets is empty", "at least one offset", 0);
  const int64_t count = indices.numel(), sets = offsets.numel() - 1;
  torch::stable::accelerator::DeviceGuard guard(offsets.get_device_index());
  void* stream = current_stream(offsets);
  // A table as long as the group: the kernels rely on it, so it is checked here.
  const std::vector<int64_t> cut = read_words(entries_of(offsets), sets + 1, stream);
  for (int64_t s = 0; s < sets; ++s) {
    MS_CHECK(cut[s] <= cut[s + 1], "row_sparse_union: offsets is not ascending",
             "at least " << cut[s] << " at position " << s + 1, cut[s + 1]);
  }
  check_cut(cut.data(), sets, count, "row_sparse_union: offsets");
  Tensor merged = new_words(offsets, count), status = new_words(offsets, 6);
  const Tensor workspace = new_workspace(offsets, row_union_workspace_bytes(count));
  launch_row_sparse_union({entries_of(indices), count, entries_of(offsets), sets, num_rows,
                           words_of(merged), words_of(status), workspace.mutable_data_ptr()},
                          stream);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const int64_t size = read_words(words_of(status), 1, stream)[0];
  return {torch::stable::narrow(merged, 0, 0, size), torch::stable::narrow(status, 0, 2, 4)};
}

Tensor row_sparse_match_cuda(const Tensor& local, const Tensor& all) {
  check_set(local, local, "row_sparse_match: local");
  check_set(all, local, "row_sparse_match: union");
  torch::stable::accelerator::DeviceGuard guard(local.get_device_index());
  const Tensor positions = new_words(local, local.numel()), status = new_words(local, 3);
  void* stream = current_stream(local);
  launch_row_sparse_match({entries_of(local), local.numel(), entries_of(all), all.numel(),
                           words_of(positions), words_of(status)},
                          stream);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const std::vector<int64_t> found = read_words(words_of(status), 3, stream);
  check_ascends(found[0], local, "row_sparse_match: local", stream);
  check_ascends(found[1], all, "row_sparse_match: union", stream);
  if (found[2] != kNothingFound) {
    refuse(missing_error_text(read_words(entries_of(local) + found[2], 1, stream)[0]));
  }
  return positions;
}

Tensor row_sparse_expand_cuda(const Tensor& local, const Tensor& rows, const Tensor& all) {
  check_rows(rows, "row_sparse_expand: rows");
  const int64_t row_bytes = rows.size(1) * dtype_bytes(dtype_code(rows, "row_sparse_expand: rows"));
  check_set(local, rows, "row_sparse_expand: local");
  check_set(all, rows, "row_sparse_expand: union");
  MS_CHECK(local.numel() == rows.size(0), "row_sparse_expand: rows has the wrong length",
           local.numel(), rows.size(0));
  torch::stable::accelerator::DeviceGuard guard(rows.get_device_index());
  const Tensor result = torch::stable::new_empty(rows, {all.numel(), rows.size(1)});
  const Tensor status = new_words(rows, 3);
  void* stream = current_stream(rows);
  launch_row_sparse_expand(
      {entries_of(local), local.numel(), entries_of(all), all.numel(), rows.const_data_ptr(),
       result.mutable_data_ptr(), row_bytes, words_of(status)},
      stream);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const std::vector<int64_t> found = read_words(words_of(status), 3, stream);
  check_ascends(found[0], local, "row_sparse_expand: local", stream);
  check_ascends(found[1], all, "row_sparse_expand: union", stream);
  if (found[2] != local.numel()) refuse(absent_error_text(local.numel(), found[2]));
  return result;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("row_sparse_sum", TORCH_BOX(&megatron_sparse::row_sparse_sum_cuda));
  m.impl("row_sparse_union", TORCH_BOX(&megatron_sparse::row_sparse_union_cuda));
  m.impl("row_sparse_match", TORCH_BOX(&megatron_sparse::row_sparse_match_cuda));
  m.impl("row_sparse_expand", TORCH_BOX(&megatron_sparse::row_sparse_expand_cuda));
}
