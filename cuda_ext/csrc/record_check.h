// The header of a record in an untrusted message, and what it says; for host and device.
#pragma once

#include "record.h"
#include "rice.h"

namespace megatron_sparse {

// The fields that a decoder's status names; cuda_ext/decode_ops.py (refuse_message) repeats names
// and order.
enum Field : int64_t {
  kFieldSize,
  kFieldMagic,
  kFieldVersion,
  kFieldChecksum,
  kFieldFormat,
  kFieldDtype,
  kFieldFlags,
  kFieldStep,
  kFieldOffset,
  kFieldNumel,
  kFieldNnz,
  kFieldPayloadBytes,
  kFieldIndices,
  kFieldPrefix,     // does not fit the words' bit counts
  kFieldWords,      // bits beyond numel
  kFieldBlockSize,  // zero, or the sub-header's last words are not
  kFieldBlockCount,
  kFieldBlockPadding,  // not zero behind the segment's last element
  kFieldChunk,         // Rice's sub-header
  kFieldTable,         // Rice's rows do not lead from nothing to all entries and words
  kFieldRice,          // a chunk's words are not those of its entries
};

struct FieldError {
  bool wrong;
  int64_t field;
  int64_t value;
};

MS_INLINE FieldError field_error(Field field, uint64_t value) {
  return {true, field, static_cast<int64_t>(value)};
}

// The field that a fault of rice.h is reported as.
MS_INLINE FieldError field_error(const RiceError& error) {
  const uint64_t value = static_cast<uint64_t>(error.value);
  switch (error.fault) {
    case RiceFault::kNone:
      return {false, 0, 0};
    case RiceFault::kChunk:
      return field_error(kFieldChunk, value);
    case RiceFault::kTable:
      return field_error(kFieldTable, value);
    case RiceFault::kPayloadBytes:
      return field_error(kFieldPayloadBytes, value);
    case RiceFault::kSize:
      return field_error(kFieldSize, value);
    default:
      return field_error(kFieldRice, value);
  }
}

// What a record must say.
struct WantedRecord {
  int64_t offset;  // of the segment in the bucket
  int64_t numel;
  int value_dtype;  // of the message
  uint32_t step;
  uint32_t payload_sum;  // of a sealed record; else 0
};

// A record, once its header was checked.
struct DecodeRecord {
  const uint8_t* payload;
  Sections sections;
  int64_t numel;
  int64_t nnz;
  int64_t blocks;
  int64_t block_size;
  uint8_t kind;       // RecordKind
  uint8_t dtype;      // of the values; in Rice's messages not always that of the message
  uint8_t log2_span;  // Rice: of a chunk's elements
  bool has_indices;   // Rice: whether entries have indices
};

// Checks one header and sub-header and, if nothing is wrong, describes the record. `available`
// counts from the header's end to that of the record's slot or, without slots, the message's.
MS_INLINE FieldError check_header(const Header& header, const uint8_t* payload, int64_t available,
                                  const WantedRecord& wanted, DecodeRecord& record) {
  if (header.magic != kMagic) return field_error(kFieldMagic, header.magic);
  if (header.version != kVersion) return field_error(kFieldVersion, header.version);
  if (header.checksum - wanted.payload_sum != checksum_of(header)) {
    return field_error(kFieldChecksum, header.checksum);
  }
  const bool is_rice = header.format == kFormatRice;
  if (header.format > kFormatBlocks && !is_rice) return field_error(kFieldFormat, header.format);
  // Kept segments of a quantised message are dense.
  const bool is_kept = header.format == kKindDense && is_quantised(wanted.value_dtype);
  if (header.dtype != (is_kept ? int{kBf16} : wanted.value_dtype)) {
    return field_error(kFieldDtype, header.dtype);
  }
  if (is_quantised(header.dtype) && !is_rice) return field_error(kFieldFormat, header.format);
  const uint8_t known_flags = header.format == kFormatPici ? kFlagLinear : 0;
  if ((header.flags & ~known_flags) != 0) return field_error(kFieldFlags, header.flags);
  if (header.step != wanted.step) return field_error(kFieldStep, header.step);
  if (header.offset != static_cast<uint64_t>(wanted.offset)) {
    return field_error(kFieldOffset, header.offset);
  }
  if (header.numel != static_cast<uint64_t>(wanted.numel)) {
    return field_error(kFieldNumel, header.numel);
  }
  if (header.nnz > header.numel) return field_error(kFieldNnz, header.nnz);

  record.payload = payload;
  record.numel = wanted.numel;
  record.nnz = static_cast<int64_t>(header.nnz);
  record.blocks = record.block_size = 0;
  record.kind = header.format;
  record.dtype = header.dtype;
  const uint64_t announced = header.payload_bytes;
  if (is_rice) {
    if (available < static_cast<int64_t>(sizeof(RiceSubHeader))) {
      return field_error(kFieldSize, kHeaderBytes + available);
    }
    RiceSections at = {};
    const RiceError error = rice_record_error(payload, record.numel, record.nnz, record.dtype,
                                              static_cast<int64_t>(announced), available, at);
    RiceSubHeader head;
    memcpy(&head, payload, sizeof head);
    record.log2_span = head.log2_span;
    record.has_indices = head.indices != 0;
    record.sections = {at.rows, at.values, at.values_end, at.payload};
    return field_error(error);
  }
  if (header.format == kFormatPici && header.flags == 0) record.kind = kKindPiciPaper;
  if (record.kind == kKindBlocks) {
    // The sub-header holds the record's length: check that it is there before reading it.
    if (announced < kBlocksSubheader) return field_error(kFieldPayloadBytes, announced);
    if (available < kBlocksSubheader) return field_error(kFieldSize, available);
    uint32_t head[4];
    memcpy(head, payload, sizeof head);
    record.block_size = head[0];
    record.blocks = head[1];
    if (head[0] == 0) return field_error(kFieldBlockSize, 0);
    if ((head[2] | head[3]) != 0) {
      return field_error(kFieldBlockSize, uint64_t{head[3]} << 32 | head[2]);
    }
    // At most as many as the segment has, so that the sizes below cannot overflow.
    const int64_t most = (record.numel + record.block_size - 1) / record.block_size;
    if (record.blocks > most || record.nnz > record.blocks * record.block_size) {
      return field_error(kFieldBlockCount, head[1]);
    }
  }
  record.sections = sections_of(record.kind, record.numel, record.nnz, record.blocks,
                                record.block_size, dtype_bytes(record.dtype));
  if (announced != static_cast<uint64_t>(record.sections.payload)) {
    return field_error(kFieldPayloadBytes, announced);
  }
  if (record.sections.payload > available) {
    return field_error(kFieldSize, kHeaderBytes + available);
  }
  return {false, 0, 0};
}

}  // namespace megatron_sparse
