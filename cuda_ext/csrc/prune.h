// The checks that prune_ and both bindings of prune_encode share.
#pragma once

#include <optional>

#include "check.h"

namespace megatron_sparse {

struct PruneTypes {
  int grad;
  int residual;
};

inline PruneTypes check_prune(const Tensor& grad, const Tensor& residual, const Tensor& thresholds,
                              const std::optional<Tensor>& tie_chances, double leak,
                              int64_t wire_dtype) {
  check_flat(grad, "prune_: grad");
  check_flat(residual, "prune_: residual");
  const PruneTypes types = {dtype_code(grad, "prune_: grad"),
                            dtype_code(residual, "prune_: residual")};
  MS_CHECK(types.residual != kFp16, "prune_: residual has the wrong dtype", "float32 or bfloat16",
           "float16");
  MS_CHECK(residual.numel() == grad.numel(), "prune_: residual has the wrong length", grad.numel(),
           residual.numel());
  MS_CHECK(grad.numel() <= kMaxNumel, "prune_: grad is too long", "at most 2^40 elements",
           grad.numel());
  MS_CHECK(leak >= 0 && leak <= 1, "prune_: leak is out of range", "0 to 1", leak);
  check_vector(thresholds, "prune_: thresholds", ScalarType::Float, -1);
  if (tie_chances.has_value()) {
    check_vector(*tie_chances, "prune_: tie_chances", ScalarType::Float, thresholds.numel());
    MS_CHECK(tie_chances->is_cpu() == thresholds.is_cpu(),
             "prune_: tie_chances is on the wrong device", "thresholds' device", "another");
  }
  check_dtype_code(wire_dtype, "prune_: wire_dtype");
  return types;
}

// The chances' data, or null where nothing is sent as a tie.
inline const float* chances_of(const std::optional<Tensor>& tie_chances) {
  if (!tie_chances.has_value()) return nullptr;
  return static_cast<const float*>(tie_chances->const_data_ptr());
}

}  // namespace megatron_sparse
