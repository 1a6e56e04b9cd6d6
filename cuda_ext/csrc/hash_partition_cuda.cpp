// The partition hash and Algorithm 1 on CUDA: checks, device, stream, launch. Their schemas are
// hash_partition.cpp's and hash_partition_hierarchical.cpp's.
//
// Each call waits for its launches and reads a few words: the entries found out of range.
#include "cuda_binding.h"
#include "hash_check.h"

namespace megatron_sparse {
namespace {

// Refuses an entry that the kernels found out of range.
void check_found(int64_t found, const int64_t* entries, int64_t limit, const char* name,
                 void* stream) {
  if (found == kNothingFound) return;
  refuse_entry(name, found, limit, read_words(entries + found, 1, stream)[0]);
}

Tensor hash_map_cuda(const Tensor& entries, int64_t numel, int64_t partitions, int64_t seed,
                     int64_t code) {
  const HashMap map = check_map(code);
  const char* name = entries_of_map(map);
  check_hash(numel, partitions, "hash_map");
  check_vector(entries, name, ScalarType::Long, -1);
  torch::stable::accelerator::DeviceGuard guard(entries.get_device_index());
  Tensor result = torch::stable::new_empty(entries, {entries.numel()});
  const Tensor status = new_words(entries, 1);
  void* stream = current_stream(entries);
  launch_hash_map({map, entries_of(entries), entries.numel(), numel, partitions, seed,
                   words_of(result), words_of(status)},
                  stream);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  check_found(read_words(words_of(status), 1, stream)[0], entries_of(entries), numel, name, stream);
  return result;
}

std::tuple<Tensor, Tensor, Tensor> hash_memory_cuda(const Tensor& indices,
                                                    const Tensor& partition_of, int64_t numel,
                                                    int64_t partitions, int64_t parallel_slots,
                                                    int64_t serial_slots, int64_t rehashes,
                                                    int64_t seed) {
  check_hash_memory(indices, partition_of, numel, partitions, parallel_slots, serial_slots,
                    rehashes);
  const int64_t count = indices.numel();
  torch::stable::accelerator::DeviceGuard guard(indices.get_device_index());
  const Tensor entries = new_words(indices, count);
  const Tensor offsets = new_words(indices, partitions + 1);
  const Tensor counts = new_words(indices, 2), status = new_words(indices, 2);
  const int64_t bytes =
      hash_memory_workspace_bytes(count, partitions, parallel_slots + serial_slots);
  const Tensor workspace = new_workspace(indices, bytes);
  void* stream = current_stream(indices);
  launch_hash_memory(
      {entries_of(indices), entries_of(partition_of), count, numel, partitions, parallel_slots,
       serial_slots, rehashes, seed, words_of(entries), words_of(offsets), words_of(counts),
       words_of(status), workspace.mutable_data_ptr()},
      stream);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const std::vector<int64_t> found = read_words(words_of(status), 2, stream);
  check_found(found[0], entries_of(indices), numel, "hierarchical_hash: indices", stream);
  check_found(found[1], entries_of(partition_of), partitions, "hierarchical_hash: partition_of",
              stream);
  return {entries, offsets, counts};
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("hash_map", TORCH_BOX(&megatron_sparse::hash_map_cuda));
  m.impl("hash_memory", TORCH_BOX(&megatron_sparse::hash_memory_cuda));
}
