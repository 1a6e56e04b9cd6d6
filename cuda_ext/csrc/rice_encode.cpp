#include "rice_encode.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "prune_pass.h"

namespace megatron_sparse {
namespace {

// Words of a chunk's coded gaps: Rice's worst case is a bitmap, and both parts are rounded up.
int64_t index_room_words(int64_t numel) {
  return (2 * stage_words(numel) + 2 + 1) / 2 * 2;
}

// Bytes of scratch: stage.h's, and the coded gaps.
int64_t rice_scratch_bytes(const RiceRequest& request) {
  int64_t bytes = scratch_bytes(request.offsets, request.segment_count,
                                dtype_bytes(request.staged_dtype()), request.span());
  for (int64_t s = 0; s < request.segment_count; ++s) {
    for (int64_t left = request.numel(s); left > 0; left -= request.span()) {
      bytes += 4 * index_room_words(std::min(left, request.span()));
    }
  }
  return bytes;
}

}  // namespace

int64_t RiceRequest::most_bytes(int64_t s, int64_t entries) const {
  const int64_t chunks = chunks_of(numel(s), log2_span);
  const int64_t dense = dense_payload_bytes(numel(s), dtype_bytes(dtype_of(s)));
  if (is_kept(s)) return kHeaderBytes + dense;
  const int64_t words = without_indices ? whole_words(numel(s), dtype, log2_span)
                                        : most_rice_words(numel(s), entries, dtype, log2_span);
  const int64_t payload = rice_payload(chunks, !without_indices, words);
  return kHeaderBytes + (is_quantised(dtype) ? payload : std::min(dense, payload));
}

RiceRequest check_rice(const char* op, int64_t numel, const Tensor& segment_offsets,
                       const Tensor& segment_dense, int64_t value_dtype, int64_t step,
                       int64_t log2_span, bool without_indices, const Tensor& scratch,
                       const std::optional<Tensor>& slots) {
  const auto name = [op](const char* what) { return std::string(op) + ": " + what; };
  MS_CHECK(segment_dense.is_cpu() && scratch.is_cpu(), name("a tensor is on the wrong device"),
           "all on the CPU", "another");
  MS_CHECK(step >= 0, name("step is out of range"), "0 or more", step);
  MS_CHECK(value_dtype >= kFp32 && value_dtype <= kQ2, name("value_dtype is unknown"),
           "0 (fp32), 1 (bf16), 2 (fp16), 3 (q8), 4 (q4), 5 (q3) or 6 (q2)", value_dtype);
  MS_CHECK(log2_span >= kLeastSpan && log2_span <= kMostSpan, name("log2_span is out of range"),
           kLeastSpan << " to " << kMostSpan, log2_span);
  MS_CHECK(!without_indices || value_dtype == kQ8 || value_dtype == kQ4,
           name("a value of every element needs other values"), "3 (q8) or 4 (q4)", value_dtype);
  check_vector(segment_dense, name("segment_dense").c_str(), ScalarType::Byte, -1);
  const int64_t segment_count = segment_dense.numel();
  check_vector(segment_offsets, name("segment_offsets").c_str(), ScalarType::Long,
               segment_count + 1);
  const int64_t* offsets = check_offsets(segment_offsets, name("segment_offsets").c_str());
  check_cut(offsets, segment_count, numel, name("segment_offsets").c_str());
  const RiceRequest request = {offsets,
                               segment_count,
                               static_cast<const uint8_t*>(segment_dense.const_data_ptr()),
                               static_cast<int>(value_dtype),
                               static_cast<int>(log2_span),
                               without_indices,
                               static_cast<uint32_t>(step),
                               check_slots(slots, segment_count, name("slots").c_str())};
  for (int64_t s = 0; s < segment_count; ++s) {
    MS_CHECK(request.numel(s) <= kMaxSegmentNumel, op << ": segment " << s << " is too long",
             "at most 2^31 - 1 elements", request.numel(s));
  }
  check_vector(scratch, name("scratch").c_str(), ScalarType::Byte, -1);
  const int64_t needed = rice_scratch_bytes(request);
  MS_CHECK(scratch.numel() >= needed, name("the scratch buffer is too small"), needed << " bytes",
           scratch.numel());
  MS_CHECK(reinterpret_cast<uintptr_t>(scratch.const_data_ptr()) % 8 == 0,
           name("the scratch buffer is not aligned"), "a multiple of 8 bytes", "another address");
  return request;
}

RiceEncoder::RiceEncoder(const RiceRequest& request, void* scratch)
    : request_(request), kernel_(kernels()) {
  uint32_t* room = static_cast<uint32_t*>(scratch);
  int64_t words = 0;
  for (int64_t s = 0; s < request.segment_count; ++s) {
    for (int64_t left = request.numel(s); left > 0; left -= request.span()) {
      RiceChunk chunk = {};
      chunk.index_room = room + words;
      coded_.push_back(chunk);
      words += index_room_words(std::min(left, request.span()));
    }
  }
  chunks = cut_chunks(request.offsets, request.segment_count, dtype_bytes(request.staged_dtype()),
                      room + words, request.span());
}

int64_t RiceEncoder::code(int64_t c, const RiceFeedback& feedback, RiceRoom& room) {
  const StageChunk& chunk = chunks[c];
  RiceChunk& coded = coded_[c];
  const bool quantised = is_quantised(request_.dtype), kept = request_.is_kept(chunk.segment);
  const int dtype = request_.dtype_of(chunk.segment);
  const int64_t numel = chunk.end - chunk.begin;
  coded.values = chunk.values;
  if (kept && !quantised) return chunk.nnz * dtype_bytes(dtype);  // placed as any dense record
  const bool whole = kept || request_.without_indices;
  RiceValues values = {chunk.values,
                       whole ? numel : chunk.nnz,
                       nullptr,
                       feedback.residual,
                       static_cast<uint64_t>(chunk.begin),
                       feedback.seed,
                       feedback.stochastic,
                       chunk.values,
                       feedback.is_zero && !whole};
  if (feedback.residual != nullptr) {
    values.residual = feedback.residual + chunk.begin * dtype_bytes(feedback.dtype);
  }
  if (whole) {
    room.values.resize(numel);
    kernel_.expand[kFp32](chunk.words, chunk.signs, chunk.values, numel, room.values.data());
    values.values = room.values.data();
  } else if (values.count > 0) {
    room.index.resize(values.count + 1);
    room.index[0] = -1;
    values.index = room.index.data() + 1;
    kernel_.list_bits(chunk.words, (numel + 63) / 64, 0, values.count, room.index.data() + 1);
    coded.index_words = kernel_.rice_code_gaps(
        values.index, values.count, rice_parameter(numel, values.count), coded.index_room);
  }
  if (kept) {
    kernel_.rice_round[feedback.dtype](values);
    return numel * dtype_bytes(dtype);
  }
  coded.value_words = value_words(dtype, values.count);
  if (quantised) {
    kernel_.rice_quantise[dtype - kQ8][feedback.dtype](values);
  } else {
    const int64_t end = values.count * dtype_bytes(dtype);
    std::memset(chunk.values + end, 0, 4 * coded.value_words - end);
  }
  return 4 * coded.value_words;
}

Record RiceEncoder::plan(int64_t s, const SegmentCount& count, int64_t words) const {
  Record record = plan_record(kKindDense, true, request_.offsets[s], request_.numel(s), count, 0,
                              dtype_bytes(request_.dtype_of(s)));
  if (request_.is_kept(s)) return record;
  const int64_t chunks = chunks_of(record.numel, request_.log2_span);
  const int64_t payload = rice_payload(chunks, !request_.without_indices, words);
  if (is_quantised(request_.dtype) || payload < record.at.payload) {
    record.kind = kKindRice;
    record.at.payload = payload;
  }
  return record;
}

void RiceEncoder::start(const Record& record, int64_t first_chunk, int64_t words) const {
  uint8_t* payload = record.payload;
  const bool indices = !request_.without_indices;
  const int64_t count = chunks_of(record.numel, request_.log2_span);
  const RiceSubHeader head = {indices, static_cast<uint8_t>(request_.log2_span), 0,
                              static_cast<uint32_t>(count), static_cast<uint64_t>(words)};
  std::memcpy(payload, &head, sizeof head);
  if (indices) {
    for (int64_t c = 0; c <= count; ++c) {
      const bool end = c == count;
      const RiceRow row = {
          static_cast<uint32_t>(end ? record.nnz : chunks[first_chunk + c].nnz_before),
          static_cast<uint32_t>(end ? words : coded_[first_chunk + c].words_before)};
      std::memcpy(payload + sizeof head + c * sizeof row, &row, sizeof row);
    }
    const int64_t used = 8 * (count + 1);
    std::memset(payload + sizeof head + used, 0, rice_table_bytes(count, true) - used);
  }
  const int64_t begin = sizeof head + rice_table_bytes(count, indices);
  std::memset(payload + begin + 4 * words, 0, record.at.payload - begin - 4 * words);
}

void RiceEncoder::write(const std::vector<SegmentCount>& counts, const Tensor& out, int64_t* sizes,
                        int64_t* nnz) {
  std::vector<int64_t> words(request_.segment_count, 0), first(request_.segment_count, 0);
  for (int64_t c = static_cast<int64_t>(chunks.size()) - 1; c >= 0; --c) {
    first[chunks[c].segment] = c;
  }
  for (size_t c = 0; c < chunks.size(); ++c) {
    coded_[c].words_before = words[chunks[c].segment];
    words[chunks[c].segment] += coded_[c].words();
  }
  std::vector<Record> records;
  for (int64_t s = 0; s < request_.segment_count; ++s) {
    records.push_back(plan(s, counts[s], words[s]));
    nnz[s] = counts[s].nnz;
    check_fits("encode", request_.slots, s, records[s].bytes());
  }
  int64_t used = list_sizes(records, sizes);
  if (request_.slots != nullptr) used = request_.slots[request_.segment_count];
  MS_CHECK(used <= out.numel(), "encode: the output buffer is too small", used << " bytes",
           out.numel());
  uint8_t* at = static_cast<uint8_t*>(out.mutable_data_ptr());
  for (int64_t s = 0; s < request_.segment_count; ++s) {
    Record& record = records[s];
    record.payload = write_header(record, request_.dtype_of(s), request_.step, at);
    if (record.kind == kKindRice) {
      start(record, first[s], words[s]);
    } else {
      std::memset(record.payload + record.at.values_end, 0,
                  record.at.payload - record.at.values_end);
    }
    at = next_record(record, at, request_.slots == nullptr ? nullptr : request_.slots + s);
  }
  torch::stable::parallel_for(0, chunks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const StageChunk& chunk = chunks[c];
      const Record& record = records[chunk.segment];
      if (record.kind == kKindDense && is_quantised(request_.dtype)) {
        const int64_t value_bytes = dtype_bytes(kBf16);
        std::memcpy(record.payload + (chunk.begin - record.offset) * value_bytes, chunk.values,
                    (chunk.end - chunk.begin) * value_bytes);
        continue;
      }
      if (record.kind == kKindDense) {
        place_chunk(chunk, record, request_.dtype, kernel_);
        continue;
      }
      const RiceChunk& coded = coded_[c];
      const int64_t count = chunks_of(record.numel, request_.log2_span);
      uint8_t* to = record.payload + sizeof(RiceSubHeader) +
                    rice_table_bytes(count, !request_.without_indices) + 4 * coded.words_before;
      std::memcpy(to, coded.values, 4 * coded.value_words);
      std::memcpy(to + 4 * coded.value_words, coded.index_room, 4 * coded.index_words);
    }
  });
}

