// Two-shot sparse collectives over peer memory, from the first launch to the last.
//
//   all-reduce      encode or put, meet or take, add, meet, write
//   reduce-scatter  encode or put, meet or take, write
//   all-gather      encode the own shard, meet, write
//
// Each rank leaves its message in its own window, one record for each segment in a slot that holds
// it even if it is dense. The owner of a shard adds its records from all windows in rank order, in
// fp32, and encodes the sum once, into its own window; all ranks read it there. Sums fill in only
// once, the result is bit-identical on all ranks, and the host needs no size. SparCML's and ZEN's
// split and all-gather; formats and thresholds are SpCCL's.
//
// Bytes of an element for one of n ranks, density d of a message and D of the sum, v bytes a value,
// in Pici: the encoder's (compact_kernel.cuh) v + 1/4 + 3 v d + 1/8; 1/8 + v d read from peers, for
// 1/n of the elements n times; (1/4 + 3 v D + 1/8) / n for the sum; 1/8 + v D read from peers and v
// written. Two meetings.
//
// Launches are in stream order. Launches in which ranks wait for one another have this process's
// ranks along y, so that virtual ranks on one GPU run together; each has few enough blocks to be
// resident. The others run rank after rank. Only the timing varies between runs; the values and the
// order of the additions do not depend on it.
#include "encode_steps.cuh"
#include "peer_move.cuh"
#include "peer_tile.cuh"

namespace megatron_sparse {
namespace {

// Scratch memory of one rank's launches.
struct PeerScratch {
  void* encode;           // of the message's or the own shard's encoder
  uint8_t* kinds;         // the requested formats of segments
  int64_t* status;        // of encoders and cuts
  int64_t* encoded;       // [2 * segments]: sizes and counts; not read
  int64_t* header_at;     // [segments]
  DecodeRecord* records;  // of what is read
  int64_t* tile_begin;    // [segments + 1], of the output
  ScanState* cleared;     // cleared by launch_cut if nothing is encoded
};

int64_t shard_count(const PeerCall& call, int shard) {
  return call.shard_segments[shard + 1] - call.shard_segments[shard];
}

int64_t shard_numel(const PeerCall& call, int shard) {
  return call.shard_begins[shard + 1] - call.shard_begins[shard];
}

int64_t bucket_numel(const PeerCall& call) {
  return call.shard_begins[call.domain.world];
}

EncodeArguments encode_of(const PeerCall& call, const PeerScratch& scratch, int64_t numel,
                          int64_t segments, int64_t room) {
  EncodeArguments a = {};
  a.numel = numel;
  a.grad_dtype = call.dtype;
  a.value_dtype = call.value_dtype;
  a.segment_count = segments;
  a.step = call.step;
  a.capacity = room;
  a.workspace = scratch.encode;
  a.segment_bytes = scratch.encoded;
  a.nnz = scratch.encoded + segments;
  a.status = scratch.status;
  return a;
}

PeerScratch lay_out_scratch(const PeerCall& call, Carver& memory) {
  const PeerDomain& domain = call.domain;
  PeerScratch scratch = {};
  int64_t largest_shard = 0, most_segments = 0;
  for (int r = 0; r < domain.world; ++r) {
    const int64_t numel = shard_numel(call, r), count = shard_count(call, r);
    largest_shard = numel > largest_shard ? numel : largest_shard;
    most_segments = count > most_segments ? count : most_segments;
  }
  const int64_t numel = call.operation == kPeerAllGather ? largest_shard : bucket_numel(call);
  const int64_t room = call.operation == kPeerAllGather ? domain.sum_room : domain.message_room;
  const int64_t encoder =
      workspace_of(encode_of(call, scratch, numel, call.segment_count, room)).bytes;
  scratch.encode = memory.take<uint8_t>(encoder);
  scratch.kinds = memory.take<uint8_t>(call.segment_count);
  scratch.status = memory.take<int64_t>(4);
  scratch.encoded = memory.take<int64_t>(2 * call.segment_count);
  scratch.header_at = memory.take<int64_t>(call.segment_count);
  const int64_t read = domain.world * most_segments;
  scratch.records =
      memory.take<DecodeRecord>(read > call.segment_count ? read : call.segment_count);
  scratch.tile_begin = memory.take<int64_t>(call.segment_count + 1);
  scratch.cleared = memory.take<ScanState>(1);
  return scratch;
}

// The arguments of a launch for one of the call's ranks.
struct PeerStep {
  const PeerCall& call;
  const PeerRank& own;
  int rank;
  PeerScratch scratch;
  const uint8_t* staged;  // null where nothing was taken
  cudaStream_t stream;

