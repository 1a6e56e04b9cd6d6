// prune_encode on the CPU: gradient + residual -> message + new residual, in one pass over both.
//
// The gradient and the residual are read once, the residual and the message are written once.
// In between the elements are staged as stage.h describes. The bytes are those of prune_ followed
// by encode.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "encode.h"
#include "prune_pass.h"

namespace megatron_sparse {
namespace {

std::tuple<Tensor, Tensor> prune_encode_cpu(
    const Tensor& grad, const Tensor& residual, const Tensor& range_offsets,
    const Tensor& thresholds, const Tensor& segment_offsets, const Tensor& segment_dense,
    double leak, int64_t wire_dtype, int64_t key, int64_t step, const Tensor& out,
    const Tensor& scratch, int64_t kind, int64_t block_size, std::optional<Tensor> capacity_nnz,
    std::optional<Tensor> slots, std::optional<Tensor> tie_chances) {
  const PrunePass pass(grad, residual, range_offsets, thresholds, tie_chances, leak, wire_dtype,
                       key);
  const EncodeRequest request =
      check_encode("prune_encode", grad.numel(), segment_offsets, segment_dense, wire_dtype, step,
                   out, scratch, kind, block_size);
  const Capacity capacity = {
      check_capacity(capacity_nnz, request.segment_count, "prune_encode: capacity")};
  const int64_t* slot = check_slots(slots, request.segment_count, "prune_encode: slots");
  // The residual changes before the size is known, so `out` must have room for the largest size.
  int64_t most = 0;
  for (int64_t s = 0; s < request.segment_count; ++s) {
    const int64_t numel = request.offsets[s + 1] - request.offsets[s];
    const int64_t nnz = capacity.of(s, numel);
    // There are at most as many non-zero blocks as non-zero elements.
    const int64_t blocks =
        kind == kKindBlocks ? std::min(nnz, (numel + block_size - 1) / block_size) : 0;
    const int64_t bytes = plan_record(kind, request.always_dense[s], 0, numel, {nnz, blocks},
                                      block_size, request.value_bytes())
                              .bytes();
    check_fits("prune_encode", slot, s, bytes);
    most = slot == nullptr ? most + bytes : slot[s + 1];
  }
  MS_CHECK(out.numel() >= most, "prune_encode: the output buffer is too small", most << " bytes",
           out.numel());

  std::vector<StageChunk> chunks = cut_chunks(request.offsets, request.segment_count,
                                              request.value_bytes(), scratch.mutable_data_ptr());
  const int64_t chunk_count = chunks.size();
  torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
    uint8_t* values = chunks[begin].slot;
    for (int64_t c = begin; c < end; ++c) {
      pass.stage(chunks[c], values);
      values += chunks[c].nnz * request.value_bytes();
    }
  });
  std::vector<SegmentCount> counts = pass.limit(chunks, request.segment_count, capacity);
  if (kind == kKindBlocks) counts = count_blocks(chunks, request);
  std::vector<Record> records = plan_records(request, counts);
  Tensor record_bytes = torch::stable::new_empty(segment_offsets, {request.segment_count});
  Tensor nnz = torch::stable::new_empty(segment_offsets, {request.segment_count});
  list_sizes(records, static_cast<int64_t*>(record_bytes.mutable_data_ptr()));
  int64_t* nonzero = static_cast<int64_t*>(nnz.mutable_data_ptr());
  for (const SegmentCount& count : counts) *nonzero++ = count.nnz;
  start_records(records, static_cast<int>(wire_dtype), static_cast<uint32_t>(step),
                static_cast<uint8_t*>(out.mutable_data_ptr()), slot);
  torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      place_chunk(chunks[c], records[chunks[c].segment], static_cast<int>(wire_dtype), kernels());
    }
  });
  return {record_bytes, nnz};
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("prune_encode", TORCH_BOX(&megatron_sparse::prune_encode_cpu));
}
