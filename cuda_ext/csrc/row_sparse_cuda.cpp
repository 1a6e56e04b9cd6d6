// Row-sparse gradients on CUDA: checks, device, stream, launch. The schema is row_sparse.cpp's.
//
// A call waits for its launches and reads the errors found. The offsets lie on the device, too.
#include "cuda_binding.h"
#include "row_sparse_launch.h"

namespace megatron_sparse {
namespace {

Tensor row_sparse_sum_cuda(const Tensor& rows, const Tensor& order, const Tensor& offsets) {
  MS_CHECK(rows.dim() == 2 && rows.is_contiguous(), "row_sparse_sum: rows has the wrong shape",
           "a contiguous 2-D tensor", "a tensor of " << rows.dim() << " dimensions");
  const int dtype = dtype_code(rows, "row_sparse_sum: rows");
  check_vector(order, "row_sparse_sum: order", ScalarType::Long, -1, rows);
  check_vector(offsets, "row_sparse_sum: offsets", ScalarType::Long, -1, rows);
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
    refuse_entry("row_sparse_sum: order", found[0], rows.size(0),
                 read_words(entries_of(order) + found[0], 1, stream)[0]);
  }
  MS_CHECK(found[1] == kNothingFound, "row_sparse_sum: offsets does not cut the order into groups",
           "strictly ascending from 0 to " << order.numel(),
           read_words(entries_of(offsets) + found[1], 1, stream)[0] << " at position " << found[1]);
  return result;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("row_sparse_sum", TORCH_BOX(&megatron_sparse::row_sparse_sum_cuda));
}
