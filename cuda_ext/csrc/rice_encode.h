// What the CPU encoders of messages of kind Rice share: the request, the coding of a staged chunk
// in place, and the records (rice.h).
#pragma once

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "encode.h"
#include "isa.h"
#include "rice.h"

namespace megatron_sparse {

// A checked request. Chunks of stage.h are chunks of the records here.
struct RiceRequest {
  const int64_t* offsets;
  int64_t segment_count;
  const uint8_t* kept;  // segments of which every element is sent
  int dtype;            // of the values on the wire
  int log2_span;
  bool without_indices;  // every element of every segment has a value
  uint32_t step;
  const int64_t* slots;  // or null

  int staged_dtype() const { return is_quantised(dtype) ? kFp32 : dtype; }
  int64_t span() const { return int64_t{1} << log2_span; }
  int64_t numel(int64_t s) const { return offsets[s + 1] - offsets[s]; }
  bool is_kept(int64_t s) const { return kept[s] != 0; }
  // Kept segments are dense. Where other values are quantised they are rounded one by one: levels
  // of a group would differ between ranks that have only a part of the group's parameters in
  // common.
  int dtype_of(int64_t s) const { return is_quantised(dtype) && is_kept(s) ? int{kBf16} : dtype; }

  // The most bytes of a segment's record with at most `entries` entries.
  int64_t most_bytes(int64_t s, int64_t entries) const;
};

RiceRequest check_rice(const char* op, int64_t numel, const Tensor& segment_offsets,
                       const Tensor& segment_dense, int64_t value_dtype, int64_t step,
                       int64_t log2_span, bool without_indices, const Tensor& scratch,
                       const std::optional<Tensor>& slots);

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
  RiceEncoder(const RiceRequest& request, void* scratch);

  // Codes a staged chunk in place; returns the bytes of its values.
  int64_t code(int64_t c, const RiceFeedback& feedback, RiceRoom& room);

  // Writes the records; `sizes` and `nnz` have one place for each segment. A raw record that is not
  // smaller than dense is dense.
  void write(const std::vector<SegmentCount>& counts, const Tensor& out, int64_t* sizes,
             int64_t* nnz);

  std::vector<StageChunk> chunks;

 private:
  Record plan(int64_t s, const SegmentCount& count, int64_t words) const;
  void start(const Record& record, int64_t first_chunk, int64_t words) const;

  const RiceRequest& request_;
  const Kernels& kernel_;
  std::vector<RiceChunk> coded_;
};

}  // namespace megatron_sparse
