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
  bool wrong = false;
  int64_t field = 0;
  int64_t value = 0;
};

MS_INLINE FieldError field_error(Field field, uint64_t value) {
  return {true, field, static_cast<int64_t>(value)};
}

// Whether the rows of a chunk are possible in a record of `all_words` words. Rows ascend from zero
// to the record's words, so no chunk lies outside.
MS_INLINE FieldError rice_rows_error(const RiceParts& chunk, int64_t all_words) {
  if (chunk.entries < 0 || chunk.entries > chunk.numel || chunk.words < 0) {
    return field_error(kFieldTable, chunk.entries);
  }
  const int64_t end = chunk.before + chunk.words;
  if (end > all_words) return field_error(kFieldTable, end);
  const bool fits = chunk.entries == 0 ? chunk.words == 0 : chunk.unary > 0;
  return fits ? FieldError{} : field_error(kFieldRice, chunk.words);
}

// Checks a record's sub-header, which is there, and the first and the last row. The payload begins
// with the sub-header, announces `announced` bytes and may have `available`.
MS_INLINE FieldError rice_record_error(const uint8_t* payload, int64_t numel, int64_t nnz,
                                       int dtype, int64_t announced, int64_t available,
                                       Sections& at) {
  RiceSubHeader head;
  memcpy(&head, payload, sizeof head);
  if (head.indices > 1 || (head.indices == 0 && dtype != kQ8 && dtype != kQ4)) {
    return field_error(kFieldChunk, head.indices);
  }
  if (head.log2_span < kLeastSpan || head.log2_span > kMostSpan) {
    return field_error(kFieldChunk, head.log2_span);
  }
  if (head.zero != 0) return field_error(kFieldChunk, head.zero);
  const int64_t chunks = chunks_of(numel, head.log2_span);
  if (head.chunks != chunks) return field_error(kFieldChunk, head.chunks);
  const bool indices = head.indices != 0;
  // A chunk never takes more words than its elements in fp32 and a word for each of them.
  const int64_t most =
      indices ? 2 * numel + 64 * chunks : whole_words(numel, dtype, head.log2_span);
  const int64_t words = static_cast<int64_t>(head.words);
  if (words < 0 || words > most || (!indices && words != most))
    return field_error(kFieldTable, words);
  at.indices = sizeof head;
  at.values = at.indices + rice_table_bytes(chunks, indices);
  at.values_end = at.values + 4 * words;
  at.payload = rice_payload(chunks, indices, words);
  if (announced != at.payload) return field_error(kFieldPayloadBytes, announced);
  if (announced > available) {
    return field_error(kFieldSize, kHeaderBytes + available);
  }
  if (!indices) return {};
  RiceRow first, last;
  memcpy(&first, payload + at.indices, sizeof first);
  memcpy(&last, payload + at.indices + chunks * static_cast<int64_t>(sizeof last), sizeof last);
  if (first.entries != 0 || first.words != 0) return field_error(kFieldTable, first.entries);
  if (last.entries != nnz || last.words != words) return field_error(kFieldTable, last.entries);
  return {};
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
    const FieldError error =
        rice_record_error(payload, record.numel, record.nnz, record.dtype,
                          static_cast<int64_t>(announced), available, record.sections);
    RiceSubHeader head;
    memcpy(&head, payload, sizeof head);
    record.log2_span = head.log2_span;
    record.has_indices = head.indices != 0;
    return error;
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
  return {};
}

}  // namespace megatron_sparse
