// hash_memory on the CPU: ZEN's Algorithm 1.
//
// The memory x[n][r1 + r2] holds for each partition r1 slots that h_1 ... h_k address in parallel
// and r2 that an atomic counter hands out. A slot holds the number of an entry, plus one: 0 is
// free. From it follow index and value, so values need not lie in a dense tensor, nor here.
//
// The paper checks that a slot is free, writes it, and reads it back. Between two threads that is
// not enough: both find it free, the first writes and reads its own number, then the second
// overwrites it, and an entry is lost. Here check, write and read-back are one compare-and-swap.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "hash_check.h"

namespace megatron_sparse {
namespace {

using Slot = std::atomic<uint32_t>;

struct Waiting {  // an entry that found the serial memory of its partition full
  int64_t partition;
  int64_t ticket;
  uint32_t entry;
};

// x and its counters.
struct HashMemory {
  int64_t parallel;  // r1
  int64_t stride;    // r1 + r2
  std::vector<HashSeed> seeds;
  std::vector<Slot> slots;                   // [partitions][stride]
  std::vector<std::atomic<int64_t>> serial;  // [partitions], tickets given

  // May be called by many threads at once; every entry ends up in one slot or in the caller's list.
  void place(int64_t partition, uint32_t index, uint32_t entry, std::vector<Waiting>& waiting) {
    Slot* memory = slots.data() + partition * stride;
    for (const HashSeed& seed : seeds) {
      Slot& slot = memory[scale_hash(hash_at(seed, index), static_cast<uint32_t>(parallel))];
      uint32_t found = slot.load(std::memory_order_relaxed);
      if (found == 0 && slot.compare_exchange_strong(found, entry + 1, std::memory_order_relaxed)) {
        return;
      }
    }
    const int64_t ticket = serial[partition].fetch_add(1, std::memory_order_relaxed);
    if (ticket < stride - parallel) {
      memory[parallel + ticket].store(entry + 1, std::memory_order_relaxed);
    } else {
      waiting.push_back({partition, ticket, entry});
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> hash_memory_cpu(const Tensor& indices,
                                                   const Tensor& partition_of, int64_t numel,
                                                   int64_t partitions, int64_t parallel_slots,
                                                   int64_t serial_slots, int64_t rehashes,
                                                   int64_t seed) {
  check_hash_memory(indices, partition_of, numel, partitions, parallel_slots, serial_slots,
                    rehashes);
  const int64_t count = indices.numel();
  const int64_t* index = check_entries(indices, "hierarchical_hash: indices", numel);
  const int64_t* partition =
      check_entries(partition_of, "hierarchical_hash: partition_of", partitions);

  const int64_t stride = parallel_slots + serial_slots;
  HashMemory memory = {parallel_slots,
                       stride,
                       {},
                       std::vector<Slot>(partitions * stride),
                       std::vector<std::atomic<int64_t>>(partitions)};
  for (int64_t i = 0; i < rehashes; ++i) {
    memory.seeds.push_back(
        hash_seed(static_cast<uint64_t>(seed), kDrawSlot + static_cast<uint64_t>(i)));
  }
  const int64_t chunks = (count + kHashChunk - 1) / kHashChunk;
  std::vector<std::vector<Waiting>> waiting(chunks);
  for_each_chunk(count, kHashChunk, [&](int64_t chunk, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      memory.place(partition[i], static_cast<uint32_t>(index[i]), static_cast<uint32_t>(i),
                   waiting[chunk]);
    }
  });

  // The serial memory grows by exactly the overflow of its counters.
  std::vector<int64_t> grown_begin(partitions + 1, 0);
  int64_t serial = 0;
  for (int64_t p = 0; p < partitions; ++p) {
    const int64_t tickets = memory.serial[p];
    serial += tickets;
    grown_begin[p + 1] = grown_begin[p] + std::max<int64_t>(tickets - serial_slots, 0);
  }
  std::vector<uint32_t> grown(grown_begin[partitions]);
  for (const std::vector<Waiting>& list : waiting) {
    for (const Waiting& one : list) {
      grown[grown_begin[one.partition] + one.ticket - serial_slots] = one.entry;
    }
  }

  // Extraction. An entry's slot depends on the threads; sorting removes this dependence. The keys
  // are (index, entry), so even repeated indices come in the order in which they were given.
  std::vector<std::vector<uint64_t>> extracted(partitions);
  const auto key_of = [index](uint32_t entry) {
    return static_cast<uint64_t>(index[entry]) << 32 | entry;
  };
  for_each(partitions, [&](int64_t p) {
    std::vector<uint64_t>& keys = extracted[p];
    for (int64_t i = p * stride; i < (p + 1) * stride; ++i) {
      const uint32_t found = memory.slots[i].load(std::memory_order_relaxed);
      if (found != 0) keys.push_back(key_of(found - 1));
    }
    for (int64_t i = grown_begin[p]; i < grown_begin[p + 1]; ++i) keys.push_back(key_of(grown[i]));
    std::sort(keys.begin(), keys.end());
  });

  Tensor entries = torch::stable::new_empty(indices, {count});
  Tensor offsets = torch::stable::new_empty(indices, {partitions + 1});
  int64_t* cut = static_cast<int64_t*>(offsets.mutable_data_ptr());
  cut[0] = 0;
  for (int64_t p = 0; p < partitions; ++p) {
    cut[p + 1] = cut[p] + static_cast<int64_t>(extracted[p].size());
  }
  int64_t* out = static_cast<int64_t*>(entries.mutable_data_ptr());
  for_each(partitions, [&](int64_t p) {
    std::transform(extracted[p].begin(), extracted[p].end(), out + cut[p],
                   [](uint64_t key) { return static_cast<int64_t>(static_cast<uint32_t>(key)); });
  });
  return {entries, offsets, result_of(indices, {serial, grown_begin[partitions]})};
}

}  // namespace
}  // namespace megatron_sparse

// The numbers of the entries, partition after partition: on the CPU in the order of their indices,
// on CUDA in that of the slots. Then the offsets of the partitions, and the counts of entries in
// serial memory and beyond it.
STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def(
      "hash_memory(Tensor indices, Tensor partition_of, int numel, int partitions, "
      "int parallel_slots, int serial_slots, int rehashes, int seed) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("hash_memory", TORCH_BOX(&megatron_sparse::hash_memory_cpu));
}
