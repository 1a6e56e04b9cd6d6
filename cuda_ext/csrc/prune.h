// The request and the checks that prune_ and both bindings of prune_encode share.
#pragma once

#include <optional>

#include "check.h"

namespace megatron_sparse {

struct PruneRequest {
  const Tensor& grad;
  const Tensor& old_residual;  // read
  const Tensor& residual;      // written; may be `old_residual`
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

// The caller has checked the tables of ranges; they may lie on a device.
inline PruneTypes check_prune(const PruneRequest& r) {
  check_flat(r.grad, "prune_: grad");
  check_vector(r.residual, "prune_: residual", r.residual.scalar_type(), r.grad.numel(), r.grad);
  check_vector(r.old_residual, "prune_: old_residual", r.residual.scalar_type(), r.grad.numel(),
               r.grad);
  const PruneTypes types = {dtype_code(r.grad, "prune_: grad"),
                            dtype_code(r.residual, "prune_: residual")};
  MS_CHECK(types.residual != kFp16, "prune_: residual has the wrong dtype", "float32 or bfloat16",
           "float16");
  MS_CHECK(r.leak >= 0 && r.leak <= 1, "prune_: leak is out of range", "0 to 1", r.leak);
  return types;
}

// The ranges of a request on the CPU, which cut the gradient.
inline const int64_t* check_ranges(const PruneRequest& r) {
  const int64_t* ranges = check_offsets(r.range_offsets, "prune_: range_offsets");
  check_cut(ranges, r.thresholds.numel(), r.grad.numel(), "prune_: range_offsets");
  return ranges;
}

}  // namespace megatron_sparse
