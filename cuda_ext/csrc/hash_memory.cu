// ZEN's Algorithm 1 on CUDA: every entry finds a slot of its partition in a hash memory.
//
// hash_partition_hierarchical.cpp is the same for the CPU and explains why one compare-and-swap
// replaces the paper's check, write and read-back. One thread an entry: up to k rehashes into the
// r1 parallel slots, then a ticket of an atomic counter for the r2 serial ones; entries that
// overflow them go to a list with their tickets. The memory is then compacted, partition after
// partition, in the order of the slots, and each partition's overflow follows. An entry's slot
// depends on the schedule, so the caller sorts the entries.
//
// Bytes: 16 an entry read; 4 (r1 + r2) n written once and read once; 32 an entry touched for the
// sector of its slot; 8 an entry written.
#include "hash_launch.h"
#include "hash_partition.h"
#include "launch_grid.cuh"
#include "tile_scan.cuh"

namespace megatron_sparse {
namespace {

struct MemoryWorkspace {
  uint32_t* slots;           // [partitions * (r1 + r2)], zeroed: an entry's number + 1, 0 is free
  unsigned* serial;          // [partitions], zeroed: tickets given
  ScanState* states;         // zeroed, one for each tile of slots
  unsigned* ticket;          // zeroed
  unsigned* waiting;         // zeroed: entries that found the serial memory full
  uint32_t* waiting_entry;   // [count]
  uint32_t* waiting_ticket;  // [count]
  int64_t* grown_begin;      // [partitions + 1]
  int64_t zeroed_bytes;
  int64_t bytes;
};

MemoryWorkspace lay_out_memory(void* base, int64_t count, int64_t partitions, int64_t slots) {
  Carver memory(base);
  MemoryWorkspace w = {};
  w.slots = memory.take<uint32_t>(slots);
  w.serial = memory.take<unsigned>(partitions);
  w.states = memory.take<ScanState>(scan_tiles(slots));
  w.ticket = memory.take<unsigned>(1);
  w.waiting = memory.take<unsigned>(1);
  w.zeroed_bytes = memory.used();
  w.waiting_entry = memory.take<uint32_t>(count);
  w.waiting_ticket = memory.take<uint32_t>(count);
  w.grown_begin = memory.take<int64_t>(partitions + 1);
  w.bytes = memory.used();
  return w;
}

int64_t slots_of(const HashMemoryArguments& call) {
  return call.partitions * (call.parallel_slots + call.serial_slots);
}

__global__ void __launch_bounds__(kScanThreads)
    memory_place_kernel(HashMemoryArguments call, MemoryWorkspace work) {
  const int64_t stride = call.parallel_slots + call.serial_slots;
  for (int64_t i = first_item(); i < call.count; i += item_stride()) {
    const int64_t index = call.indices[i], partition = call.partition_of[i];
    const bool wrong_index = index < 0 || index >= call.numel;
    if (wrong_index || partition < 0 || partition >= call.partitions) {
      atomicMin(reinterpret_cast<unsigned long long*>(&call.status[wrong_index ? 0 : 1]),
                static_cast<unsigned long long>(i));
      continue;
    }
    uint32_t* memory = work.slots + partition * stride;
    const uint32_t number = static_cast<uint32_t>(i) + 1;
    bool placed = false;
    for (int64_t k = 0; k < call.rehashes && !placed; ++k) {
      const HashSeed seed =
          hash_seed(static_cast<uint64_t>(call.seed), kDrawSlot + static_cast<uint64_t>(k));
      const uint32_t at = scale_hash(hash_at(seed, static_cast<uint64_t>(index)),
                                     static_cast<uint32_t>(call.parallel_slots));
      placed = atomicCAS(&memory[at], 0u, number) == 0;
    }
    if (placed) continue;
    const unsigned ticket = atomicAdd(&work.serial[partition], 1u);
    if (ticket < call.serial_slots) {
      memory[call.parallel_slots + ticket] = number;
    } else {
      const unsigned at = atomicAdd(work.waiting, 1u);
      work.waiting_entry[at] = static_cast<uint32_t>(i);
      work.waiting_ticket[at] = ticket;
    }
  }
}

// One block: the prefix sums of how much each partition's serial memory has to grow.
__global__ void __launch_bounds__(kScanThreads)
    memory_grow_kernel(HashMemoryArguments call, MemoryWorkspace work) {
  __shared__ int64_t sums[kScanThreads / 32];
  int64_t grown = 0, serial = 0;
  for (int64_t first = 0; first < call.partitions; first += kScanThreads) {
    const int64_t p = first + threadIdx.x;
    const int64_t tickets = p < call.partitions ? work.serial[p] : 0;
    const int64_t own = max(tickets - call.serial_slots, int64_t{0});
    int64_t all_grown = 0, all_tickets = 0;
    const int64_t before = block_exclusive_sum<kScanThreads>(own, sums, all_grown);
    block_exclusive_sum<kScanThreads>(tickets, sums, all_tickets);
    if (p < call.partitions) work.grown_begin[p] = grown + before;
    grown += all_grown;
    serial += all_tickets;
  }
  if (threadIdx.x == 0) {
    work.grown_begin[call.partitions] = grown;
    call.offsets[call.partitions] = call.count;
    call.counts[0] = serial;
    call.counts[1] = grown;
  }
}

__global__ void __launch_bounds__(kScanThreads)
    memory_extract_kernel(HashMemoryArguments call, MemoryWorkspace work) {
  __shared__ TileScan shared;
  const int64_t stride = call.parallel_slots + call.serial_slots;
  const int64_t slots = call.partitions * stride, tiles = scan_tiles(slots);
  for (int64_t tile = take_tile(shared, work.ticket); tile < tiles;
       tile = take_tile(shared, work.ticket)) {
    const int64_t begin = tile * kScanTile + threadIdx.x * kScanItems;
    uint32_t number[kScanItems];
    int64_t own = 0;
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) {
      number[k] = begin + k < slots ? work.slots[begin + k] : 0;
      own += number[k] != 0;
    }
    int64_t place = tile_prefix(shared, work.states, tile, own);
    int64_t partition = begin / stride, inside = begin - partition * stride;
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) {
      if (begin + k >= slots) break;
      const int64_t grown = work.grown_begin[partition];
      if (inside == 0) call.offsets[partition] = place + grown;
      if (number[k] != 0) call.entries[place++ + grown] = number[k] - 1;
      if (++inside == stride) {
        inside = 0;
        ++partition;
      }
    }
  }
}

