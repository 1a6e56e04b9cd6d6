// encode on the CPU: the bucket becomes one record for each segment, dense where that is smaller.
//
// The gradient is read once: chunks stage the non-zero elements (stage.h), and place them once each
// chunk's place is known. Dense records are converted from the gradient instead. Neither chunks nor
// bytes depend on the number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "encode.h"
#include "isa.h"

namespace megatron_sparse {
namespace {

Tensor encode_cpu(const Tensor& grad, const Tensor& segment_offsets, const Tensor& segment_dense,
                  const Tensor& nnz, int64_t value_dtype, int64_t step, const Tensor& out,
                  const Tensor& scratch, int64_t kind, int64_t block_size,
                  std::optional<Tensor> slots) {
  check_flat(grad, "encode: grad");
  MS_CHECK(grad.is_cpu() && nnz.is_cpu(), "encode: a tensor is on the wrong device",
           "all on the CPU", "another");
  const int grad_dtype = dtype_code(grad, "encode: grad");
  const EncodeRequest request = check_encode("encode", grad.numel(), segment_offsets, segment_dense,
                                             value_dtype, step, out, scratch, kind, block_size);
  check_vector(nnz, "encode: nnz", ScalarType::Long, request.segment_count);
  const int64_t* counts = static_cast<const int64_t*>(nnz.const_data_ptr());
  const int64_t* offsets = request.offsets;

  // The number of blocks is known only after the pass over the gradient; until then every record
  // that could consist of blocks counts as such.
  std::vector<SegmentCount> found(request.segment_count);
  for (int64_t s = 0; s < request.segment_count; ++s) {
    const int64_t numel = offsets[s + 1] - offsets[s];
    MS_CHECK(counts[s] >= 0 && counts[s] <= numel,
             "encode: nnz of segment " << s << " is impossible", "0 to " << numel, counts[s]);
    found[s].nnz = counts[s];
  }
  std::vector<Record> records = plan_records(request, found);
  std::vector<StageChunk> chunks =
      cut_chunks(offsets, request.segment_count, request.value_bytes(), scratch.mutable_data_ptr());
  const Kernels& kernel = kernels();
  const char* data = static_cast<const char*>(grad.const_data_ptr());
  const int64_t grad_bytes = dtype_bytes(grad_dtype), chunk_count = chunks.size();
  torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
    uint8_t* values = chunks[begin].slot;
    for (int64_t c = begin; c < end; ++c) {
      StageChunk& chunk = chunks[c];
      if (records[chunk.segment].kind == kKindDense) continue;
      chunk.values = values;
      chunk.nnz = kernel.stage[grad_dtype][value_dtype](data + chunk.begin * grad_bytes,
                                                        chunk.end - chunk.begin,
                                                        {chunk.words, nullptr, 0, values});
      clear_words_behind(chunk);
      values += chunk.nnz * request.value_bytes();
    }
  });
  found =
      kind == kKindBlocks ? count_blocks(chunks, request) : add_up(chunks, request.segment_count);
  for (int64_t s = 0; s < request.segment_count; ++s) {
    if (records[s].kind == kKindDense) {
      found[s].nnz = counts[s];
    }
    MS_CHECK(found[s].nnz == counts[s],
             "encode: nnz of segment " << s << " is not what the gradient holds", found[s].nnz,
             counts[s]);
  }
  if (kind == kKindBlocks) records = plan_records(request, found);

  Tensor record_bytes = torch::stable::new_empty(nnz, {request.segment_count});
  int64_t used = list_sizes(records, static_cast<int64_t*>(record_bytes.mutable_data_ptr()));
  const int64_t* slot = check_slots(slots, request.segment_count, "encode: slots");
  for (int64_t s = 0; s < request.segment_count; ++s) {
    check_fits("encode", slot, s, records[s].bytes());
  }
  if (slot != nullptr) used = slot[request.segment_count];
  MS_CHECK(used <= out.numel(), "encode: the output buffer is too small", used << " bytes",
           out.numel());
  start_records(records, static_cast<int>(value_dtype), static_cast<uint32_t>(step),
                static_cast<uint8_t*>(out.mutable_data_ptr()), slot);
  torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const StageChunk& chunk = chunks[c];
      const Record& record = records[chunk.segment];
      if (record.kind == kKindDense) {
        kernel.convert[grad_dtype][value_dtype](
            data + chunk.begin * grad_bytes, chunk.end - chunk.begin,
            record.payload + (chunk.begin - record.offset) * request.value_bytes());
      } else {
        place_chunk(chunk, record, static_cast<int>(value_dtype), kernel);
      }
    }
  });
  return record_bytes;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("encode", TORCH_BOX(&megatron_sparse::encode_cpu));
}
