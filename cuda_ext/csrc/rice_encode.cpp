// The CPU encoders of messages of kind Rice (rice.h): staged chunks are coded in place, and then
// written into the records.
#include "encode.h"
#include "isa.h"

namespace megatron_sparse {
namespace {

// A staged chunk's words, once it is coded.
struct RiceChunk {
  uint32_t* index_room;
  const uint8_t* values;
  int64_t value_words = 0;
  int64_t index_words = 0;
  int64_t words_before = 0;  // in the record

  int64_t words() const { return value_words + index_words; }
};

// Where a chunk's quantisation error goes.
struct RiceFeedback {
  char* residual = nullptr;  // of the bucket's first element; null for nowhere
  int dtype = kFp32;
  HashSeed seed = {};
  bool stochastic = false;
  bool is_zero = false;  // the residual of the staged elements
};

// A thread's memory.
struct RiceRoom {
  std::vector<int32_t> index;
  std::vector<float> values;
};

// One call's chunks, and the steps from staged values to records.
class RiceEncoder {
 public:
  explicit RiceEncoder(const EncodeCall& call);

  // Stages all chunks, and codes them: at once, while their values are in a cache, or later, by
  // `code_all`. Few values may take more room once they are coded: what is coded later has its own.
  template <class Stage>
  void stage_all(const RiceFeedback& feedback, bool at_once, Stage stage) {
    torch::stable::parallel_for(0, chunks.size(), 1, [&](int64_t begin, int64_t end) {
      RiceRoom room;
      uint8_t* values = chunks[begin].slot;
      for (int64_t c = begin; c < end; ++c) {
        stage(chunks[c], at_once ? values : chunks[c].slot);
        if (at_once) values += code(c, feedback, room);
      }
    });
  }

  void code_all(const RiceFeedback& feedback) {
    torch::stable::parallel_for(0, chunks.size(), 1, [&](int64_t begin, int64_t end) {
      RiceRoom room;
      for (int64_t c = begin; c < end; ++c) code(c, feedback, room);
    });
  }

  // Writes the records, and returns the call's report. A raw record that is not smaller than dense
  // is dense.
  Tensor write(const std::vector<SegmentCount>& counts);

  std::vector<StageChunk> chunks;

 private:
  // Codes a staged chunk in place; returns the bytes of its values.
  int64_t code(int64_t c, const RiceFeedback& feedback, RiceRoom& room);
  Record plan(int64_t s, const SegmentCount& count, int64_t words) const;
  void start(const Record& record, int64_t first_chunk, int64_t words) const;

