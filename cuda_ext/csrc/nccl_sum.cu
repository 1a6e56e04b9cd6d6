// The sparse sum of a bucket over NCCL: `direct` and `agsparse` with messages of fixed size, queued
// without the host in between.
//
// Shards go to their owners in one group of sends and receives; the owner adds them in rank order,
// encodes the sum once and sends it to everyone in another. Launches for up to 16 ranks: 2 to add,
// which cut the sum into tiles too, 2 to encode, 2 to place the sums. Bytes: as of `direct`.
#include <algorithm>
#include <vector>

#include "decode_launch.h"
#include "dtypes.h"
#include "encode_launch.h"
#include "launch_grid.cuh"
#include "nccl_sum_launch.h"

namespace megatron_sparse {
namespace {

// With a single shard all ranks share it.
const NcclShard& shard_of(const NcclSum& sum, int rank) {
  return sum.shards[sum.shard_count == 1 ? 0 : rank];
}

const NcclShard& own_shard(const NcclSum& sum) {
  return shard_of(sum, sum.rank);
}

// Where a shard's entries begin in tables that have one more than segments for each shard.
int64_t entry(const NcclSum& sum, const NcclShard& shard) {
  return shard.first_segment + (&shard - sum.shards);
}

uint32_t sum_step(const NcclSum& sum, const NcclShard& shard) {
  return static_cast<uint32_t>(sum.sum_steps[&shard - sum.shards]);
}

int64_t encoder_report_words(const NcclShard& shard) {
  return kStatusWords + 2 * shard.segment_count;
}

// A decoder's workspace is a multiple of what a Carver cuts.
int64_t adder_bytes(const NcclSum& sum) {
  return sum.world * decode_workspace_bytes(own_shard(sum).segment_count);
}

// Its workspace lies behind that of adding: both begin in one launch.
EncodeArguments encoder_of(const NcclSum& sum) {
  const NcclShard& own = own_shard(sum);
  int64_t* status = sum.report + kStatusWords * sum.world;
  return {sum.acc + own.begin,
          own.numel,
          kFp32,
          sum.value_dtype,
          sum.tables.shard_offsets + entry(sum, own),
          sum.tables.segment_kinds + own.first_segment,
          own.segment_count,
          sum_step(sum, own),
          0,
          sum.sums + own.sum_begin,
          own.sum_bytes,
          static_cast<uint8_t*>(sum.workspace) + adder_bytes(sum),
          status + kStatusWords,
          status + kStatusWords + own.segment_count,
          status,
          sum.tables.sum_slots + entry(sum, own),
          nullptr};
}

// `add(rank)` posts the send to and the receive from a peer, and returns NCCL's result.
template <class Add>
int in_one_group(const NcclSum& sum, Add add) {
  if (sum.world == 1) return kNcclSuccess;
  int result = sum.nccl.group_start();
  if (result != kNcclSuccess) return result;
  for (int step = 1; step < sum.world && result == kNcclSuccess; ++step) {
    result = add((sum.rank + step) % sum.world);
  }
  // A group must be ended once it was begun, even after an error.
  const int ended = sum.nccl.group_end();
  return result != kNcclSuccess ? result : ended;
}

// Empty messages are skipped: NCCL would send them.
int exchange(const NcclSum& sum, int peer, const uint8_t* from, int64_t send_bytes, uint8_t* into,
             int64_t receive_bytes, void* stream) {
  int result = kNcclSuccess;
  if (send_bytes > 0) {
    result =
        sum.nccl.send(from, static_cast<size_t>(send_bytes), kNcclUint8, peer, sum.comm, stream);
  }
  if (result == kNcclSuccess && receive_bytes > 0) {
    result =
        sum.nccl.recv(into, static_cast<size_t>(receive_bytes), kNcclUint8, peer, sum.comm, stream);
  }
  return result;
}

class Queue {
 public:
  Queue(const NcclSum& sum, void* stream) : sum_(sum), own_(own_shard(sum)), stream_(stream) {}

  int run() {
    mark(0);
    int result = scatter();
    mark(1);
    if (result != kNcclSuccess) return result;
    add_messages();
    mark(2);
    if (!sum_.gathers) return kNcclSuccess;
    encode();
    mark(3);
    result = gather();
    mark(4);
    if (result != kNcclSuccess) return result;
    place_sums();
    mark(5);
    return kNcclSuccess;
  }

