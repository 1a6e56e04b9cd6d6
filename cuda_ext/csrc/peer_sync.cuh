// Barriers between peers (they "meet"): a rank raises its flag in every peer's window, and waits
// for theirs in its own.
//
// A flag holds the number of the operation, which only grows; a peer may be one ahead.
// With the highest bit set it holds the rank's failure instead: ranks that wait then fail with the
// same error at once, not at their own deadlines, which would name the wrong rank.
//
// Order: everything that this GPU wrote before is released by __threadfence_system() and a volatile
// store, which is a relaxed one at system scope; a volatile load and the same fence acquire it.
// Every spin on a peer has a deadline, and none traps. A rank whose error word is set waits for no
// other.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "peer_launch.h"

#ifndef __CUDACC__
#include <chrono>
#endif

namespace megatron_sparse {

constexpr int kMeetThreads = 96;
static_assert(kMeetThreads >= kMaxPeers && kMeetThreads % 32 == 0, "a thread for each peer");

constexpr unsigned kNobody = 0xffffffffu;

// The current operation, for errors.
struct PeerStage {
  PeerOperation operation;
  PeerPhase phase;
};

// Nanoseconds since a moment that is the same for the whole GPU.
__device__ __forceinline__ int64_t clock_ns() {
#ifdef __CUDACC__
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
#endif
}

__device__ __forceinline__ PeerControl* control_of(const PeerDomain& domain, int rank) {
  return reinterpret_cast<PeerControl*>(domain.windows[rank]);
}

__device__ __forceinline__ uint8_t* area_of(const PeerDomain& domain, int rank, PeerPhase phase,
                                            int buffer) {
  const int64_t room = phase == kPeerMessages ? domain.message_room : domain.sum_room;
  const int64_t before = phase == kPeerMessages ? 0 : 2 * domain.message_room;
  return domain.windows[rank] + kControlBytes + before + buffer * room;
}

// True from the claim on: the error's fields may still be on their way.
__device__ __forceinline__ bool has_failed(const PeerControl* control) {
  return *static_cast<const volatile int64_t*>(&control->error[kErrorCode]) != kPeerOk;
}

// An error on its way into the error words.
struct PeerFault {
  PeerError code;
  int64_t rank;
  int64_t reporter;
  int64_t segment;
  int64_t field;
  int64_t value;
};

// Writes the error words; the first error stays. Its thread claims the code's word, writes the
// other words, and publishes the code last: a reader that sees a code sees the fields that belong
// to it.
__device__ inline void fail(PeerControl* control, const PeerStage& stage, const PeerFault& fault) {
  int64_t* const words = control->error;
  const auto claimed = static_cast<unsigned long long>(kPeerClaimed);
  if (atomicCAS(reinterpret_cast<unsigned long long*>(&words[kErrorCode]), 0ull, claimed) != 0ull) {
    return;
  }
  words[kErrorOperation] = stage.operation;
  words[kErrorPhase] = stage.phase;
  words[kErrorEpoch] = static_cast<int64_t>(control->epochs[stage.phase]);
  words[kErrorRank] = fault.rank;
  words[kErrorReporter] = fault.reporter;
  words[kErrorSegment] = fault.segment;
  words[kErrorField] = fault.field;
  words[kErrorValue] = fault.value;
  __threadfence();
  *static_cast<volatile int64_t*>(&words[kErrorCode]) = fault.code;
}

// The code of a rank that has failed. Waits for a thread of this GPU that is inside `fail`, which
// waits for nothing; so this spin needs no deadline.
__device__ inline int64_t error_code(const PeerControl* control) {
  const volatile int64_t* const word = &control->error[kErrorCode];
  int64_t code = *word;
  for (; code == kPeerClaimed; code = *word) __nanosleep(20);
  __threadfence();
  return code;
}

// A failure as a flag: bit 63, the code in the 7 bits below, the rank in the next 16.
constexpr unsigned long long kFailed = 1ull << 63;

__device__ __forceinline__ unsigned long long failure_flag(const PeerControl* control) {
  const auto code = static_cast<unsigned long long>(error_code(control));
  return kFailed | code << 56 | static_cast<unsigned long long>(control->error[kErrorRank]) << 40;
}

__device__ __forceinline__ PeerFault fault_of(unsigned long long flag, int reporter) {
  return {static_cast<PeerError>(flag >> 56 & 0x7f),
          static_cast<int64_t>(flag >> 40 & 0xffff),
          reporter,
          -1,
          0,
          0};
}

// Called by one thread before the peers' data are known to be there: counts the operation.
__device__ inline void begin_epoch(PeerControl* control, const PeerStage& stage, int buffer,
                                   int rank) {
  const unsigned long long epoch = ++control->epochs[stage.phase];
  // A captured graph replays its buffers: it must hold an even number of operations of each phase.
  if (epoch % 2 != static_cast<unsigned long long>(buffer)) {
    fail(control, stage, {kPeerBuffer, rank, rank, 0, 0, buffer});
  }
}

// Raises this rank's flag in the window of peer `peer`.
__device__ __forceinline__ void raise_flag(const PeerDomain& domain, int rank, int peer,
                                           PeerPhase phase) {
  const PeerControl* own = control_of(domain, rank);
  const unsigned long long flag = has_failed(own) ? failure_flag(own) : own->epochs[phase];
  __threadfence_system();
  *static_cast<volatile unsigned long long*>(&control_of(domain, peer)->flags[phase][rank]) = flag;
}

__device__ __forceinline__ unsigned long long read_flag(const PeerControl* own, int peer,
                                                        PeerPhase phase) {
  return *static_cast<const volatile unsigned long long*>(&own->flags[phase][peer]);
}

// A block's shared memory for waiting.
struct PeerWait {
  unsigned missing;  // the lowest such rank, or kNobody
  unsigned failed;   // likewise, of the ranks whose flag reports a failure
};

__device__ __forceinline__ void begin_wait(PeerWait& wait) {
  if (threadIdx.x == 0) wait.missing = wait.failed = kNobody;
  __syncthreads();
}

// How long a rank waits. For sums twice as long: a peer may still be waiting for messages, and
// reports its own failure when that wait ends.
__device__ __forceinline__ int64_t patience_ns(const PeerDomain& domain, PeerPhase phase) {
  return phase == kPeerSums ? 2 * domain.deadline_ns : domain.deadline_ns;
}

// Called by the whole block: turns a timed-out wait into this rank's error, and raises its failure
// flag in all windows. The error of a peer that has failed comes first, because it names the cause.
__device__ __forceinline__ void end_wait(const PeerWait& wait, const PeerDomain& domain, int rank,
                                         const PeerStage& stage) {
  PeerControl* own = control_of(domain, rank);
  __syncthreads();
  if (wait.failed == kNobody && wait.missing == kNobody) return;
  if (threadIdx.x == 0) {
    if (wait.failed != kNobody) {
      const int reporter = static_cast<int>(wait.failed);
      fail(own, stage, fault_of(read_flag(own, reporter, stage.phase), reporter));
    } else {
      fail(own, stage, {kPeerMissing, wait.missing, rank, -1, 0, 0});
    }
  }
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= domain.world) return;
  raise_flag(domain, rank, peer, kPeerMessages);
  raise_flag(domain, rank, peer, kPeerSums);
}