  const EncodeCall& call_;
  const Kernels& kernel_;
  const int dtype_, log2_span_;
  std::vector<RiceChunk> coded_;
};

RiceEncoder::RiceEncoder(const EncodeCall& call)
    : call_(call),
      kernel_(kernels()),
      dtype_(call.dtype()),
      log2_span_(static_cast<int>(call.log2_span)) {
  uint32_t* room = static_cast<uint32_t*>(call.scratch);
  for (int64_t s = 0; s < call.segment_count(); ++s) {
    for (int64_t left = call.numel(s); left > 0; left -= call.span()) {
      coded_.push_back({room, nullptr});
      room += index_room_words(std::min(left, call.span()));
    }
  }
  chunks = cut_chunks(call.offsets, call.segment_count(), call.value_bytes(), room, call.span());
}

int64_t RiceEncoder::code(int64_t c, const RiceFeedback& feedback, RiceRoom& room) {
  const StageChunk& chunk = chunks[c];
  RiceChunk& coded = coded_[c];
  const bool quantised = is_quantised(dtype_), kept = call_.is_kept(chunk.segment);
  const int dtype = call_.dtype_of(chunk.segment);
  const int64_t numel = chunk.end - chunk.begin;
  coded.values = chunk.values;
  if (kept && !quantised) return chunk.nnz * dtype_bytes(dtype);  // placed as any dense record
  const bool whole = kept || call_.without_indices;
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
  Record record = plan_record(kKindDense, call_.offsets[s], call_.numel(s), count, 0,
                              dtype_bytes(call_.dtype_of(s)));
  if (call_.is_kept(s)) return record;
  const int64_t chunks = chunks_of(record.numel, log2_span_);
  const int64_t payload = rice_payload(chunks, !call_.without_indices, words);
  if (is_quantised(dtype_) || payload < record.at.payload) {
    record.kind = kKindRice;
    record.at.payload = payload;
  }
  return record;
}

void RiceEncoder::start(const Record& record, int64_t first_chunk, int64_t words) const {
  uint8_t* payload = record.payload;
  const bool indices = !call_.without_indices;
  const int64_t count = chunks_of(record.numel, log2_span_);
  const RiceSubHeader head = {indices, static_cast<uint8_t>(log2_span_), 0,
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

Tensor RiceEncoder::write(const std::vector<SegmentCount>& counts) {
  std::vector<int64_t> words(call_.segment_count(), 0), first(call_.segment_count(), 0);
  for (size_t c = 0; c < chunks.size(); ++c) {
    const int64_t s = chunks[c].segment;
    if (chunks[c].begin == call_.offsets[s]) first[s] = static_cast<int64_t>(c);
    coded_[c].words_before = words[s];
    words[s] += coded_[c].words();
  }
  std::vector<Record> records;
  for (int64_t s = 0; s < call_.segment_count(); ++s) {
    records.push_back(plan(s, counts[s], words[s]));
  }
  const Tensor report = call_.report(records);
  uint8_t* at = static_cast<uint8_t*>(call_.out.mutable_data_ptr());
  for (int64_t s = 0; s < call_.segment_count(); ++s) {
    Record& record = records[s];
    record.payload = write_header(record, call_.dtype_of(s), static_cast<uint32_t>(call_.step), at);
    if (record.kind == kKindRice) {
      start(record, first[s], words[s]);
    } else {
      std::memset(record.payload + record.at.values_end, 0,
                  record.at.payload - record.at.values_end);
    }
    at = next_record(record, at, call_.place == nullptr ? nullptr : call_.place + s);
  }
  for_each(chunks.size(), [&](int64_t c) {
    const StageChunk& chunk = chunks[c];
    const Record& record = records[chunk.segment];
    if (record.kind == kKindDense && is_quantised(dtype_)) {
      const int64_t value_bytes = dtype_bytes(kBf16);
      std::memcpy(record.payload + (chunk.begin - record.offset) * value_bytes, chunk.values,
                  (chunk.end - chunk.begin) * value_bytes);
    } else if (record.kind == kKindDense) {
      place_chunk(chunk, record, dtype_, kernel_);
    } else {
      const RiceChunk& coded = coded_[c];
      const int64_t count = chunks_of(record.numel, log2_span_);
      uint8_t* to = record.payload + sizeof(RiceSubHeader) +
                    rice_table_bytes(count, !call_.without_indices) + 4 * coded.words_before;
      std::memcpy(to, coded.values, 4 * coded.value_words);
      std::memcpy(to + 4 * coded.value_words, coded.index_room, 4 * coded.index_words);
    }
  });
  return report;
}

}  // namespace

Tensor prune_encode_rice(const EncodeCall& call, const PrunePass& pass, const Capacity& capacity) {
  RiceEncoder encoder(call);
  const RiceFeedback feedback = {pass.residual_at(0), pass.residual_dtype(), pass.residual_seed(),
                                 pass.stochastic(), pass.leaves_zero()};
  // With a capacity the values are needed until the counts of all chunks are known.
  const bool at_once = capacity.nnz == nullptr;
  encoder.stage_all(feedback, at_once,
                    [&](StageChunk& chunk, uint8_t* values) { pass.stage(chunk, values); });
  const auto counts = pass.limit(encoder.chunks, call.segment_count(), capacity);
  if (!at_once) encoder.code_all(feedback);
  return encoder.write(counts);
}

Tensor encode_rice(const EncodeCall& call) {
  RiceFeedback feedback;
  // The residual changes before the size is known: so `out` must have room for the largest size,
  // or all elements are counted first to see that their records fit the slots.
  const bool at_once = !call.residual.has_value() || call.place == nullptr;
  if (call.residual.has_value()) {
    if (at_once) call.check_room([&](int64_t s) { return call.numel(s); });
    feedback.residual = static_cast<char*>(call.residual->mutable_data_ptr());
  }
  RiceEncoder encoder(call);
  const int dtype = dtype_code(call.grad, "encode: grad");
  const char* data = static_cast<const char*>(call.grad.const_data_ptr());
  const auto stage = kernels().stage[dtype][staged_dtype(call.dtype())];
  encoder.stage_all(feedback, at_once, [&](StageChunk& chunk, uint8_t* values) {
    chunk.values = values;
    chunk.signs = nullptr;
    chunk.nnz = stage(data + chunk.begin * dtype_bytes(dtype), chunk.end - chunk.begin,
                      {chunk.words, nullptr, 0, values});
    clear_words_behind(chunk);
  });
  const auto counts = add_up(encoder.chunks, call.segment_count());
  if (!at_once) {
    call.check_room([&](int64_t s) { return counts[s].nnz; });
    encoder.code_all(feedback);
  }
  return encoder.write(counts);
}

}  // namespace megatron_sparse
