// The request and the checks that prune_ and both bindings of prune_encode share.
#pragma once

#include <optional>

#include "check.h"

namespace megatron_sparse {

struct PruneRequest {
  const Tensor& grad;
  const Tensor& residual;
  const Tensor& range_offsets;
  const Tensor& thresholds;
  const std::optional<Tensor>& tie_chances;
  double leak;
  int64_t key;
  int64_t wire_dtype;  // of the values that are sent, before they are quantised

  // Null where nothing is sent as a tie.
  const float* chances() const {
    if (!tie_chances.has_value()) return nullptr;
    return static_cast<const float*>(tie_chances->const_data_ptr());
  }
};

struct PruneTypes {
  int grad;
  int residual;
};

// Does not read range_offsets, which may lie on a device: for any content, kernels find a range
// inside the table for every element.
inline PruneTypes check_prune(const PruneRequest& r) {
  check_flat(r.grad, "prune_: grad");
  check_flat(r.residual, "prune_: residual");
  const PruneTypes types = {dtype_code(r.grad, "prune_: grad"),
                            dtype_code(r.residual, "prune_: residual")};
  MS_CHECK(types.residual != kFp16, "prune_: residual has the wrong dtype", "float32 or bfloat16",
           "float16");
  const int64_t numel = r.grad.numel(), ranges = r.thresholds.numel();
  MS_CHECK(r.residual.numel() == numel, "prune_: residual has the wrong length", numel,
           r.residual.numel());
  MS_CHECK(numel <= kMaxNumel, "prune_: grad is too long", "at most 2^40 elements", numel);
  MS_CHECK(r.leak >= 0 && r.leak <= 1, "prune_: leak is out of range", "0 to 1", r.leak);
  check_vector(r.thresholds, "prune_: thresholds", ScalarType::Float, -1);
  check_vector(r.range_offsets, "prune_: range_offsets", ScalarType::Long, ranges + 1);
  MS_CHECK(ranges > 0 || numel == 0, "prune_: thresholds is empty", "one for each range", 0);
  bool beside = is_beside(r.residual, r.grad) && is_beside(r.range_offsets, r.grad) &&
                is_beside(r.thresholds, r.grad);
  if (r.tie_chances.has_value()) {
    check_vector(*r.tie_chances, "prune_: tie_chances", ScalarType::Float, ranges);
    beside &= is_beside(*r.tie_chances, r.grad);
  }
  MS_CHECK(beside, "prune_: a tensor is on the wrong device", "all on grad's device", "another");
  check_dtype_code(r.wire_dtype, "prune_: wire_dtype");
  return types;
}

// The ranges of a request on the CPU, which cut the gradient.
inline const int64_t* check_ranges(const PruneRequest& r) {
  const int64_t* ranges = check_offsets(r.range_offsets, "prune_: range_offsets");
  check_cut(ranges, r.thresholds.numel(), r.grad.numel(), "prune_: range_offsets");
  return ranges;
}

}  // namespace megatron_sparse
