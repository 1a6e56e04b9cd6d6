// The decoder of wire messages on the CPU: checks a peer's message completely, then adds it.
//
// Nothing in the message is trusted, and the accumulator is changed only if all of it is right.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "record_check.h"

namespace megatron_sparse {

struct Status {
  bool wrong = false;
  int64_t segment = 0;
  int64_t field = 0;
  int64_t value = 0;
};

// The layout that the receiver expects; segment s is [offsets[s], offsets[s + 1]) of the bucket.
struct Expected {
  const int64_t* offsets;
  int64_t segment_count;
  int value_dtype;
  uint32_t step;
  int64_t base;  // the bucket's element that the accumulator begins with
  // Where the records begin, and the end of the last slot; null for back to back. Bytes behind a
  // record in its slot are not read.
  const int64_t* slots = nullptr;
};

struct MessageBytes {
  const uint8_t* bytes;
  int64_t size;
  const int64_t* sums = nullptr;  // of sealed records: those of their payloads
};

// A run of one record's units: elements (dense), entries (COO), tiles (Pici), blocks or chunks
// (Rice).
struct DecodeChunk : DecodeRecord {
  int64_t segment;
  int64_t begin;
  int64_t end;
  int64_t units;      // of the record
  int64_t acc_begin;  // of the segment
};

// Checks the headers and finds the record of each segment: a chunk of all of its units.
Status find_records(const MessageBytes& message, const Expected& expected,
                    std::vector<DecodeChunk>& records);

// Elements that a unit of the chunk's record stands for; of Pici's and Rice's records the last unit
// may have fewer, of blocks too.
int64_t unit_width(const DecodeChunk& chunk);

// The units of a checked record whose elements are `begin` to `end` of its segment: multiples of
// unit_width, or the segment's end.
DecodeChunk part_of(const DecodeChunk& record, int64_t begin, int64_t end);

// Cuts records, or parts of them, into chunks that one thread takes at a time. A record without
// units still has one chunk, which covers the whole segment.
std::vector<DecodeChunk> cut_records(const std::vector<DecodeChunk>& records);

// Adds a checked chunk. With `fresh` the accumulator's content is ignored and becomes the chunk's,
// zero included; the chunks of a record then cover its segment.
void add_chunk(const DecodeChunk& chunk, bool fresh, float* acc, const Kernels& kernel);

// The same for a chunk of Rice (rice_records.cpp); `target` is the segment's first element.
Status check_rice_chunk(const DecodeChunk& chunk, const Kernels& kernel);
void add_rice_chunk(const DecodeChunk& chunk, float* target, const Kernels& kernel);

// Checks everything in chunks of a message: indices, prefix sums, bits and padding. Reports the
// lowest bad one, whichever thread finds one first.
Status check_chunks(const std::vector<DecodeChunk>& chunks, const Kernels& kernel);

// Adds a message, if all of it is right.
Status decode_records(const MessageBytes& message, const Expected& expected, bool fresh, float* acc,
                      const Kernels& kernel);

// Adds messages in one pass (decode_sum.cpp). A bad one is left out. With `fresh` the accumulator's
// content is ignored, and it becomes the sum of the good messages.
std::vector<Status> sum_records(const std::vector<MessageBytes>& messages, const Expected& expected,
                                bool fresh, float* acc, const Kernels& kernel);

}  // namespace megatron_sparse
