// A record of an untrusted message: the places of its header and sections, and the first error.
#pragma once

#include "decode_launch.h"
#include "elementwise.h"
#include "lanes.h"
#include "raw_type.cuh"
#include "record_check.h"

namespace megatron_sparse {

// Indices that a warp checks at a time, for formats without tiles.
constexpr int kUnitEntries = 256;

// Checks one record and, if nothing is wrong, describes it.
__device__ inline FieldError check_record(const DecodeArguments& call, int64_t segment, int64_t at,
                                          DecodeRecord& record) {
  const int64_t slot_end = call.slots != nullptr ? call.slots[segment + 1] : call.message_bytes;
  const int64_t available = slot_end - at - kHeaderBytes;
  if (available < 0) return field_error(kFieldSize, static_cast<uint64_t>(slot_end));
  const Header header = *reinterpret_cast<const Header*>(call.message + at);
  const int64_t offset = call.segment_offsets[segment];
  const uint32_t sum = call.sums == nullptr ? 0 : static_cast<uint32_t>(call.sums[segment]);
  return check_header(
      header, call.message + at + kHeaderBytes, available,
      {offset, call.segment_offsets[segment + 1] - offset, call.value_dtype, call.step, sum},
      record);
}

// Pieces that are checked one by one. Any dense value is right, and so are codes without indices.
__device__ __forceinline__ int64_t units_of(const DecodeRecord& record) {
  switch (record.kind) {
    case kKindDense:
      return 0;
    case kKindCoo:
      return (record.nnz + kUnitEntries - 1) / kUnitEntries;
    case kKindBlocks:
      return (record.blocks + kUnitEntries - 1) / kUnitEntries;
    case kKindRice:
      return record.has_indices ? chunks_of(record.numel, record.log2_span) : 0;
    default:
      return tiles_of(record.numel);
  }
}

// Finds where each record begins, as long as the sizes are possible; returns how many begin inside
// the message, and where the last one ends.
__device__ inline int64_t follow_sizes(const DecodeArguments& call, int64_t* header_at,
                                       int64_t& end) {
  int64_t at = 0, walked = 0;
  while (walked < call.segment_count && call.message_bytes - at >= kHeaderBytes) {
    header_at[walked++] = at;
    const uint64_t payload = reinterpret_cast<const Header*>(call.message + at)->payload_bytes;
    at += kHeaderBytes;
    // Such a size is wrong, so the next record cannot be found; check_record reports the reason.
    if (payload > static_cast<uint64_t>(call.message_bytes - at) || payload % 16 != 0) break;
    at += static_cast<int64_t>(payload);
  }
  end = at;
  return walked;
}

template <int VALUE>
__device__ __forceinline__ float value_at(const uint8_t* values, int64_t at) {
  using Raw = typename RawType<VALUE>::type;
  return widen<ScalarLanes, VALUE>(reinterpret_cast<const Raw*>(values)[at]);
}

__device__ __forceinline__ const uint32_t* indices_of(const DecodeRecord& record) {
  return reinterpret_cast<const uint32_t*>(record.payload + record.sections.indices);
}

}  // namespace megatron_sparse