// The overflow of a partition's serial memory follows its slots.
__global__ void __launch_bounds__(kScanThreads)
    memory_overflow_kernel(HashMemoryArguments call, MemoryWorkspace work) {
  for (int64_t i = first_item(); i < *work.waiting; i += item_stride()) {
    const uint32_t entry = work.waiting_entry[i];
    const int64_t partition = call.partition_of[entry];
    const int64_t grown = work.grown_begin[partition + 1] - work.grown_begin[partition];
    call.entries[call.offsets[partition + 1] - grown + work.waiting_ticket[i] - call.serial_slots] =
        entry;
  }
}

}  // namespace

int64_t hash_memory_workspace_bytes(int64_t count, int64_t partitions, int64_t slots) {
  return lay_out_memory(nullptr, count, partitions, partitions * slots).bytes;
}

void launch_hash_memory(const HashMemoryArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const MemoryWorkspace work =
      lay_out_memory(call.workspace, call.count, call.partitions, slots_of(call));
  cudaMemsetAsync(call.status, 0xff, 2 * sizeof *call.status, stream);
  cudaMemsetAsync(work.slots, 0, static_cast<size_t>(work.zeroed_bytes), stream);
  const cudaLaunchConfig_t entries = grid_of_items(call.count, kScanThreads, stream);
  if (call.count > 0) cudaLaunchKernelEx(&entries, memory_place_kernel, call, work);
  const cudaLaunchConfig_t one = grid_for(1, 1, kScanThreads, stream);
  cudaLaunchKernelEx(&one, memory_grow_kernel, call, work);
  const cudaLaunchConfig_t tiles =
      grid_for(scan_tiles(slots_of(call)), multiprocessors() * 8, kScanThreads, stream);
  cudaLaunchKernelEx(&tiles, memory_extract_kernel, call, work);
  if (call.count > 0) cudaLaunchKernelEx(&entries, memory_overflow_kernel, call, work);
}

}  // namespace megatron_sparse
