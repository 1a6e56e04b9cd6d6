// encode_rice_records and prune_encode_rice_records on CUDA: checks, device, stream, launch.
#include "prune_encode_check.h"
#include "rice.h"
#include "rice_encode_launch.h"

namespace megatron_sparse {
namespace {

int64_t staged_dtype(int64_t value_dtype) {
  return is_quantised(static_cast<int>(value_dtype)) ? int{kFp32} : value_dtype;
}

RiceArguments check_rice(int64_t value_dtype, int64_t log2_span, bool without_indices) {
  MS_CHECK(value_dtype >= kFp32 && value_dtype <= kQ2, "encode: value_dtype is unknown",
           "0 (fp32), 1 (bf16), 2 (fp16), 3 (q8), 4 (q4), 5 (q3) or 6 (q2)", value_dtype);
  MS_CHECK(log2_span >= kLeastSpan && log2_span <= kMostSpan, "encode: log2_span is out of range",
           kLeastSpan << " to " << kMostSpan, log2_span);
  MS_CHECK(!without_indices || value_dtype == kQ8 || value_dtype == kQ4,
           "encode: a value of every element needs other values", "3 (q8) or 4 (q4)", value_dtype);
  return {static_cast<int>(value_dtype),
          static_cast<int>(log2_span),
          without_indices,
          nullptr,
          kFp32,
          -1};
}

Tensor encode_rice_records(const Tensor& grad, const Tensor& segment_offsets,
                           const Tensor& segment_formats, int64_t value_dtype, int64_t step,
                           int64_t log2_span, bool without_indices, const Tensor& out,
                           std::optional<Tensor> residual, std::optional<Tensor> slots) {
  const EncodeRequest request = {
      grad, segment_offsets, segment_formats, staged_dtype(value_dtype), step, 0, out, slots, {}};
  check_encode(request);
  RiceArguments rice = check_rice(value_dtype, log2_span, without_indices);
  if (residual.has_value()) {
    check_vector(*residual, "encode: residual", ScalarType::Float, grad.numel());
    MS_CHECK(residual->is_cuda() && residual->get_device_index() == grad.get_device_index(),
             "encode: residual is on the wrong device", "grad's CUDA device", "another");
    MS_CHECK(is_quantised(rice.dtype), "encode: a residual needs quantised values", "3 to 6",
             value_dtype);
    rice.residual = residual->mutable_data_ptr();
  }
  torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  return run_encoder(
      request, [&](const EncodeArguments& a) { return rice_encode_workspace_bytes(a, rice); },
      [&](const EncodeArguments& a, void* stream) { launch_rice_encode(a, rice, stream); });
}

Tensor prune_encode_rice_records(const Tensor& grad, const Tensor& residual,
                                 const Tensor& range_offsets, const Tensor& thresholds, double leak,
                                 int64_t key, const Tensor& segment_offsets,
                                 const Tensor& segment_formats, int64_t value_dtype, int64_t step,
                                 int64_t log2_span, bool without_indices, const Tensor& out,
                                 std::optional<Tensor> capacity, std::optional<Tensor> slots,
                                 std::optional<Tensor> tie_chances) {
  const int64_t staged = staged_dtype(value_dtype);
  const EncodeRequest request = {grad, segment_offsets, segment_formats, staged, step, 0,
                                 out,  slots,           capacity};
  check_encode(request);
  RiceArguments rice = check_rice(value_dtype, log2_span, without_indices);
  const PruneArguments pruning =
      check_pruning({grad, residual, range_offsets, thresholds, tie_chances, leak, key, staged});
  if (is_quantised(rice.dtype)) rice.residual = pruning.residual;
  rice.residual_dtype = pruning.residual_dtype;
  rice.key = key;
  torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  return run_encoder(
      request, [&](const EncodeArguments& a) { return rice_encode_workspace_bytes(a, rice); },
      [&](const EncodeArguments& a, void* stream) {
        launch_rice_prune_encode(a, rice, pruning, stream);
      });
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def(
      "encode_rice_records(Tensor grad, Tensor segment_offsets, Tensor segment_formats, "
      "int value_dtype, int step, int log2_span, bool without_indices, Tensor(a!) out, "
      "Tensor(b!)? residual=None, Tensor? slots=None) -> Tensor");
  m.def(
      "prune_encode_rice_records(Tensor grad, Tensor(a!) residual, Tensor range_offsets, "
      "Tensor thresholds, float leak, int key, Tensor segment_offsets, Tensor segment_formats, "
      "int value_dtype, int step, int log2_span, bool without_indices, Tensor(b!) out, "
      "Tensor? capacity=None, Tensor? slots=None, Tensor? tie_chances=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("encode_rice_records", TORCH_BOX(&megatron_sparse::encode_rice_records));
  m.impl("prune_encode_rice_records", TORCH_BOX(&megatron_sparse::prune_encode_rice_records));
}
