// The launcher of the sparse collectives over peer memory, between nvcc (no torch) and the binding.
//
// Every rank of a domain has a window: memory that all of them can read and write (NVLink), of the
// same layout everywhere. It begins with a PeerControl, zeroed before anyone uses it; two areas for
// messages follow, then two for sums. Which of two is used alternates with each operation, so that
// a rank can write the next one while its peers still read the last.
#pragma once

#include <cstdint>

namespace megatron_sparse {

inline constexpr int kMaxPeers = 72;  // the GPUs of the largest NVLink domain, NVL72
inline constexpr int64_t kControlBytes = 4096;

enum PeerOperation : int { kPeerAllReduce = 0, kPeerReduceScatter = 1, kPeerAllGather = 2 };

// The phases for which ranks raise flags.
enum PeerPhase : int { kPeerMessages = 0, kPeerSums = 1, kPeerPhases = 2 };

// PeerControl::error[0].
enum PeerError : int64_t {
  kPeerClaimed = -1,  // inside a launch only: a thread is writing the other words
  kPeerOk = 0,
  kPeerMissing = 1,  // a rank did not arrive before the deadline
  kPeerRecord = 2,   // a rank's record is wrong
  kPeerBuffer = 3,   // the host's choice of area contradicts the number of operations so far
};

// The fields of PeerControl::error.
enum PeerErrorField : int {
  kErrorCode = 0,
  kErrorOperation = 1,
  kErrorPhase = 2,
  kErrorEpoch = 3,     // operations of the phase so far, this one included
  kErrorRank = 4,      // the rank that is missing, or whose record is wrong
  kErrorReporter = 5,  // the rank that found it
  kErrorSegment = 6,   // of the record, counted through the bucket; -1 where another rank found it
  kErrorField = 7,     // DecodeField
  kErrorValue = 8,
  kErrorWords = 9,
};

struct PeerControl {
  // Written by peers: the number of the operation for which rank r has written its data, or its
  // failure (peer_sync.cuh).
  unsigned long long flags[kPeerPhases][kMaxPeers];
  // The owner writes the rest.
  unsigned long long epochs[kPeerPhases];
  unsigned long long arrived[kMaxPeers];  // straggler-aware: ranks in the order of their arrival
  int64_t error[kErrorWords];             // the first error; it stays
};
static_assert(sizeof(PeerControl) <= kControlBytes, "the areas begin behind it");

// The ranks and their windows. A launch runs the ranks from first_rank on: one, or several virtual
// ones on one GPU.
struct PeerDomain {
  uint8_t* windows[kMaxPeers];  // as this process sees them; 256-byte aligned
  int world;
  int first_rank;
  int local_ranks;
  int64_t message_room;  // bytes of each of the two message areas, a multiple of 256
  int64_t sum_room;      // likewise of sums
  int64_t deadline_ns;   // of each wait
};

// How the bucket is cut, on the device and the same on every rank. Tables of shards lie one after
// the other; that of shard i begins at shard_segments[i] + i and has one entry more than segments.
struct PeerTables {
  const int64_t* segment_offsets;  // [segments + 1]
  const uint8_t* segment_kinds;    // [segments]: dense, COO, Pici or adaptive
  const int64_t* slots;            // [segments + 1]: where a message's records lie in its area
  const int64_t* shard_segments;   // [world + 1]: the first segment of each shard
  const int64_t* shard_offsets;    // [segments + world]: segment_offsets from the shard's first on
  const int64_t* shard_slots;      // [segments + world]: slots from the shard's first on
};

// One rank that this launch runs. A reduction takes a gradient, or records that were made before.
struct PeerRank {
  const void* grad;              // numel elements; all-gather: those of the own shard
  const uint8_t* message;        // null where there is a gradient; 16-byte aligned
  int64_t message_bytes;         // of back to back records
  const int64_t* message_slots;  // where they begin, on the device; null for back to back
  void* out;                     // numel elements; reduce-scatter: those of the own shard
};

struct PeerCall {
  PeerOperation operation;
  PeerDomain domain;
  PeerTables tables;
  int64_t segment_count;
  // On the host.
  const int64_t* shard_segments;  // [world + 1]
  const int64_t* shard_begins;    // [world + 1], elements
  const PeerRank* ranks;          // [local_ranks]
  int dtype;                      // of gradients and outputs
  int value_dtype;                // of records
  uint32_t step;                  // of the records' headers
  // From these densities on a shard is sent densely: of a rank's message, and of the sum.
  double message_density;
  double sum_density;
  bool in_order_of_coming;   // owners take shards as ranks arrive, instead of waiting for all
  int buffers[kPeerPhases];  // which of two areas: the number of operations of the phase, modulo 2
  void* workspace;           // 256-byte aligned
};

int64_t peer_workspace_bytes(const PeerCall& call);

// Launches all of an operation for the call's ranks on `stream` (a cudaStream_t) and returns at
// once; the caller reads the launches' error with cudaGetLastError; errors on the device are in
// PeerControl::error.
void launch_peer_collective(const PeerCall& call, void* stream);

}  // namespace megatron_sparse
