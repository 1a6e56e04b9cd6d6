// A record of an untrusted message: the places of its header and sections, and the first error.
#pragma once

#include "decode_launch.h"
#include "elementwise.h"
#include "lanes.h"
#include "raw_type.cuh"
#include "record.h"
#include "rice.h"

namespace megatron_sparse {

// Indices that a warp checks at a time, for formats without tiles.
constexpr int kUnitEntries = 256;

struct DecodeRecord {
  const uint8_t* payload;
  Sections sections;
  int64_t numel;
  int64_t acc_begin;  // of the segment
  int64_t nnz;
  int64_t blocks;
  int64_t block_size;
  uint8_t kind;
  uint8_t dtype;      // of the values; in Rice's messages not always that of the message
  uint8_t log2_span;  // Rice: of a chunk's elements
  bool has_indices;   // Rice: whether entries have indices
};

struct FieldError {
  bool wrong;
  int64_t field;
  int64_t value;
};

__device__ __forceinline__ FieldError field_error(DecodeField field, uint64_t value) {
  return {true, field, static_cast<int64_t>(value)};
}

// The field that a fault of rice.h is reported as.
__device__ __forceinline__ FieldError field_error(const RiceError& error) {
  const uint64_t value = static_cast<uint64_t>(error.value);
  switch (error.fault) {
    case RiceFault::kNone:
      return {false, 0, 0};
    case RiceFault::kChunk:
      return field_error(kDecodeChunk, value);
    case RiceFault::kTable:
      return field_error(kDecodeTable, value);
    case RiceFault::kPayloadBytes:
      return field_error(kDecodePayloadBytes, value);
    case RiceFault::kSize:
      return field_error(kDecodeSize, value);
    default:
      return field_error(kDecodeRice, value);
  }
}

// The part of check_record for Rice: the sub-header and the table's ends.
__device__ inline FieldError check_rice_record(const Header& header, int64_t available,
                                               DecodeRecord& record) {
  if (available < static_cast<int64_t>(sizeof(RiceSubHeader))) {
    return field_error(kDecodeSize, kHeaderBytes + available);
  }
  RiceSections at = {};
  const RiceError error =
      rice_record_error(record.payload, record.numel, record.nnz, record.dtype,
                        static_cast<int64_t>(header.payload_bytes), available, at);
  const RiceSubHeader head = *reinterpret_cast<const RiceSubHeader*>(record.payload);
  record.log2_span = head.log2_span;
  record.has_indices = head.indices != 0;
  record.sections = {at.rows, at.values, at.values_end, at.payload};
  return field_error(error);
}

// Checks one record and, if nothing is wrong, describes it. `available` counts from the header's
// end to that of the record's slot or, without slots, the message's.
__device__ inline FieldError check_record(const DecodeArguments& call, int64_t segment, int64_t at,
                                          DecodeRecord& record) {
  const int64_t slot_end = call.slots != nullptr ? call.slots[segment + 1] : call.message_bytes;
  const int64_t available = slot_end - at - kHeaderBytes;
  if (available < 0) return field_error(kDecodeSize, static_cast<uint64_t>(slot_end));
  const Header header = *reinterpret_cast<const Header*>(call.message + at);
  const int64_t offset = call.segment_offsets[segment];
  const int64_t numel = call.segment_offsets[segment + 1] - offset;
  if (header.magic != kMagic) return field_error(kDecodeMagic, header.magic);
  if (header.version != kVersion) return field_error(kDecodeVersion, header.version);
  const int64_t sum = call.sums == nullptr ? 0 : call.sums[segment];
  if (header.checksum - static_cast<uint32_t>(sum) != checksum_of(header)) {
    return field_error(kDecodeChecksum, header.checksum);
  }
  const bool is_rice = header.format == kFormatRice;
  if (header.format > kFormatBlocks && !is_rice) {
    return field_error(kDecodeFormat, header.format);
  }
  // Kept segments of a quantised message are dense.
  const bool is_kept = header.format == kKindDense && is_quantised(call.value_dtype);
  if (header.dtype != (is_kept ? kBf16 : call.value_dtype)) {
    return field_error(kDecodeDtype, header.dtype);
  }
  if (is_quantised(header.dtype) && !is_rice) return field_error(kDecodeFormat, header.format);
  const uint8_t flags_known = header.format == kFormatPici ? kFlagLinear : 0;
  if ((header.flags & ~flags_known) != 0) return field_error(kDecodeFlags, header.flags);
  if (header.step != call.step) return field_error(kDecodeStep, header.step);
  if (header.offset != static_cast<uint64_t>(offset))
    return field_error(kDecodeOffset, header.offset);
  if (header.numel != static_cast<uint64_t>(numel)) return field_error(kDecodeNumel, header.numel);
  if (header.nnz > header.numel) return field_error(kDecodeNnz, header.nnz);

  record.payload = call.message + at + kHeaderBytes;
  record.numel = numel;
  record.acc_begin = offset - call.base;
  record.nnz = static_cast<int64_t>(header.nnz);
  record.blocks = record.block_size = 0;
  record.kind = header.format;
  record.dtype = header.dtype;
  if (is_rice) return check_rice_record(header, available, record);
  if (header.format == kFormatPici && header.flags == 0) record.kind = kKindPiciPaper;
  const uint64_t announced = header.payload_bytes;
  if (record.kind == kKindBlocks) {
    // The sub-header holds the record's length: check that it is there before reading it.
    if (announced < kBlocksSubheader) return field_error(kDecodePayloadBytes, announced);
    if (available < kBlocksSubheader) return field_error(kDecodeSize, available);
    const uint4 subheader = *reinterpret_cast<const uint4*>(record.payload);
    record.block_size = subheader.x;
    record.blocks = subheader.y;
    if (subheader.x == 0 || subheader.z != 0 || subheader.w != 0) {
      return field_error(kDecodeBlockSize, subheader.x);
    }
    // At most as many as the segment has, so that the sizes below cannot overflow.
    const int64_t most = (numel + record.block_size - 1) / record.block_size;
    if (record.blocks > most || record.nnz > record.blocks * record.block_size) {
      return field_error(kDecodeBlockCount, subheader.y);
    }
  }
  record.sections = sections_of(record.kind, numel, record.nnz, record.blocks, record.block_size,
                                dtype_bytes(record.dtype));
  if (announced != static_cast<uint64_t>(record.sections.payload)) {
    return field_error(kDecodePayloadBytes, announced);
  }
  if (record.sections.payload > available)
    return field_error(kDecodeSize, kHeaderBytes + available);
  return {false, 0, 0};
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