// One block for each rank, the ranks along y: raises the flags, then waits for all peers' flags.
__global__ void __launch_bounds__(kMeetThreads)
    peer_meet_kernel(PeerDomain domain, PeerStage stage) {
  __shared__ PeerWait wait;
  const int rank = domain.first_rank + static_cast<int>(blockIdx.y);
  const int peer = static_cast<int>(threadIdx.x);
  PeerControl* own = control_of(domain, rank);
  begin_wait(wait);
  if (peer < domain.world) raise_flag(domain, rank, peer, stage.phase);
  if (has_failed(own)) return;  // no block of this launch sets it before all have read it
  __syncthreads();
  if (peer < domain.world) {
    const int64_t begin_ns = clock_ns();
    for (;;) {
      const unsigned long long flag = read_flag(own, peer, stage.phase);
      if (flag & kFailed) {
        atomicMin(&wait.failed, static_cast<unsigned>(peer));
        break;
      }
      if (flag >= own->epochs[stage.phase]) break;
      if (*static_cast<const volatile unsigned*>(&wait.failed) != kNobody) break;
      if (clock_ns() - begin_ns > patience_ns(domain, stage.phase)) {
        atomicMin(&wait.missing, static_cast<unsigned>(peer));
        break;
      }
      __nanosleep(100);
    }
    __threadfence_system();
  }
  end_wait(wait, domain, rank, stage);
}

}  // namespace megatron_sparse
