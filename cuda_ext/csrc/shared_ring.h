// The memory that the ranks of a node share (shared_engine.h moves messages through it): a bell for
// each rank, and a ring of slots for each ordered pair of ranks and each lane. Fresh memory, all
// zero, is a valid beginning. Counters only grow, and each has one writer.
#pragma once

#include <atomic>
#include <cstdint>

namespace megatron_sparse {

inline constexpr int kLanes = 2;      // pairwise messages, and those of collectives
inline constexpr int kGrants = 256;   // receives that a ring can hold
inline constexpr int64_t kLine = 64;  // of the processor's cache

// Agreed by all ranks of the node.
struct Geometry {
  int ranks;
  int slots;           // of a ring
  int64_t slot_bytes;  // a multiple of kLine
};

// Where a rank sleeps until another one has done something for it.
struct alignas(kLine) Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> asleep;
};

// A receive that has been posted. The n-th grant of a ring is its message n.
struct Grant {
  int64_t tag;
  int64_t bytes;
};

// A piece of a message.
struct alignas(kLine) Slot {
  uint64_t message;
  int64_t offset;  // where it belongs; or the length of a message that does not fit its receive
  int64_t bytes;   // or kMisfit
};
inline constexpr int64_t kMisfit = -1;

struct alignas(kLine) Ring {
  alignas(kLine) std::atomic<uint64_t> granted;  // written by the receiver
  alignas(kLine) std::atomic<uint64_t> taken;    // by the sender: grants it has read
  alignas(kLine) std::atomic<uint64_t> filled;   // by the sender: slots
  alignas(kLine) std::atomic<uint64_t> drained;  // by the receiver: slots
  alignas(kLine) Grant grants[kGrants];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share them");

inline int64_t ring_bytes(const Geometry& geometry) {
  return sizeof(Ring) + geometry.slots * (sizeof(Slot) + geometry.slot_bytes);
}

inline int64_t segment_bytes(const Geometry& geometry) {
  const int64_t pairs = int64_t{geometry.ranks} * (geometry.ranks - 1);
  return geometry.ranks * int64_t{sizeof(Bell)} + pairs * kLanes * ring_bytes(geometry);
}

// One side's view of a ring.
struct RingView {
  Ring* ring = nullptr;
  Slot* slots = nullptr;
  char* data = nullptr;
  Geometry geometry = {};

  RingView() = default;
  RingView(void* segment, const Geometry& of, int sender, int receiver, int lane) : geometry(of) {
    const int64_t pair = int64_t{sender} * (of.ranks - 1) + receiver - (receiver > sender);
    char* at = static_cast<char*>(segment) + of.ranks * int64_t{sizeof(Bell)} +
               (pair * kLanes + lane) * ring_bytes(of);
    ring = reinterpret_cast<Ring*>(at);
    slots = reinterpret_cast<Slot*>(at + sizeof(Ring));
    data = at + sizeof(Ring) + of.slots * sizeof(Slot);
  }

  Slot& slot(uint64_t number) const { return slots[number % geometry.slots]; }
  char* slot_data(uint64_t number) const {
    return data + (number % geometry.slots) * geometry.slot_bytes;
  }
};

}  // namespace megatron_sparse
