// What the encoders of all formats are asked for, on the CPU and on CUDA: one order of arguments,
// and their checks. The caller has checked the tables of segments, which may lie on a device, and
// value_dtype. library.cpp has the schemas.
#pragma once

#include <optional>
#include <string>

#include "check.h"
#include "prune.h"
#include "record.h"

namespace megatron_sparse {

struct EncodeRequest {
  const char* op;  // for errors
  const Tensor& grad;
  const Tensor& segment_offsets;  // [segments + 1]
  const Tensor& segment_kinds;    // [segments]: RecordKind; kKindRice or kKindDense of Rice
  int64_t value_dtype;
  int64_t step;
  int64_t block_size;    // of blocks: a power of two in [64, 4096]; 0 if none is requested
  int64_t log2_span;     // of Rice: the elements of a chunk; 0 for the other formats
  bool without_indices;  // of Rice: every element of every segment has a value
  const Tensor& out;
  std::optional<Tensor> slots;     // [segments + 1]; none for records back to back
  std::optional<Tensor> nnz;       // [segments], of encode on the CPU
  std::optional<Tensor> residual;  // of encode: of quantised values, fp32 for every element
  std::optional<Tensor> capacity;  // of prune_encode: [segments] the most non-zero elements

  int64_t segment_count() const { return segment_kinds.numel(); }
  bool is_rice() const { return log2_span != 0; }
  int dtype() const { return static_cast<int>(value_dtype); }
};

inline void check_encode(const EncodeRequest& r) {
  const auto name = [&](const char* what) { return std::string(r.op) + ": " + what; };
  const int64_t numel = r.grad.numel(), segments = r.segment_count();
  check_flat(r.grad, name("grad"));
  dtype_code(r.grad, name("grad"));
  check_vector(r.out, name("out"), ScalarType::Byte, -1, r.grad);
  check_table(r.slots, name("slots"), segments + 1, r.grad);
  check_table(r.nnz, name("nnz"), segments, r.grad);
  check_table(r.capacity, name("capacity"), segments, r.grad);
  if (r.residual.has_value()) {
    check_vector(*r.residual, name("residual"), ScalarType::Float, numel, r.grad);
  }
  MS_CHECK(r.step >= 0, name("step is out of range"), "0 or more", r.step);
  if (r.is_rice()) {
    MS_CHECK(r.log2_span >= kLeastSpan && r.log2_span <= kMostSpan,
             name("log2_span is out of range"), kLeastSpan << " to " << kMostSpan, r.log2_span);
    MS_CHECK(!r.without_indices || r.value_dtype == kQ8 || r.value_dtype == kQ4,
             name("a value of every element needs other values"), "3 (q8) or 4 (q4)",
             r.value_dtype);
  }
  MS_CHECK(r.block_size == 0 || is_block_size(r.block_size), name("block_size does not fit"),
           "0, or a power of two from 64 to 4096", r.block_size);
  MS_CHECK(!r.residual.has_value() || is_quantised(r.dtype()),
           name("a residual needs quantised values"), "3 to 6", r.value_dtype);
}

// The ops' functions; a device's implementation gets the request.
template <Tensor (*RUN)(const EncodeRequest&)>
Tensor encode(const Tensor& grad, const Tensor& segment_offsets, const Tensor& segment_kinds,
              int64_t value_dtype, int64_t step, int64_t block_size, int64_t log2_span,
              bool without_indices, const Tensor& out, std::optional<Tensor> slots,
              std::optional<Tensor> nnz, std::optional<Tensor> residual) {
  const EncodeRequest request = {"encode",        grad,        segment_offsets, segment_kinds,
                                 value_dtype,     step,        block_size,      log2_span,
                                 without_indices, out,         slots,           nnz,
                                 residual,        std::nullopt};
  check_encode(request);
  return RUN(request);
}

template <Tensor (*RUN)(const EncodeRequest&, const PruneRequest&)>
Tensor prune_encode(const Tensor& grad, const Tensor& segment_offsets, const Tensor& segment_kinds,
                    int64_t value_dtype, int64_t step, int64_t block_size, int64_t log2_span,
                    bool without_indices, const Tensor& out, std::optional<Tensor> slots,
                    const Tensor& residual, const Tensor& range_offsets, const Tensor& thresholds,
                    std::optional<Tensor> tie_chances, double leak, int64_t key,
                    std::optional<Tensor> capacity, std::optional<Tensor> old_residual) {
  const EncodeRequest request = {"prune_encode",  grad,    segment_offsets, segment_kinds,
                                 value_dtype,     step,    block_size,      log2_span,
                                 without_indices, out,     slots,           std::nullopt,
                                 std::nullopt,    capacity};
  check_encode(request);
  return RUN(request,
             {grad, old_residual.has_value() ? *old_residual : residual, residual, range_offsets,
              thresholds, tie_chances, leak, key, staged_dtype(request.dtype())});
}

}  // namespace megatron_sparse
