// The launcher of decode_add_'s CUDA kernels, between nvcc (no torch) and the binding.
#pragma once

#include <cstdint>

namespace megatron_sparse {

struct EncodeArguments;

enum DecodeError : int64_t {
  kDecodeOk = 0,
  kDecodeMessage = 1,   // {1, segment, Field (record_check.h), the value found}
  kDecodeSegments = 2,  // the caller's segment_offsets do not lie in acc: {2, segment, 0, offset}
};

// All pointers are on the device.
struct DecodeArguments {
  float* acc;
  int64_t acc_numel;
  const uint8_t* message;  // 16-byte aligned
  int64_t message_bytes;
  const int64_t* segment_offsets;  // [segment_count + 1]
  int64_t segment_count;
  int64_t base;     // acc's first element in the bucket
  int value_dtype;  // or one of Rice's QuantisedDtype
  uint32_t step;
  bool fresh;       // take the segments' part of acc for zero
  void* workspace;  // 256-byte aligned
  int64_t* status;  // [4], written
  // Null for records back to back; else [segment_count + 1] ascending multiples of 16 from 0 on,
  // checked by the caller: where records begin, and where the last slot ends.
  const int64_t* slots;
  // [segment_count] of sealed records: those of their payloads.
  const int64_t* sums = nullptr;
};

int64_t decode_workspace_bytes(int64_t segment_count);

// Launches on `stream` (a cudaStream_t) and returns at once; the caller reads the launches' error
// with cudaGetLastError.
void launch_decode_add(const DecodeArguments& arguments, void* stream);

// Several messages, each with a workspace and a status of its own and of one value_dtype. acc's
// content is ignored (`fresh` is not read), every element of the segments is written, and
// nothing else. After an error the segments' part of acc is undefined, except that it is untouched
// if the segments do not lie in it. Two launches for each 16 messages: these are walked together,
// and a tile of acc is made from all of them; the next 16 read and write it again.
//
// The sum of messages with the same acc, base and segments, added in this order from 0. `next`, if
// any, is the encoder that comes after it, in other memory: its cut is a part of the first launch,
// and `launch_encode_cut` does the rest.
void launch_decode_sum(const DecodeArguments* calls, int64_t count, void* stream,
                       const EncodeArguments* next = nullptr);

// Each message alone; no two have an element of acc in common.
void launch_decode_place(const DecodeArguments* calls, int64_t count, void* stream);

}  // namespace megatron_sparse
