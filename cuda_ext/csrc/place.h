// Records: their formats, sizes and places, and the move of a staged chunk into its record.
// Free of torch.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "stage.h"

namespace megatron_sparse {

struct Record {
  uint8_t kind;  // RecordKind
  int64_t numel;
  int64_t nnz;
  int64_t blocks;
  int64_t block_size;
  int64_t offset;
  Sections at;
  uint8_t* payload;  // null until the records are started

  int64_t bytes() const { return kHeaderBytes + at.payload; }
};

// The requested kind, or dense if that is not larger. Ties of COO and Pici go to COO.
Record plan_record(uint8_t wanted, int64_t offset, int64_t numel, SegmentCount count,
                   int64_t block_size, int64_t value_bytes);

// Writes a record's header; returns where its payload begins.
uint8_t* write_header(const Record& record, int value_dtype, uint32_t step, uint8_t* out);

// Clears what lies behind a record in its slot, if there are slots; returns where the next record
// begins. `slots` is the record's.
uint8_t* next_record(const Record& record, uint8_t* out, const int64_t* slots);

// Writes header and padding of all records and sets their payloads. Records lie back to back from
// `out` on or, given slots, record s at slots[s]; the rest of its slot is cleared.
void start_records(std::vector<Record>& records, int value_dtype, uint32_t step, uint8_t* out,
                   const int64_t* slots = nullptr);

// Writes the chunk's part of its record from the staged data, and not a byte more.
void place_chunk(const StageChunk& chunk, const Record& record, int value_dtype,
                 const Kernels& kernel);

}  // namespace megatron_sparse
