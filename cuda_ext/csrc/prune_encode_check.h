// The checks and arguments of pruning that the CUDA bindings of prune_encode_records and
// prune_encode_rice_records share.
#pragma once

#include "encode_check.h"
#include "prune.h"

namespace megatron_sparse {

struct PruneRequest {
  const Tensor& grad;
  const Tensor& residual;
  const Tensor& range_offsets;
  const Tensor& thresholds;
  const std::optional<Tensor>& tie_chances;
  double leak;
  int64_t key;
  int64_t value_dtype;  // of the staged values
};

inline PruneArguments check_pruning(const PruneRequest& r) {
  const PruneTypes types =
      check_prune(r.grad, r.residual, r.thresholds, r.tie_chances, r.leak, r.value_dtype);
  const auto device = r.grad.get_device_index();
  const auto here = [device](const Tensor& tensor) {
    return tensor.is_cuda() && tensor.get_device_index() == device;
  };
  MS_CHECK(here(r.residual) && here(r.range_offsets) && here(r.thresholds) &&
               (!r.tie_chances.has_value() || here(*r.tie_chances)),
           "prune_encode_records: a tensor is on the wrong device", "all on grad's CUDA device",
           "another");
  const int64_t range_count = r.thresholds.numel();
  // The content of range_offsets is on the device and is not checked: the kernel finds a range
  // inside the table for every element, for any content.
  check_vector(r.range_offsets, "prune_encode_records: range_offsets", ScalarType::Long,
               range_count + 1);
  MS_CHECK(range_count > 0 || r.grad.numel() == 0, "prune_encode_records: thresholds is empty",
           "one for each range", 0);
  return {r.residual.mutable_data_ptr(),
          static_cast<const int64_t*>(r.range_offsets.const_data_ptr()),
          static_cast<const float*>(r.thresholds.const_data_ptr()),
          chances_of(r.tie_chances),
          range_count,
          static_cast<float>(r.leak),
          r.key,
          types.residual};
}

}  // namespace megatron_sparse
