// Sizes and beginnings of the records in messages of kind Rice, for plan_records.
#pragma once

#include "place_kernel.cuh"
#include "rice_encode_chunks.cuh"

namespace megatron_sparse {

constexpr int kRiceThreads = kPlaceThreads;  // plan_records counts on it
constexpr int kRiceWarps = kRiceThreads / 32;

// A segment's Rice record of `words` words.
__device__ __forceinline__ Sections rice_sections(const RiceArguments& rice, int64_t chunks,
                                                  int64_t words) {
  const bool indices = !rice.without_indices;
  const int64_t values = sizeof(RiceSubHeader) + rice_table_bytes(chunks, indices);
  return {0, values, values + 4 * words, rice_payload(chunks, indices, words)};
}

// Kept segments of a message of quantised values are in bf16.
__device__ __forceinline__ int rice_dtype_of(const RiceArguments& rice, const RecordPlan& plan) {
  return is_quantised(rice.dtype) && plan.kind == kKindDense ? int{kBf16} : rice.dtype;
}

// What neither chunks nor tiles write: sub-header, last row, padding.
__device__ __forceinline__ void start_record(const RiceArguments& rice, const RecordPlan& plan,
                                             int64_t chunks, uint8_t* payload) {
  clear(payload + plan.sections.values_end, payload + plan.sections.payload);
  if (plan.kind == kKindDense) return;
  const int64_t words = (plan.sections.values_end - plan.sections.values) / 4;
  *reinterpret_cast<RiceSubHeader*>(payload) = {
      static_cast<uint8_t>(!rice.without_indices), static_cast<uint8_t>(rice.log2_span), 0,
      static_cast<uint32_t>(chunks), static_cast<uint64_t>(words)};
  if (rice.without_indices) return;
  RiceRow* rows = reinterpret_cast<RiceRow*>(payload + sizeof(RiceSubHeader));
  rows[chunks] = {static_cast<uint32_t>(plan.nnz), static_cast<uint32_t>(words)};
  clear(reinterpret_cast<uint8_t*>(rows + chunks + 1), payload + plan.sections.values);
}

// Writes the row of the chunk in a slot, and returns where its words begin.
__device__ __forceinline__ uint32_t* write_row(const Workspace& work, const EncodeArguments& call,
                                               const RiceArguments& rice, int64_t slot,
                                               const ChunkPlace& chunk) {
  const RecordPlan& plan = work.plans[chunk.segment];
  const int64_t first = first_slot(work, rice, chunk.segment);
  const int64_t words_before =
      prefix_after(work.chunk_states, slot - 1) - prefix_after(work.chunk_states, first - 1);
  uint8_t* payload = call.out + plan.at + kHeaderBytes;
  RiceRow* rows = reinterpret_cast<RiceRow*>(payload + sizeof(RiceSubHeader));
  rows[chunk.number] = {static_cast<uint32_t>(chunk.staged - plan.nnz_before),
                        static_cast<uint32_t>(words_before)};
  return reinterpret_cast<uint32_t*>(payload + plan.sections.values) + words_before;
}

}  // namespace megatron_sparse
