// Describes the records in windows: checks those that this rank reads, and decides the formats of
// its own. These launches have few blocks and run between those that touch every element.
#pragma once

#include "decode_record.cuh"
#include "encode_workspace.cuh"
#include "find_range.cuh"
#include "peer_sync.cuh"

namespace megatron_sparse {

constexpr int kRecordThreads = 256;
constexpr uint8_t kKindNothing = 0xfe;  // a record that cannot be read: it adds nothing

// The records that a rank reads in one phase: of its own shard from every rank's message (set k is
// rank k's), or every shard's sum from its owner.
struct PeerReading {
  PeerDomain domain;
  PeerStage stage;
  int rank;
  int buffer;
  PeerTables tables;
  int64_t segment_count;  // of the bucket
  const uint8_t* staged;  // the copies of the messages' parts; null if they are read in the windows
  int value_dtype;
  uint32_t step;
  DecodeRecord* records;  // messages: [world][segments of the shard]; sums: [segments]
};

// Describes one record. A wrong record becomes kKindNothing, and the rank gets an error.
__device__ inline void read_record(const PeerReading& call, int sender, const uint8_t* base,
                                   const int64_t* offsets, const int64_t* slots, int64_t segment,
                                   int64_t number, DecodeRecord& record) {
  DecodeArguments arguments = {};
  arguments.message = base;
  arguments.segment_offsets = offsets;
  arguments.slots = slots;
  arguments.value_dtype = call.value_dtype;
  arguments.step = call.step;
  FieldError error = check_record(arguments, segment, slots[segment], record);
  if (!error.wrong && record.kind != kKindDense && record.kind != kKindCoo &&
      record.kind != kKindPici) {
    error = field_error(kDecodeFormat, record.kind);  // no rank writes these into a window
  }
  if (!error.wrong) return;
  fail(control_of(call.domain, call.rank), call.stage,
       {kPeerRecord, sender, call.rank, number, error.field, error.value});
  record.kind = kKindNothing;
}

__global__ void __launch_bounds__(kRecordThreads) peer_check_kernel(PeerReading call) {
  const bool failed = has_failed(control_of(call.domain, call.rank));
  const int64_t* shard_segments = call.tables.shard_segments;
  const int64_t first = shard_segments[call.rank];
  const int64_t own_count = shard_segments[call.rank + 1] - first;
  const bool sums = call.stage.phase == kPeerSums;
  const int64_t count = sums ? call.segment_count : call.domain.world * own_count;
  for (int64_t i = first_item(); i < count; i += item_stride()) {
    if (failed) {
      call.records[i].kind = kKindNothing;
      continue;
    }
    if (sums) {
      const int owner = static_cast<int>(find_range(shard_segments, call.domain.world, i));
      const int64_t begin = shard_segments[owner];
      read_record(call, owner, area_of(call.domain, owner, kPeerSums, call.buffer),
                  call.tables.shard_offsets + begin + owner,
                  call.tables.shard_slots + begin + owner, i - begin, i, call.records[i]);
    } else {
      const int sender = static_cast<int>(i / own_count);
      const uint8_t* base =
          call.staged != nullptr
              ? call.staged + sender * call.domain.sum_room
              : area_of(call.domain, sender, kPeerMessages, call.buffer) + call.tables.slots[first];
      read_record(call, sender, base, call.tables.segment_offsets + first,
                  call.tables.shard_slots + first + call.rank, i % own_count, first + i % own_count,
                  call.records[i]);
    }
  }
}

// One block, between compaction and the plan of the records: counts the operation, and decides for
// each shard whether its sparse segments become dense, because from a density on a dense shard is
// read faster than a sparse one (SpCCL, section III; there of partial sums). At a lower density
// each segment has the requested format, or is dense if that is not larger.
__global__ void __launch_bounds__(kRecordThreads)
    peer_format_kernel(PeerControl* own, PeerStage stage, int rank, int buffer, Workspace work,
                       const int64_t* segment_offsets, const uint8_t* wanted,
                       const int64_t* shard_segments, int64_t shards, double dense_from,
                       uint8_t* kinds) {
  if (threadIdx.x == 0) begin_epoch(own, stage, buffer, rank);
  const int lane = threadIdx.x % 32;
  const int64_t origin = shard_segments[0];
  for (int64_t shard = threadIdx.x / 32; shard < shards; shard += kRecordThreads / 32) {
    const int64_t first = shard_segments[shard] - origin, end = shard_segments[shard + 1] - origin;
    int64_t nnz = 0, numel = 0;
    for (int64_t s = first + lane; s < end; s += 32) {
      if (wanted[s] == kKindDense) continue;
      nnz += prefix_after(work.nnz_states, work.tile_begin[s + 1] - 1) -
             prefix_after(work.nnz_states, work.tile_begin[s] - 1);
      numel += segment_offsets[s + 1] - segment_offsets[s];
    }
    nnz = warp_sum(nnz);
    numel = warp_sum(numel);
    const bool dense = static_cast<double>(nnz) >= dense_from * static_cast<double>(numel);
    for (int64_t s = first + lane; s < end; s += 32) {
      kinds[s] = dense ? static_cast<uint8_t>(kKindDense) : wanted[s];
    }
  }
}

}  // namespace megatron_sparse
