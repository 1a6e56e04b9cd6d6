// sample_threshold's arguments and results on either device, and their checks; the caller has
// checked offsets and densities.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "check.h"
#include "threshold_launch.h"

namespace megatron_sparse {

using ThresholdResults = std::tuple<Tensor, Tensor, Tensor>;  // thresholds, tie chances, ties

inline ThresholdArguments check_threshold(const Tensor& grad, const std::optional<Tensor>& residual,
                                          const Tensor& range_offsets, const Tensor& densities,
                                          int64_t samples, const Tensor& keys) {
  check_flat(grad, "sample_threshold: grad");
  ThresholdArguments call = {};
  call.grad = grad.const_data_ptr();
  call.grad_dtype = dtype_code(grad, "sample_threshold: grad");
  call.numel = grad.numel();
  if (residual.has_value()) {
    check_vector(*residual, "sample_threshold: residual", residual->scalar_type(), call.numel,
                 grad);
    call.residual = residual->const_data_ptr();
    call.residual_dtype = dtype_code(*residual, "sample_threshold: residual");
  }
  call.range_count = densities.numel();
  check_vector(keys, "sample_threshold: keys", ScalarType::Long, call.range_count, grad);
  MS_CHECK(samples >= 1 && samples < int64_t{1} << 31, "sample_threshold: samples is out of range",
           "1 to 2^31 - 1", samples);
  call.samples = samples;
  call.range_offsets = static_cast<const int64_t*>(range_offsets.const_data_ptr());
  call.densities = static_cast<const float*>(densities.const_data_ptr());
  call.keys = static_cast<const int64_t*>(keys.const_data_ptr());
  return call;
}

// The tensors that a call writes.
inline ThresholdResults make_results(ThresholdArguments& call, const Tensor& densities,
                                     const Tensor& keys) {
  const Tensor thresholds = torch::stable::new_empty(densities, {call.range_count});
  const Tensor tie_chances = torch::stable::new_empty(densities, {call.range_count});
  const Tensor ties = torch::stable::new_empty(keys, {call.range_count});
  call.thresholds = static_cast<float*>(thresholds.mutable_data_ptr());
  call.tie_chances = static_cast<float*>(tie_chances.mutable_data_ptr());
  call.ties = static_cast<int64_t*>(ties.mutable_data_ptr());
  return {thresholds, tie_chances, ties};
}

}  // namespace megatron_sparse
