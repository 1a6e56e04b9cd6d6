// encode and prune_encode on the CPU: the bucket becomes one record for each segment, dense where
// that is smaller.
//
// The gradient is read once, and so is the residual, which prune_encode writes: chunks stage what
// is sent (stage.h), and place it once each chunk's place is known. The bytes of prune_encode are
// those of prune_ followed by encode. Neither chunks nor bytes depend on the number of threads.
#include "encode.h"

#include <torch/csrc/stable/library.h>

#include <memory>

#include "isa.h"

namespace megatron_sparse {

namespace {

// Memory that the calling thread keeps for its next call: fresh pages for every long bucket would
// cost half as much as its encoding.
void* kept_scratch(int64_t bytes) {
  static thread_local std::unique_ptr<uint64_t[]> room;
  static thread_local int64_t room_bytes = 0;
  if (bytes > room_bytes) {
    room.reset();
    room_bytes = 0;  // stays so if there is no memory
    room.reset(new uint64_t[(bytes + 7) / 8]);
    room_bytes = (bytes + 7) / 8 * 8;
  }
  return room.get();
}

}  // namespace

EncodeCall::EncodeCall(const EncodeRequest& request) : EncodeRequest(request) {
  offsets = static_cast<const int64_t*>(segment_offsets.const_data_ptr());
  kinds = static_cast<const uint8_t*>(segment_kinds.const_data_ptr());
  int64_t needed = scratch_bytes(offsets, segment_count(), value_bytes(), span());
  for (int64_t s = 0; s < segment_count(); ++s) {
    MS_CHECK(numel(s) <= kMaxSegmentNumel, op << ": segment " << s << " is too long",
             "at most 2^31 - 1 elements", numel(s));
    for (int64_t left = is_rice() ? numel(s) : 0; left > 0; left -= span()) {
      needed += 4 * index_room_words(std::min(left, span()));
    }
  }
  place = check_slots(slots, segment_count(), std::string(op) + ": slots");
  scratch = kept_scratch(needed);
}

int64_t EncodeCall::most_bytes(int64_t s, int64_t entries) const {
  if (!is_rice()) {
    // There are at most as many non-zero blocks as non-zero elements.
    const int64_t blocks =
        block_size == 0 ? 0 : std::min(entries, (numel(s) + block_size - 1) / block_size);
    return plan_record(kinds[s], 0, numel(s), {entries, blocks}, block_size, value_bytes()).bytes();
  }
  const int span = static_cast<int>(log2_span);
  const int64_t dense = pad16(numel(s) * dtype_bytes(dtype_of(s)));
  if (is_kept(s)) return kHeaderBytes + dense;
  const int64_t words = without_indices ? whole_words(numel(s), dtype(), span)
                                        : most_rice_words(numel(s), entries, dtype(), span);
  const int64_t payload = rice_payload(chunks_of(numel(s), span), !without_indices, words);
  return kHeaderBytes + (is_quantised(dtype()) ? payload : std::min(dense, payload));
}

Tensor EncodeCall::report(const std::vector<Record>& records) const {
  Tensor words = torch::stable::new_zeros(segment_offsets, {4 + 2 * segment_count()});
  int64_t* sizes = static_cast<int64_t*>(words.mutable_data_ptr()) + 4;
  int64_t used = 0;
  for (int64_t s = 0; s < segment_count(); ++s) {
    sizes[s] = records[s].bytes();
    sizes[segment_count() + s] = records[s].nnz;
    check_fits(s, sizes[s]);
    used += sizes[s];
  }
  check_out(used);
  return words;
}

namespace {

std::vector<Record> plan_records(const EncodeCall& call, const std::vector<SegmentCount>& counts) {
  std::vector<Record> records;
  for (int64_t s = 0; s < call.segment_count(); ++s) {
    records.push_back(plan_record(call.kinds[s], call.offsets[s], call.numel(s), counts[s],
                                  call.block_size, call.value_bytes()));
  }
  return records;
}

std::vector<StageChunk> cut(const EncodeCall& call) {
  return cut_chunks(call.offsets, call.segment_count(), call.value_bytes(), call.scratch);
}

// Calls stage(chunk, values), which puts a chunk's values there. The chunks that one thread stages
// in a row pack them back to back.
template <class Stage>
void stage_all(std::vector<StageChunk>& chunks, int64_t value_bytes, Stage stage) {
  torch::stable::parallel_for(0, chunks.size(), 1, [&](int64_t begin, int64_t end) {
    uint8_t* values = chunks[begin].slot;
    for (int64_t c = begin; c < end; ++c) {
      stage(chunks[c], values);
      values += chunks[c].nnz * value_bytes;
    }
  });
}

// The counts of all segments, with those of the blocks, if there are any.
std::vector<SegmentCount> count_all(const EncodeCall& call, std::vector<StageChunk>& chunks) {
  const int64_t blocks_in = call.block_size == 0 ? 0 : chunks.size();
  for_each(blocks_in, [&](int64_t c) {
    // What is dense anyway is not staged.
    if (chunks[c].values != nullptr) chunks[c].blocks = count_blocks(chunks[c], call.block_size);
  });
  return add_up(chunks, call.segment_count());
}

// Writes the records; place(chunk, record) writes a chunk's part of its record.
template <class Place>
Tensor write_records(const EncodeCall& call, std::vector<Record>& records,
                     const std::vector<StageChunk>& chunks, Place place) {
  const Tensor report = call.report(records);
  start_records(records, staged_dtype(call.dtype()), static_cast<uint32_t>(call.step),
                static_cast<uint8_t*>(call.out.mutable_data_ptr()), call.place);
  for_each(chunks.size(), [&](int64_t c) { place(chunks[c], records[chunks[c].segment]); });
  return report;
}

Tensor encode_cpu(const EncodeRequest& request) {
  const EncodeCall call(request);
  if (call.is_rice()) return encode_rice(call);
  MS_CHECK(call.nnz.has_value(), "encode: nnz is missing", "the counts of a gradient on the CPU",
           "None");
  const int64_t* counts = static_cast<const int64_t*>(call.nnz->const_data_ptr());
  std::vector<SegmentCount> found(call.segment_count());
  for (int64_t s = 0; s < call.segment_count(); ++s) {
    MS_CHECK(counts[s] >= 0 && counts[s] <= call.numel(s),
             "encode: nnz of segment " << s << " is impossible", "0 to " << call.numel(s),
             counts[s]);
    found[s].nnz = counts[s];
  }
  // The number of blocks is known only after the pass over the gradient; until then every record
  // that could consist of blocks counts as such.
  std::vector<Record> records = plan_records(call, found);
  std::vector<StageChunk> chunks = cut(call);
  const Kernels& kernel = kernels();
  const int grad_dtype = dtype_code(call.grad, "encode: grad"), dtype = staged_dtype(call.dtype());
  const char* data = static_cast<const char*>(call.grad.const_data_ptr());
  const int64_t grad_bytes = dtype_bytes(grad_dtype), value_bytes = call.value_bytes();
  stage_all(chunks, value_bytes, [&](StageChunk& chunk, uint8_t* values) {
    if (records[chunk.segment].kind == kKindDense) return;
    chunk.values = values;
    chunk.nnz =
        kernel.stage[grad_dtype][dtype](data + chunk.begin * grad_bytes, chunk.end - chunk.begin,
                                        {chunk.words, nullptr, 0, values});
    clear_words_behind(chunk);
  });
  found = count_all(call, chunks);
  for (int64_t s = 0; s < call.segment_count(); ++s) {
    if (records[s].kind == kKindDense) found[s].nnz = counts[s];
    MS_CHECK(found[s].nnz == counts[s],
             "encode: nnz of segment " << s << " is not what the gradient holds", found[s].nnz,
             counts[s]);
  }
  records = plan_records(call, found);
  return write_records(call, records, chunks, [&](const StageChunk& chunk, const Record& record) {
    if (record.kind != kKindDense) return place_chunk(chunk, record, dtype, kernel);
    kernel.convert[grad_dtype][dtype](data + chunk.begin * grad_bytes, chunk.end - chunk.begin,
                                      record.payload + (chunk.begin - record.offset) * value_bytes);
  });
}

Tensor prune_encode_cpu(const EncodeRequest& request, const PruneRequest& pruning) {
  const EncodeCall call(request);
  const PrunePass pass(pruning);
  const Capacity capacity = {
      check_capacity(call.capacity, call.segment_count(), "prune_encode: capacity")};
  call.check_room([&](int64_t s) { return capacity.of(s, call.numel(s)); });
  if (call.is_rice()) return prune_encode_rice(call, pass, capacity);
  std::vector<StageChunk> chunks = cut(call);
  stage_all(chunks, call.value_bytes(),
            [&](StageChunk& chunk, uint8_t* values) { pass.stage(chunk, values); });
  pass.limit(chunks, call.segment_count(), capacity);
  std::vector<Record> records = plan_records(call, count_all(call, chunks));
  return write_records(call, records, chunks, [&](const StageChunk& chunk, const Record& record) {
    place_chunk(chunk, record, staged_dtype(call.dtype()), kernels());
  });
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("encode", TORCH_BOX(&megatron_sparse::encode<megatron_sparse::encode_cpu>));
  m.impl("prune_encode",
         TORCH_BOX(&megatron_sparse::prune_encode<megatron_sparse::prune_encode_cpu>));
}
