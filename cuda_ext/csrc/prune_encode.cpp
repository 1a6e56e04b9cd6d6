// prune_encode on the CPU: gradient + residual -> message + new residual, in one pass over both.
//
// The gradient and the residual are read once, the residual and the message are written once.
// In between the elements are staged as stage.h describes. The bytes are those of prune_ followed
// by encode.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "capacity.h"
#include "encode.h"
#include "isa.h"
#include "prune.h"

namespace megatron_sparse {
namespace {

std::tuple<Tensor, Tensor> prune_encode_cpu(
    const Tensor& grad, const Tensor& residual, const Tensor& range_offsets,
    const Tensor& thresholds, const Tensor& segment_offsets, const Tensor& segment_dense,
    double leak, int64_t wire_dtype, int64_t key, int64_t step, const Tensor& out,
    const Tensor& scratch, int64_t kind, int64_t block_size, std::optional<Tensor> capacity_nnz,
    std::optional<Tensor> slots, std::optional<Tensor> tie_chances) {
  const PruneTypes types = check_prune(grad, residual, thresholds, tie_chances, leak, wire_dtype);
  MS_CHECK(grad.is_cpu() && residual.is_cpu() && thresholds.is_cpu(),
           "prune_encode: a tensor is on the wrong device", "all on the CPU", "another");
  const int64_t range_count = thresholds.numel();
  check_vector(range_offsets, "prune_encode: range_offsets", ScalarType::Long, range_count + 1);
  const int64_t* ranges = check_offsets(range_offsets, "prune_encode: range_offsets");
  check_cut(ranges, range_count, grad.numel(), "prune_encode: range_offsets");
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

  const Kernels& kernel = kernels();
  const auto prune = kernel.prune_stage[types.grad][types.residual][wire_dtype][key >= 0];
  const PruneSeeds seeds = prune_seeds(key);
  const float* thresholds_data = static_cast<const float*>(thresholds.const_data_ptr());
  const float* chances = chances_of(tie_chances);
  // prune_stage only reads it; the kernel that prunes in place also uses PruneCall.
  char* grad_data = static_cast<char*>(const_cast<void*>(grad.const_data_ptr()));
  char* residual_data = static_cast<char*>(residual.mutable_data_ptr());
  const int64_t grad_bytes = dtype_bytes(types.grad), residual_bytes = dtype_bytes(types.residual);

  std::vector<StageChunk> chunks = cut_chunks(request.offsets, request.segment_count,
                                              request.value_bytes(), scratch.mutable_data_ptr());
  const int64_t chunk_count = chunks.size();
  torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
    uint8_t* values = chunks[begin].slot;
    int64_t range = 0;
    for (int64_t c = begin; c < end; ++c) {
      StageChunk& chunk = chunks[c];
      chunk.values = values;
      range = std::upper_bound(ranges + range, ranges + range_count + 1, chunk.begin) - ranges - 1;
      for (int64_t at = chunk.begin; at < chunk.end;) {
        while (at == ranges[range + 1]) ++range;
        // The upper half of an element's index is constant in a call.
        const int64_t high_stop = (at | int64_t{0xffffffff}) + 1;
        const int64_t stop = std::min({chunk.end, ranges[range + 1], high_stop});
        const PruneCall call = {
            grad_data + at * grad_bytes,
            residual_data + at * residual_bytes,
            stop - at,
            static_cast<uint64_t>(at),
            limit_at(thresholds_data, chances, range),
            static_cast<float>(leak),
            seeds,
        };
        const int64_t found = prune(call, {chunk.words, chunk.signs, at - chunk.begin, values});
        chunk.nnz += found;
        values += found * request.value_bytes();
        at = stop;
      }
      finish_chunk(chunk, request);
    }
  });

  std::vector<SegmentCount> counts = add_up(chunks, request.segment_count);
  const auto overflows = [&](int64_t s) { return counts[s].nnz > capacity.of(s, INT64_MAX); };
  bool too_many = false;
  for (int64_t s = 0; s < request.segment_count; ++s) too_many |= overflows(s);
  if (too_many) {
    const auto prune_staged = kernel.prune[wire_dtype][types.residual][wire_dtype][key >= 0];
    std::vector<uint8_t> special(chunk_count, 0);  // chunks that held infinity or NaN back
    torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const int64_t stay = staying(chunks[c], capacity);
        if (stay == chunks[c].nnz) continue;
        const auto give_back = [&](int64_t element, uint8_t* value) {
          const PruneCall call = {value,
                                  residual_data + element * residual_bytes,
                                  1,
                                  static_cast<uint64_t>(element),
                                  drop_finite(),
                                  static_cast<float>(leak),
                                  seeds};
          if (prune_staged(call) == 0) return;
          if (capacity.of(chunks[c].segment, 1) > 0) {
            special[c] = true;
          } else {
            store_nan(residual_data + element * residual_bytes, types.residual);
          }
        };
        limit_chunk(chunks[c], stay, request.value_bytes(), give_back);
        finish_chunk(chunks[c], request);
      }
    });
    counts = add_up(chunks, request.segment_count);
    for (int64_t c = 0; c < chunk_count; ++c) {
      if (special[c]) make_last_nan(chunks, chunks[c].segment, static_cast<int>(wire_dtype));
    }
  }
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
      place_chunk(chunks[c], records[chunks[c].segment], static_cast<int>(wire_dtype), kernel);
    }
  });
  return {record_bytes, nnz};
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("prune_encode", TORCH_BOX(&megatron_sparse::prune_encode_cpu));
}