namespace {

std::tuple<Tensor, Tensor> prune_encode_rice(
    const Tensor& grad, const Tensor& residual, const Tensor& range_offsets,
    const Tensor& thresholds, const Tensor& segment_offsets, const Tensor& segment_dense,
    double leak, int64_t value_dtype, int64_t key, int64_t step, const Tensor& out,
    const Tensor& scratch, int64_t log2_span, bool without_indices,
    std::optional<Tensor> capacity_nnz, std::optional<Tensor> slots,
    std::optional<Tensor> tie_chances) {
  const char* op = "prune_encode";
  const RiceRequest request =
      check_rice(op, grad.numel(), segment_offsets, segment_dense, value_dtype, step, log2_span,
                 without_indices, scratch, slots);
  const PrunePass pass(grad, residual, range_offsets, thresholds, tie_chances, leak,
                       request.staged_dtype(), key);
  const Capacity capacity = {
      check_capacity(capacity_nnz, request.segment_count, "prune_encode: capacity")};
  check_vector(out, "prune_encode: out", ScalarType::Byte, -1);
  MS_CHECK(out.is_cpu(), "prune_encode: out is on the wrong device", "cpu", "another");
  // The residual changes before the size is known, so `out` must have room for the largest size.
  int64_t most = 0;
  for (int64_t s = 0; s < request.segment_count; ++s) {
    const int64_t bytes = request.most_bytes(s, capacity.of(s, request.numel(s)));
    check_fits(op, request.slots, s, bytes);
    most = request.slots == nullptr ? most + bytes : request.slots[s + 1];
  }
  MS_CHECK(out.numel() >= most, "prune_encode: the output buffer is too small", most << " bytes",
           out.numel());

  RiceEncoder encoder(request, scratch.mutable_data_ptr());
  const RiceFeedback feedback = {pass.residual_at(0), pass.residual_dtype(), pass.residual_seed(),
                                 pass.stochastic(), pass.leaves_zero()};
  const int64_t chunk_count = encoder.chunks.size();
  // With a capacity the values are needed until the counts of all chunks are known.
  const bool at_once = capacity.nnz == nullptr;
  torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
    RiceRoom room;
    uint8_t* values = encoder.chunks[begin].slot;
    for (int64_t c = begin; c < end; ++c) {
      StageChunk& chunk = encoder.chunks[c];
      // Few values may take more room once they are coded: what is coded later has its own.
      pass.stage(chunk, at_once ? values : chunk.slot);
      if (at_once) values += encoder.code(c, feedback, room);
    }
  });
  const std::vector<SegmentCount> counts =
      pass.limit(encoder.chunks, request.segment_count, capacity);
  if (!at_once) {
    torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
      RiceRoom room;
      for (int64_t c = begin; c < end; ++c) encoder.code(c, feedback, room);
    });
  }
  Tensor sizes = torch::stable::new_empty(segment_offsets, {request.segment_count});
  Tensor nnz = torch::stable::new_empty(segment_offsets, {request.segment_count});
  encoder.write(counts, out, static_cast<int64_t*>(sizes.mutable_data_ptr()),
                static_cast<int64_t*>(nnz.mutable_data_ptr()));
  return {sizes, nnz};
}