  PeerStage stage(PeerPhase phase) const { return {call.operation, phase}; }
  int64_t first() const { return call.shard_segments[rank]; }
  int64_t count() const { return shard_count(call, rank); }
  int64_t numel() const { return shard_numel(call, rank); }
};

PeerReading reading_of(const PeerStep& step, PeerPhase phase) {
  const PeerCall& call = step.call;
  return {call.domain, step.stage(phase),   step.rank,   call.buffers[phase],
          call.tables, call.segment_count,  step.staged, call.value_dtype,
          call.step,   step.scratch.records};
}

// From compaction to the records in their slots.
void launch_place_in_window(const PeerStep& step, EncodeArguments& a, const Workspace& work,
                            PeerPhase phase, const int64_t* shard_segments, int64_t shards) {
  const PeerCall& call = step.call;
  PeerControl* control = reinterpret_cast<PeerControl*>(call.domain.windows[step.rank]);
  const cudaLaunchConfig_t one = grid_for(1, 1, kRecordThreads, step.stream);
  cudaLaunchKernelEx(&one, peer_format_kernel, control, step.stage(phase), step.rank,
                     call.buffers[phase], work, a.segment_offsets, a.segment_kinds, shard_segments,
                     shards, phase == kPeerMessages ? call.message_density : call.sum_density,
                     step.scratch.kinds);
  if (a.segment_count == 0) return;
  a.segment_kinds = step.scratch.kinds;
  launch_place(a, work, step.stream);
}

uint8_t* area_on_host(const PeerStep& step, PeerPhase phase) {
  const PeerDomain& domain = step.call.domain;
  const int64_t room = phase == kPeerMessages ? domain.message_room : domain.sum_room;
  return domain.windows[step.rank] + kControlBytes +
         (phase == kPeerMessages ? 0 : 2 * domain.message_room) + step.call.buffers[phase] * room;
}

// Writes the own gradient's records into the own window.
void launch_peer_encode(const PeerStep& step) {
  const PeerCall& call = step.call;
  EncodeArguments a = encode_of(call, step.scratch, bucket_numel(call), call.segment_count,
                                call.domain.message_room);
  a.grad = step.own.grad;
  a.segment_offsets = call.tables.segment_offsets;
  a.segment_kinds = call.tables.segment_kinds;
  a.slots = call.tables.slots;
  a.out = area_on_host(step, kPeerMessages);
  const Workspace work = workspace_of(a);
  launch_cut(a, work, step.stream);
  if (a.segment_count > 0) launch_compact_grad(a, work, step.stream);
  launch_place_in_window(step, a, work, kPeerMessages, call.tables.shard_segments,
                         call.domain.world);
}

// Moves the records that selection made into the own window.
void launch_peer_put(const PeerStep& step) {
  const PeerCall& call = step.call;
  DecodeArguments message = {};
  message.message = step.own.message;
  message.message_bytes = step.own.message_bytes;
  message.segment_count = call.segment_count;
  const cudaLaunchConfig_t one = grid_for(1, 1, kMoveThreads, step.stream);
  cudaLaunchKernelEx(&one, peer_locate_kernel, call.domain, step.stage(kPeerMessages), step.rank,
                     call.buffers[kPeerMessages], message, step.own.message_slots,
                     call.tables.slots, step.scratch.header_at);
  const cudaLaunchConfig_t all = grid_for(step.own.message_bytes / (16 * kMoveThreads) + 1,
                                          multiprocessors() * 2, kMoveThreads, step.stream);
  cudaLaunchKernelEx(&all, peer_put_kernel, call.domain, step.rank, call.buffers[kPeerMessages],
                     message, call.tables.slots,
                     static_cast<const int64_t*>(step.scratch.header_at));
}

// Writes the own shard's records into the own window: of its sum, or of the values to gather.
void launch_peer_shard(const PeerStep& step) {
  const PeerCall& call = step.call;
  EncodeArguments a =
      encode_of(call, step.scratch, step.numel(), step.count(), call.domain.sum_room);
  a.segment_offsets = call.tables.shard_offsets + step.first() + step.rank;
  a.segment_kinds = call.tables.segment_kinds + step.first();
  a.slots = call.tables.shard_slots + step.first() + step.rank;
  a.out = area_on_host(step, kPeerSums);
  const bool gather = call.operation == kPeerAllGather;
  if (gather) a.grad = step.own.grad;
  const Workspace work = workspace_of(a);
  launch_cut(a, work, step.stream);
  if (step.count() > 0 && gather) {
    launch_compact_grad(a, work, step.stream);
  } else if (step.count() > 0) {
    const PeerReading reading = reading_of(step, kPeerMessages);
    if (call.value_dtype == kFp32) {
      launch_compact(
          a, PeerSource<kFp32>{reading, nullptr, a.segment_offsets, a.segment_count, step.first()},
          work, step.stream);
    } else if (call.value_dtype == kBf16) {
      launch_compact(
          a, PeerSource<kBf16>{reading, nullptr, a.segment_offsets, a.segment_count, step.first()},
          work, step.stream);
    } else {
      launch_compact(
          a, PeerSource<kFp16>{reading, nullptr, a.segment_offsets, a.segment_count, step.first()},
          work, step.stream);
    }
  }
  launch_place_in_window(step, a, work, kPeerSums, call.tables.shard_segments + step.rank, 1);
}

// Checks the headers of the records that are read next.
void launch_peer_check(const PeerStep& step, PeerPhase phase) {
  const PeerReading reading = reading_of(step, phase);
  const int64_t records =
      phase == kPeerSums ? step.call.segment_count : step.call.domain.world * step.count();
  const cudaLaunchConfig_t config = grid_of_items(records + 1, kRecordThreads, step.stream);
  cudaLaunchKernelEx(&config, peer_check_kernel, reading);
}

// Writes the output: the own shard from all messages, or everything from the sums.
void launch_peer_write(const PeerStep& step) {
  const PeerCall& call = step.call;
  const bool scatter = call.operation == kPeerReduceScatter;
  EncodeArguments a = encode_of(call, step.scratch, scatter ? step.numel() : bucket_numel(call),
                                scatter ? step.count() : call.segment_count, 0);
  const PeerTables& tables = call.tables;
  a.segment_offsets =
      scatter ? tables.shard_offsets + step.first() + step.rank : tables.segment_offsets;
  a.segment_kinds = scatter ? tables.segment_kinds + step.first() : tables.segment_kinds;
  if (a.segment_count == 0) return;
  Workspace work = {};
  work.tile_begin = step.scratch.tile_begin;
  work.nnz_states = step.scratch.cleared;
  work.zeroed_bytes = sizeof(ScanState);
  launch_cut(a, work, step.stream);
  const PeerReading reading = reading_of(step, scatter ? kPeerMessages : kPeerSums);
  const cudaLaunchConfig_t config =
      grid_for(a.numel / kPiciTile + a.segment_count, multiprocessors() * kCompactBlocks,
               kCompactThreads, step.stream);
  const int64_t* tile_begin = work.tile_begin;
  if (call.value_dtype == kFp32) {
    cudaLaunchKernelEx(&config, peer_write_kernel<kFp32>, reading, tile_begin, a.segment_offsets,
                       a.segment_count, call.dtype, step.own.out);
  } else if (call.value_dtype == kBf16) {
    cudaLaunchKernelEx(&config, peer_write_kernel<kBf16>, reading, tile_begin, a.segment_offsets,
                       a.segment_count, call.dtype, step.own.out);
  } else {
    cudaLaunchKernelEx(&config, peer_write_kernel<kFp16>, reading, tile_begin, a.segment_offsets,
                       a.segment_count, call.dtype, step.own.out);
  }
}

// Runs the ranks of this process together: waits for all peers, or takes each one's part when it
// has come.
void launch_peer_meet(const PeerCall& call, PeerPhase phase, cudaStream_t stream) {
  const PeerStage stage = {call.operation, phase};
  cudaLaunchConfig_t config = grid_for(1, 1, kMeetThreads, stream);
  config.gridDim.y = static_cast<unsigned>(call.domain.local_ranks);
  cudaLaunchKernelEx(&config, peer_meet_kernel, call.domain, stage);
}

int64_t staged_bytes(const PeerCall& call) {
  return call.in_order_of_coming ? call.domain.world * call.domain.sum_room : 0;
}

void launch_peer_take(const PeerCall& call, uint8_t* staged, int64_t stride, cudaStream_t stream) {
  const PeerStage stage = {call.operation, kPeerMessages};
  // One block a multiprocessor, shared by the ranks: all are resident.
  const int64_t share = multiprocessors() / call.domain.local_ranks;
  cudaLaunchConfig_t config = grid_for(call.domain.sum_room / (16 * kMoveThreads) + 1,
                                       share > 0 ? share : 1, kMoveThreads, stream);
  config.gridDim.y = static_cast<unsigned>(call.domain.local_ranks);
  cudaLaunchKernelEx(&config, peer_take_kernel, call.domain, stage, call.buffers[kPeerMessages],
                     call.tables, staged, stride);
}

}  // namespace

int64_t peer_workspace_bytes(const PeerCall& call) {
  Carver memory(nullptr);
  for (int i = 0; i < call.domain.local_ranks; ++i) lay_out_scratch(call, memory);
  return memory.used() + call.domain.local_ranks * staged_bytes(call);
}

void launch_peer_collective(const PeerCall& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const int ranks = call.domain.local_ranks;
  Carver memory(call.workspace);
  uint8_t* staged = memory.take<uint8_t>(ranks * staged_bytes(call));
  PeerScratch scratch[kMaxPeers];
  for (int i = 0; i < ranks; ++i) scratch[i] = lay_out_scratch(call, memory);
  const auto step = [&](int i) -> PeerStep {
    return {call,
            call.ranks[i],
            call.domain.first_rank + i,
            scratch[i],
            call.in_order_of_coming ? staged + i * staged_bytes(call) : nullptr,
            stream};
  };
  if (call.operation != kPeerAllGather) {
    for (int i = 0; i < ranks; ++i) {
      if (call.ranks[i].message != nullptr) {
        launch_peer_put(step(i));
      } else {
        launch_peer_encode(step(i));
      }
    }
    if (call.in_order_of_coming) {
      launch_peer_take(call, staged, staged_bytes(call), stream);
    } else {
      launch_peer_meet(call, kPeerMessages, stream);
    }
    for (int i = 0; i < ranks; ++i) launch_peer_check(step(i), kPeerMessages);
  }
  if (call.operation != kPeerReduceScatter) {
    for (int i = 0; i < ranks; ++i) launch_peer_shard(step(i));
    launch_peer_meet(call, kPeerSums, stream);
    for (int i = 0; i < ranks; ++i) launch_peer_check(step(i), kPeerSums);
  }
  for (int i = 0; i < ranks; ++i) launch_peer_write(step(i));
}

}  // namespace megatron_sparse
