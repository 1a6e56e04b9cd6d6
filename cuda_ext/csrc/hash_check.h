// Argument checks of hashing, most of which the bindings of both devices share.
#pragma once

#include "hash_launch.h"
#include "hash_partition.h"
#include "header.h"
#include "parallel.h"

namespace megatron_sparse {

inline constexpr int64_t kMaxSlots = int64_t{1} << 32;  // 16 GiB of hash memory
inline constexpr int64_t kMaxRehashes = 64;
inline constexpr int64_t kHashChunk = int64_t{1} << 14;  // entries that a task takes, on the CPU

inline void check_hash(int64_t numel, int64_t partitions, const char* op) {
  MS_CHECK(numel >= 0 && numel <= kMaxSegmentNumel, op << ": numel is out of range",
           "0 to 2^31 - 1", numel);
  MS_CHECK(partitions >= 1 && partitions <= kMaxPartitions, op << ": partitions is out of range",
           "1 to 2^16", partitions);
}

inline HashMap check_map(int64_t map) {
  MS_CHECK(map >= 0 && map <= static_cast<int64_t>(HashMap::kPartition), "hash_map: map is unknown",
           "0 to 2", map);
  return static_cast<HashMap>(map);
}

// What errors call the entries of a map.
inline const char* entries_of_map(HashMap map) {
  return map == HashMap::kUnpermute ? "hash_map: positions" : "hash_map: elements";
}

// What entries hold is not read.
inline void check_hash_memory(const Tensor& indices, const Tensor& partition_of, int64_t numel,
                              int64_t partitions, int64_t parallel_slots, int64_t serial_slots,
                              int64_t rehashes) {
  check_hash(numel, partitions, "hierarchical_hash");
  const int64_t count = indices.numel();
  check_vector(indices, "hierarchical_hash: indices", ScalarType::Long, -1);
  check_vector(partition_of, "hierarchical_hash: partition_of", ScalarType::Long, count, indices);
  MS_CHECK(count <= kMaxSegmentNumel, "hierarchical_hash: indices is too long", "below 2^31",
           count);
  MS_CHECK(parallel_slots >= 1 && parallel_slots <= kMaxSegmentNumel && serial_slots >= 0 &&
               serial_slots <= kMaxSegmentNumel &&
               (parallel_slots + serial_slots) * partitions <= kMaxSlots,
           "hierarchical_hash: the hash memory is out of range",
           "r1 of 1 and more, r2 of 0 and more, at most 2^32 slots in all",
           parallel_slots << " + " << serial_slots << " slots in " << partitions << " partitions");
  MS_CHECK(rehashes >= 1 && rehashes <= kMaxRehashes, "hierarchical_hash: rehashes is out of range",
           "1 to 64", rehashes);
}

// An int64 vector on the CPU whose entries are in [0, limit).
inline const int64_t* check_entries(const Tensor& tensor, const char* name, int64_t limit) {
  check_vector(tensor, name, ScalarType::Long, -1);
  const int64_t* at = static_cast<const int64_t*>(tensor.const_data_ptr());
  const int64_t bad =
      first_bad(tensor.numel(), kHashChunk, [&](int64_t i) { return at[i] < 0 || at[i] >= limit; });
  if (bad != tensor.numel()) refuse_entry(name, bad, limit, at[bad]);
  return at;
}

}  // namespace megatron_sparse
