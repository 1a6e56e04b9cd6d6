// Shared by encode's and prune_encode's CPU bindings: checks, and the plan of all records.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "check.h"
#include "place.h"

namespace megatron_sparse {

struct EncodeRequest {
  const int64_t* offsets;
  int64_t segment_count;
  const uint8_t* always_dense;
  int value_dtype;
  int64_t kind;
  int64_t block_size;

  int64_t value_bytes() const { return dtype_bytes(value_dtype); }
};

inline EncodeRequest check_encode(const char* op, int64_t numel, const Tensor& segment_offsets,
                                  const Tensor& segment_dense, int64_t value_dtype, int64_t step,
                                  const Tensor& out, const Tensor& scratch, int64_t kind,
                                  int64_t block_size) {
  const auto name = [op](const char* what) { return std::string(op) + ": " + what; };
  MS_CHECK(out.is_cpu() && segment_dense.is_cpu() && scratch.is_cpu(),
           name("a tensor is on the wrong device"), "all on the CPU", "another");
  MS_CHECK(step >= 0, name("step is out of range"), "0 or more", step);
  check_dtype_code(value_dtype, name("value_dtype").c_str());
  check_vector(segment_dense, name("segment_dense").c_str(), ScalarType::Byte, -1);
  const int64_t segment_count = segment_dense.numel();
  check_vector(segment_offsets, name("segment_offsets").c_str(), ScalarType::Long,
               segment_count + 1);
  check_vector(out, name("out").c_str(), ScalarType::Byte, -1);
  check_vector(scratch, name("scratch").c_str(), ScalarType::Byte, -1);
  const int64_t* offsets = check_offsets(segment_offsets, name("segment_offsets").c_str());
  check_cut(offsets, segment_count, numel, name("segment_offsets").c_str());
  for (int64_t s = 0; s < segment_count; ++s) {
    MS_CHECK(offsets[s + 1] - offsets[s] <= kMaxSegmentNumel,
             op << ": segment " << s << " is too long", "at most 2^31 - 1 elements",
             offsets[s + 1] - offsets[s]);
  }
  MS_CHECK(is_kind(kind), name("kind is unknown"), "-1, 0, 1, 2, 3 or 18", kind);
  MS_CHECK(kind != kKindBlocks || is_block_size(block_size), name("block_size does not fit"),
           "a power of two from 64 to 4096", block_size);
  const int64_t needed =
      scratch_bytes(offsets, segment_count, dtype_bytes(static_cast<int>(value_dtype)));
  MS_CHECK(scratch.numel() >= needed, name("the scratch buffer is too small"), needed << " bytes",
           scratch.numel());
  MS_CHECK(reinterpret_cast<uintptr_t>(scratch.const_data_ptr()) % 8 == 0,
           name("the scratch buffer is not aligned"), "a multiple of 8 bytes", "another address");
  return {offsets,
          segment_count,
          static_cast<const uint8_t*>(segment_dense.const_data_ptr()),
          static_cast<int>(value_dtype),
          kind,
          block_size};
}

// The counts of all segments, with those of the blocks.
inline std::vector<SegmentCount> count_blocks(std::vector<StageChunk>& chunks,
                                              const EncodeRequest& request) {
  torch::stable::parallel_for(0, chunks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      // What is dense anyway is not staged.
      if (chunks[c].values == nullptr) continue;
      chunks[c].blocks = count_blocks(chunks[c], request.block_size);
    }
  });
  return add_up(chunks, request.segment_count);
}

inline std::vector<Record> plan_records(const EncodeRequest& request,
                                        const std::vector<SegmentCount>& counts) {
  std::vector<Record> records;
  for (int64_t s = 0; s < request.segment_count; ++s) {
    const int64_t begin = request.offsets[s];
    records.push_back(plan_record(request.kind, request.always_dense[s], begin,
                                  request.offsets[s + 1] - begin, counts[s], request.block_size,
                                  request.value_bytes()));
  }
  return records;
}

// Refuses a record of segment s that is longer than its slot, if there are slots.
inline void check_fits(const char* op, const int64_t* slots, int64_t s, int64_t record_bytes) {
  MS_CHECK(slots == nullptr || record_bytes <= slots[s + 1] - slots[s],
           op << ": the slot of segment " << s << " is too small", record_bytes << " bytes",
           slots[s + 1] - slots[s]);
}

// Writes each record's bytes and returns their sum.
inline int64_t list_sizes(const std::vector<Record>& records, int64_t* sizes) {
  int64_t used = 0;
  for (const Record& record : records) {
    *sizes++ = record.bytes();
    used += record.bytes();
  }
  return used;
}

}  // namespace megatron_sparse
