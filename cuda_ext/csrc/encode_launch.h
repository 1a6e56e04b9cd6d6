// The launchers of the CUDA encoders, between nvcc (no torch) and the bindings.
#pragma once

#include <cstdint>

namespace megatron_sparse {

// Errors on the device: status[0].
enum EncodeError : int64_t {
  kEncodeOk = 0,
  kEncodeCapacity = 1,  // status: {1, 0, bytes needed, bytes there}; nothing was written to `out`
  kEncodeSegments = 2,  // segment_offsets do not cut the bucket: {2, segment, offset, numel}
  kEncodeFormat = 3,    // an unknown format was requested: {3, segment, format, 0}
  kEncodeSlot = 4,      // a record is longer than its slot: {4, segment, bytes needed, bytes there}
};

// All pointers are on the device. `numel` elements of `grad_dtype` are cut by segment_offsets.
struct EncodeArguments {
  const void* grad;
  int64_t numel;
  int grad_dtype;
  int value_dtype;
  const int64_t* segment_offsets;  // [segment_count + 1]
  const uint8_t* segment_kinds;    // [segment_count], RecordKind
  int64_t segment_count;
  uint32_t step;
  int64_t block_size;      // of blocks: a power of two in [64, 4096]; 0 if none is requested
  uint8_t* out;            // 16-byte aligned
  int64_t capacity;        // bytes of `out`
  void* workspace;         // 256-byte aligned
  int64_t* segment_bytes;  // [segment_count], written
  int64_t* nnz;            // [segment_count], written
  int64_t* status;         // [4], written
  // Null for records back to back; else [segment_count + 1] where they begin, and `capacity` is the
  // last one: all of `out` is cleared first.
  const int64_t* slots;
  // Null for no limit; else [segment_count] the most non-zero elements (prune_encode, no blocks).
  const int64_t* most_nnz;
};

// The pruning that prune_encode does before it encodes. All pointers are on the device.
struct PruneArguments {
  const void* old_residual;
  void* residual;                // written; may be `old_residual`
  const int64_t* range_offsets;  // [range_count + 1]
  const float* thresholds;       // [range_count]
  const float* tie_chances;      // [range_count], or null for zeros
  int64_t range_count;
  float leak;
  int64_t key;  // of the random bits; negative for rounding to nearest
  int residual_dtype;
};

int64_t encode_workspace_bytes(const EncodeArguments& arguments);

// Statuses of earlier calls, on the device: a word in every `stride` words; 0 means no error.
struct Earlier {
  const int64_t* words;
  int64_t count;
  int64_t stride;
};

// If one of these has failed, the message's first byte is set to 0, with which no record begins:
// its receivers refuse it.
struct SpoiledBy {
  Earlier some;
  Earlier others;
};

// Encodes the non-zero elements of the gradient. Launches on `stream` (a cudaStream_t) and returns
// at once; the caller reads the launches' error with cudaGetLastError.
void launch_encode(const EncodeArguments& arguments, void* stream, const SpoiledBy& spoiled = {});

// The same without its first launch, the cut: `launch_decode_sum` has made it.
void launch_encode_cut(const EncodeArguments& arguments, void* stream, const SpoiledBy& spoiled);

// The same for the pruned gradient + residual; the gradient is only read.
void launch_prune_encode(const EncodeArguments& arguments, const PruneArguments& prune,
                         void* stream);

}  // namespace megatron_sparse
