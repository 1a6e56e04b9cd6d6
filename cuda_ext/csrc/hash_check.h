// Argument checks that the hash bindings of both devices share.
#pragma once

#include "check.h"
#include "hash_partition.h"
#include "header.h"

namespace megatron_sparse {

inline constexpr int64_t kMaxSlots = int64_t{1} << 32;  // 16 GiB of hash memory
inline constexpr int64_t kMaxRehashes = 64;

inline void check_hash(int64_t numel, int64_t partitions, const char* op) {
  MS_CHECK(numel >= 0 && numel <= kMaxSegmentNumel, op << ": numel is out of range",
           "0 to 2^31 - 1", numel);
  MS_CHECK(partitions >= 1 && partitions <= kMaxPartitions, op << ": partitions is out of range",
           "1 to 2^16", partitions);
}

inline void check_entry_count(int64_t count, const char* name) {
  MS_CHECK(count <= kMaxSegmentNumel, name << " is too long", "below 2^31", count);
}

inline void check_hash_memory(int64_t partitions, int64_t parallel_slots, int64_t serial_slots,
                              int64_t rehashes) {
  MS_CHECK(parallel_slots >= 1 && parallel_slots <= kMaxSegmentNumel && serial_slots >= 0 &&
               serial_slots <= kMaxSegmentNumel &&
               (parallel_slots + serial_slots) * partitions <= kMaxSlots,
           "hierarchical_hash: the hash memory is out of range",
           "r1 of 1 and more, r2 of 0 and more, at most 2^32 slots in all",
           parallel_slots << " + " << serial_slots << " slots in " << partitions << " partitions");
  MS_CHECK(rehashes >= 1 && rehashes <= kMaxRehashes, "hierarchical_hash: rehashes is out of range",
           "1 to 64", rehashes);
}

inline void check_partition(int64_t partition, int64_t partitions, const char* op) {
  MS_CHECK(partition >= 0 && partition < partitions, op << ": partition is out of range",
           "0 to " << partitions - 1, partition);
}

}  // namespace megatron_sparse