std::tuple<Tensor, Tensor> encode_rice(const Tensor& values, const Tensor& segment_offsets,
                                       const Tensor& segment_dense, int64_t value_dtype,
                                       int64_t step, const Tensor& out, const Tensor& scratch,
                                       int64_t log2_span, bool without_indices,
                                       std::optional<Tensor> residual,
                                       std::optional<Tensor> slots) {
  const char* op = "encode";
  check_flat(values, "encode: grad");
  MS_CHECK(values.is_cpu() && out.is_cpu(), "encode: a tensor is on the wrong device",
           "all on the CPU", "another");
  check_vector(out, "encode: out", ScalarType::Byte, -1);
  const int dtype = dtype_code(values, "encode: grad");
  const RiceRequest request =
      check_rice(op, values.numel(), segment_offsets, segment_dense, value_dtype, step, log2_span,
                 without_indices, scratch, slots);
  RiceFeedback feedback;
  // The residual changes before the size is known: so `out` must have room for the largest size,
  // or all elements are counted first to see that their records fit the slots.
  const bool at_once = !residual.has_value() || request.slots == nullptr;
  if (residual.has_value()) {
    int64_t most = at_once ? 0 : request.slots[request.segment_count];
    for (int64_t s = 0; at_once && s < request.segment_count; ++s) {
      most += request.most_bytes(s, request.numel(s));
    }
    MS_CHECK(out.numel() >= most, "encode: the output buffer is too small", most << " bytes",
             out.numel());
    check_vector(*residual, "encode: residual", ScalarType::Float, values.numel());
    MS_CHECK(residual->is_cpu(), "encode: residual is on the wrong device", "cpu", "another");
    feedback.residual = static_cast<char*>(residual->mutable_data_ptr());
  }
  RiceEncoder encoder(request, scratch.mutable_data_ptr());
  const char* data = static_cast<const char*>(values.const_data_ptr());
  const auto stage = kernels().stage[dtype][request.staged_dtype()];
  const int64_t chunk_count = encoder.chunks.size();
  torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
    RiceRoom room;
    uint8_t* to = encoder.chunks[begin].slot;
    for (int64_t c = begin; c < end; ++c) {
      StageChunk& chunk = encoder.chunks[c];
      chunk.values = at_once ? to : chunk.slot;
      chunk.signs = nullptr;
      chunk.nnz = stage(data + chunk.begin * dtype_bytes(dtype), chunk.end - chunk.begin,
                        {chunk.words, nullptr, 0, chunk.values});
      clear_words_behind(chunk);
      if (at_once) to += encoder.code(c, feedback, room);
    }
  });
  if (!at_once) {
    const std::vector<SegmentCount> counts = add_up(encoder.chunks, request.segment_count);
    for (int64_t s = 0; s < request.segment_count; ++s) {
      check_fits(op, request.slots, s, request.most_bytes(s, counts[s].nnz));
    }
    torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
      RiceRoom room;
      for (int64_t c = begin; c < end; ++c) encoder.code(c, feedback, room);
    });
  }
  Tensor sizes = torch::stable::new_empty(segment_offsets, {request.segment_count});
  Tensor nnz = torch::stable::new_empty(segment_offsets, {request.segment_count});
  encoder.write(add_up(encoder.chunks, request.segment_count), out,
                static_cast<int64_t*>(sizes.mutable_data_ptr()),
                static_cast<int64_t*>(nnz.mutable_data_ptr()));
  return {sizes, nnz};
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("prune_encode_rice", TORCH_BOX(&megatron_sparse::prune_encode_rice));
  m.impl("encode_rice", TORCH_BOX(&megatron_sparse::encode_rice));
}
