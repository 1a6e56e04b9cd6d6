// The checks that prune_ and both bindings of prune_encode share.
#pragma once

#include "check.h"

namespace megatron_sparse {

struct PruneTypes {
  int grad;
  int residual;
};

inline PruneTypes check_prune(const Tensor& grad, const Tensor& residual, const Tensor& thresholds,
                              double leak, int64_t wire_dtype) {
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
  check_dtype_code(wire_dtype, "prune_: wire_dtype");
  return types;
}

}  // namespace megatron_sparse