 private:
  void mark(int border) const {
    if (sum_.events[border] != nullptr) {
      cudaEventRecord(static_cast<cudaEvent_t>(sum_.events[border]),
                      static_cast<cudaStream_t>(stream_));
    }
  }

  uint8_t* received_from(int rank) const { return sum_.received + rank * own_.message_bytes; }

  int scatter() const {
    return in_one_group(sum_, [&](int peer) {
      const NcclShard& theirs = shard_of(sum_, peer);
      return exchange(sum_, peer, sum_.message + theirs.message_begin, theirs.message_bytes,
                      received_from(peer), own_.message_bytes, stream_);
    });
  }

  int gather() const {
    return in_one_group(sum_, [&](int peer) {
      const NcclShard& theirs = shard_of(sum_, peer);
      return exchange(sum_, peer, sum_.sums + own_.sum_begin, own_.sum_bytes,
                      sum_.sums + theirs.sum_begin, theirs.sum_bytes, stream_);
    });
  }

  void add_messages() const {
    Carver memory(sum_.workspace);
    std::vector<DecodeArguments> calls;
    for (int rank = 0; rank < sum_.world; ++rank) {
      const bool is_own = rank == sum_.rank;
      calls.push_back({sum_.acc + own_.begin, own_.numel,
                       is_own ? sum_.message + own_.message_begin : received_from(rank),
                       own_.message_bytes, sum_.tables.segment_offsets + own_.first_segment,
                       own_.segment_count, own_.begin, sum_.value_dtype, sum_.step, true,
                       memory.take<uint8_t>(decode_workspace_bytes(own_.segment_count)),
                       sum_.report + kStatusWords * rank,
                       sum_.tables.message_slots + entry(sum_, own_)});
    }
    const EncodeArguments encoder = encoder_of(sum_);
    launch_decode_sum(calls.data(), sum_.world, stream_, sum_.gathers ? &encoder : nullptr);
  }

  void encode() const {
    // A damaged message, or one that its rank could not make, spoils the sum for everyone.
    const Earlier messages = {sum_.report, sum_.world, kStatusWords};
    const Earlier own_calls = {sum_.earlier, sum_.earlier_count, 1};
    launch_encode_cut(encoder_of(sum_), stream_, {messages, own_calls});
  }

  void place_sums() const {
    int64_t* statuses = sum_.report + kStatusWords * sum_.world + encoder_report_words(own_);
    Carver memory(sum_.workspace);
    std::vector<DecodeArguments> calls;
    for (int rank = 0; rank < sum_.world; ++rank) {
      const NcclShard& shard = shard_of(sum_, rank);
      calls.push_back({sum_.acc + shard.begin, shard.numel, sum_.sums + shard.sum_begin,
                       shard.sum_bytes, sum_.tables.shard_offsets + entry(sum_, shard),
                       shard.segment_count, 0, sum_.value_dtype, sum_step(sum_, shard), true,
                       memory.take<uint8_t>(decode_workspace_bytes(shard.segment_count)),
                       statuses + kStatusWords * rank, sum_.tables.sum_slots + entry(sum_, shard)});
    }
    launch_decode_place(calls.data(), sum_.world, stream_);
  }

  const NcclSum& sum_;
  const NcclShard& own_;
  void* stream_;
};

}  // namespace

int64_t nccl_sum_report_words(const NcclSum& sum) {
  const int64_t statuses = kStatusWords * sum.world;
  return sum.gathers ? 2 * statuses + encoder_report_words(own_shard(sum)) : statuses;
}

int64_t nccl_sum_workspace_bytes(const NcclSum& sum) {
  if (!sum.gathers) return adder_bytes(sum);
  int64_t placing = 0;
  for (int rank = 0; rank < sum.world; ++rank) {
    placing += decode_workspace_bytes(shard_of(sum, rank).segment_count);
  }
  return std::max(adder_bytes(sum) + encode_workspace_bytes(encoder_of(sum)), placing);
}

int launch_nccl_sparse_sum(const NcclSum& sum, void* stream) {
  return Queue(sum, stream).run();
}

}  // namespace megatron_sparse
