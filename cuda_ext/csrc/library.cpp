// The schemas of all ops; each op's file registers its CPU implementation.
#include <torch/csrc/stable/library.h>

#include <string>

#include "isa.h"

STABLE_TORCH_LIBRARY(megatron_sparse, m) {
  m.def(
      "prune_(Tensor(a!) grad, Tensor(b!) residual, Tensor range_offsets, Tensor thresholds, "
      "float leak, int wire_dtype, int key, Tensor? tie_chances=None) -> Tensor");
  m.def(
      "sample_threshold(Tensor grad, Tensor? residual, Tensor range_offsets, Tensor densities, "
      "int samples, Tensor keys) -> (Tensor, Tensor, Tensor)");
  m.def(
      "encode(Tensor grad, Tensor segment_offsets, Tensor segment_kinds, int value_dtype, "
      "int step, int block_size, int log2_span, bool without_indices, Tensor(a!) out, "
      "Tensor? slots=None, Tensor? nnz=None, Tensor(b!)? residual=None) -> Tensor");
  m.def(
      "prune_encode(Tensor grad, Tensor segment_offsets, Tensor segment_kinds, int value_dtype, "
      "int step, int block_size, int log2_span, bool without_indices, Tensor(a!) out, "
      "Tensor? slots, Tensor(b!) residual, Tensor range_offsets, Tensor thresholds, "
      "Tensor? tie_chances, float leak, int key, Tensor? capacity=None, "
      "Tensor? old_residual=None) -> Tensor");
  m.def(
      "decode_(Tensor(a!) acc, Tensor[] messages, Tensor segment_offsets, int value_dtype, "
      "int step, int base, bool fresh, bool is_sum, Tensor? slots=None, Tensor? sums=None) "
      "-> Tensor");
  m.def("supported_isas() -> str");
  m.def("choose_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CompositeExplicitAutograd, m) {
  m.impl("supported_isas", TORCH_BOX(&megatron_sparse::supported_isas));
  m.impl("choose_isa", TORCH_BOX(&megatron_sparse::choose_isa));
}
