// Moves whole records: from a message into a window, and from peers' windows to this GPU.
#pragma once

#include "decode_record.cuh"
#include "launch_grid.cuh"
#include "peer_sync.cuh"

namespace megatron_sparse {

constexpr int kMoveThreads = 256;

// Called by whole blocks that share the work: this is number `block` of `blocks`. At most `room`
// bytes are moved, even if the header states more; check_record then reports the header.
__device__ __forceinline__ void move_record(uint8_t* to, const uint8_t* from, int64_t room,
                                            int64_t block, int64_t blocks) {
  const uint64_t payload = reinterpret_cast<const Header*>(from)->payload_bytes;
  const uint64_t most = static_cast<uint64_t>(room - kHeaderBytes);
  const int64_t vectors =
      (kHeaderBytes + static_cast<int64_t>(payload < most ? payload : most)) / 16;
  for (int64_t i = block * blockDim.x + threadIdx.x; i < vectors; i += blocks * blockDim.x) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
}

// One block: finds where the records of this rank's message begin, and counts the operation. A
// record that does not fit its slot is the rank's error.
__global__ void __launch_bounds__(kMoveThreads)
    peer_locate_kernel(PeerDomain domain, PeerStage stage, int rank, int buffer,
                       DecodeArguments message, const int64_t* message_slots, const int64_t* slots,
                       int64_t* header_at) {
  __shared__ int64_t walked, end;
  PeerControl* own = control_of(domain, rank);
  if (threadIdx.x == 0) {
    begin_epoch(own, stage, buffer, rank);
    if (message_slots == nullptr) {
      walked = follow_sizes(message, header_at, end);
    } else {
      walked = message.segment_count;
      end = message_slots[walked];
    }
    if (walked < message.segment_count || end != message.message_bytes) {
      fail(own, stage, {kPeerRecord, rank, rank, walked, kDecodeSize, message.message_bytes});
    }
  }
  __syncthreads();
  if (has_failed(own)) return;
  for (int64_t s = threadIdx.x; s < message.segment_count; s += kMoveThreads) {
    if (message_slots != nullptr) header_at[s] = message_slots[s];
    const uint64_t payload =
        reinterpret_cast<const Header*>(message.message + header_at[s])->payload_bytes;
    if (payload > static_cast<uint64_t>(slots[s + 1] - slots[s] - kHeaderBytes)) {
      fail(own, stage,
           {kPeerRecord, rank, rank, s, kDecodePayloadBytes, static_cast<int64_t>(payload)});
    }
  }
}

// The next launch: moves the records to their slots in the window. All blocks share each record.
__global__ void __launch_bounds__(kMoveThreads)
    peer_put_kernel(PeerDomain domain, int rank, int buffer, DecodeArguments message,
                    const int64_t* slots, const int64_t* header_at) {
  if (has_failed(control_of(domain, rank))) return;
  uint8_t* area = area_of(domain, rank, kPeerMessages, buffer);
  for (int64_t s = 0; s < message.segment_count; ++s) {
    move_record(area + slots[s], message.message + header_at[s], slots[s + 1] - slots[s],
                blockIdx.x, gridDim.x);
  }
}

// Instead of meeting: raises the flags, then takes each peer's part of the own shard as soon as
// that peer has arrived, into staged[peer * sum_room]. Every block polls the flags and takes its
// part of each record. The order of arrival does not affect the sum, which is computed afterwards,
// in rank order.
//
// The ranks are along y. All blocks are resident (see the launch), so a rank's blocks cannot keep
// those of another virtual rank from running.
__global__ void __launch_bounds__(kMoveThreads, 4)
    peer_take_kernel(PeerDomain domain, PeerStage stage, int buffer, PeerTables tables,
                     uint8_t* staged, int64_t staged_stride) {
  __shared__ PeerWait wait;
  __shared__ bool came[kMaxPeers], taken[kMaxPeers];
  const int rank = domain.first_rank + static_cast<int>(blockIdx.y);
  const int peer = static_cast<int>(threadIdx.x);
  PeerControl* own = control_of(domain, rank);
  begin_wait(wait);
  if (peer < kMaxPeers) taken[peer] = false;
  if (peer < domain.world && blockIdx.x == 0) raise_flag(domain, rank, peer, stage.phase);
  // Another block of this rank may fail while this one begins, so one thread checks for the block.
  if (__syncthreads_or(peer == 0 && has_failed(own))) return;
  const unsigned long long epoch = own->epochs[stage.phase];
  const int64_t first = tables.shard_segments[rank];
  const int64_t count = tables.shard_segments[rank + 1] - first;
  const int64_t* to = tables.shard_slots + first + rank;
  staged += blockIdx.y * staged_stride;
  const int64_t begin_ns = clock_ns();
  for (int left = domain.world; left > 0;) {
    if (peer < domain.world) {
      const unsigned long long flag = read_flag(own, peer, stage.phase);
      came[peer] = !taken[peer] && !(flag & kFailed) && flag >= epoch;
      if (flag & kFailed) atomicMin(&wait.failed, static_cast<unsigned>(peer));
      __threadfence_system();
    }
    const bool late = clock_ns() - begin_ns > patience_ns(domain, stage.phase);
    const int coming = __syncthreads_count(peer < domain.world && came[peer]);
    for (int p = 0; p < domain.world && coming > 0; ++p) {
      if (!came[p]) continue;
      const uint8_t* area = area_of(domain, p, stage.phase, buffer) + tables.slots[first];
      for (int64_t s = 0; s < count; ++s) {
        move_record(staged + p * domain.sum_room + to[s], area + to[s], to[s + 1] - to[s],
                    blockIdx.x, gridDim.x);
      }
      if (peer == 0 && blockIdx.x == 0) own->arrived[domain.world - left] = p;
      if (peer == 0) taken[p] = true;
      --left;
    }
    if (coming == 0) {
      if (late && peer < domain.world && !taken[peer]) {
        atomicMin(&wait.missing, static_cast<unsigned>(peer));
      }
      if (peer == 0) __nanosleep(200);
    }
    __syncthreads();
    if (wait.failed != kNobody || wait.missing != kNobody) break;
    __syncthreads();  // all have read it
  }
  end_wait(wait, domain, rank, stage);
}

}  // namespace megatron_sparse
