// The sparse sum of a bucket over NCCL, between nvcc (no torch) and the binding: one call queues
// everything, and all sizes are those of the plan.
#pragma once

#include <cstddef>
#include <cstdint>

namespace megatron_sparse {

// NCCL's functions, called by address: the library is the one that torch has loaded, so the build
// needs none. Types and numbers are those of nccl.h, unchanged since NCCL 2.7. `comm` is an
// ncclComm_t, `stream` a cudaStream_t; all return an ncclResult_t.
inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclUint8 = 1;

struct NcclApi {
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* from, size_t count, int type, int peer, void* comm, void* stream);
  int (*recv)(void* into, size_t count, int type, int peer, void* comm, void* stream);
};

inline constexpr int64_t kStatusWords = 4;  // of a decoder, and before an encoder's sizes

// Where a shard of the bucket lies. Rows of `SumPlan.words` in nccl_ops.py.
struct NcclShard {
  int64_t begin;  // element of the bucket
  int64_t numel;
  int64_t first_segment;
  int64_t segment_count;
  int64_t message_begin;  // byte of a message
  int64_t message_bytes;
  int64_t sum_begin;  // byte among the sums of all shards
  int64_t sum_bytes;
};

// On the device. The last three hold segment_count + 1 entries for each shard, one shard after the
// other, counted from the shard's begin.
struct NcclTables {
  const int64_t* segment_offsets;  // [segments + 1] elements of the bucket
  const uint8_t* segment_kinds;    // [segments] of sums: RecordKind
  const int64_t* shard_offsets;
  const int64_t* message_slots;
  const int64_t* sum_slots;
};

// Borders between the breakdown's stages: network, decode, encode, network, decode.
inline constexpr int kNcclMarks = 6;

struct NcclSum {
  NcclApi nccl;
  void* comm;
  int rank;
  int world;
  // One for each rank, whose owner adds it up; or a single one, which every rank adds up itself.
  const NcclShard* shards;
  int64_t shard_count;
  NcclTables tables;
  bool gathers;  // the owners' sums go to everyone
  float* acc;    // the bucket
  const uint8_t* message;
  uint8_t* received;  // room for this rank's shard of every rank's message
  uint8_t* sums;      // room for the sums of all shards
  int value_dtype;    // of the values in messages and sums
  uint32_t step;
  const int64_t* sum_steps;  // [shard_count], on the host
  // Statuses of the calls that made the message: one that is not 0 invalidates the sum for all
  // ranks.
  const int64_t* earlier;
  int64_t earlier_count;
  // [nccl_sum_report_words] words: the status of each rank's message; with `gathers` the encoder's
  // report (status, bytes and non-zero elements of each segment), and the status of each rank's
  // sum.
  int64_t* report;
  void* workspace;           // [nccl_sum_workspace_bytes], 256-byte aligned
  void* events[kNcclMarks];  // cudaEvent_t to record at the borders, or null
};

int64_t nccl_sum_report_words(const NcclSum& sum);
int64_t nccl_sum_workspace_bytes(const NcclSum& sum);

// Queues everything on `stream` (a cudaStream_t); returns NCCL's first error, after which nothing
// more was queued. The caller reads the launches' own error with cudaGetLastError.
int launch_nccl_sparse_sum(const NcclSum& sum, void* stream);

}  // namespace megatron_sparse
