// The bindings of the CUDA ops, unmodified, compiled for the emulator as ops of their own name
// space; one more op, of what no binding calls alone; and the switches of the emulator.
#include "emulated_binding.h"

#include "decode_cuda.cpp"
#include "encode_cuda.cpp"
#include "hash_bitmap_cuda.cpp"
#include "hash_partition_cuda.cpp"
#include "moves_cuda.cpp"
#include "nccl_sum_cuda.cpp"
#include "payload_sums_cuda.cpp"
#include "prune_encode_kernel.cuh"
#include "row_sparse_cuda.cpp"
#include "threshold_cuda.cpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace megatron_sparse {

CUDA_EMULATOR_DYNAMIC_SHARED(uint4, rans_shared, 96 << 6);  // KiB: of a block of 16 warps

namespace {

using TileSource = PruneSource<kFp32, kBf16, Grid::kBf16, true>;

__global__ void prune_tile_kernel(TileSource source, int64_t begin, int length, uint32_t* out) {
  const TilePlace<TileSource> tile = {0, begin, length, source.rule_at(begin, length)}, none = {};
  const int first = first_of_lane();
  for (int p = first; p < min(length, first + 32 * kWarpWords); p += 32) out[p] = 0;
  TileSource::Element share[kWarpWords];
  load_share(source, tile, share);
  take_share(source, tile, none, share, [&](int k, uint32_t value) {
    if (first + 32 * k < length) out[first + 32 * k] = value;
  });
}

// One tile that lies at `begin` of a bucket too long for this machine: the bucket's first element
// is an address that nothing is read from.
Tensor prune_tile(const Tensor& grad, const Tensor& residual, int64_t begin, double threshold,
                  double tie_chance, double leak, int64_t key) {
  const int length = static_cast<int>(grad.numel());
  const int64_t ranges[] = {begin, begin + length};
  const float limit = static_cast<float>(threshold), chance = static_cast<float>(tie_chance);
  const auto moved = [begin](void* tile, int64_t bytes) {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(tile) -
                                   static_cast<uintptr_t>(begin * bytes));
  };
  Tensor out = torch::stable::new_empty(grad, {grad.numel()});
  void* rest = moved(residual.mutable_data_ptr(), 2);
  const TileSource source = {moved(grad.mutable_data_ptr(), 4),
                             rest,
                             rest,
                             ranges,
                             &limit,
                             &chance,
                             1,
                             static_cast<float>(leak),
                             prune_seeds(key)};
  const cudaLaunchConfig_t config = grid_for(1, 1, 32 * kCompactWarps, nullptr);
  cudaLaunchKernelEx(&config, prune_tile_kernel, source, begin, length,
                     static_cast<uint32_t*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def(
      "prune_tile(Tensor grad, Tensor(a!) residual, int begin, float threshold, float tie_chance, "
      "float leak, int key) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("prune_tile", TORCH_BOX(&megatron_sparse::prune_tile));
}

// Whether the guards of all that the bindings have allocated since the last call are as they were.
EXPORT int emulator_end_call() {
  bool whole = true;
  const auto is_guard = [](uint8_t byte) { return byte == 0xA5; };
  for (const cuda_emulator::Allocation& made : cuda_emulator::allocations) {
    emulator_poison(made.begin, made.end - made.begin, 0);
    whole &= std::all_of(made.begin, made.content, is_guard) &&
             std::all_of(made.content_end, made.end, is_guard);
  }
  cuda_emulator::allocations.clear();
  return whole;
}

EXPORT void emulator_schedule(int schedule, uint64_t seed, unsigned resident_blocks,
                              int multiprocessors) {
  cuda_emulator::options.schedule = cuda_emulator::Schedule(schedule);
  cuda_emulator::options.seed = seed;
  cuda_emulator::options.resident_blocks = resident_blocks;
  cuda_emulator::options.multiprocessors = multiprocessors;
}

// From now on this thread's launches are counted, from zero; or no longer.
EXPORT void emulator_count(int on) {
  cuda_emulator::counted = on != 0;
  cuda_emulator::work = {};
}

// Five numbers: kernels, memsets, bytes read, bytes written, blocks.
EXPORT void emulator_counted(int64_t* out) {
  const cuda_emulator::Work& work = cuda_emulator::work;
  const int64_t numbers[] = {work.kernels, work.memsets, work.bytes_read, work.bytes_written,
                             work.blocks};
  std::copy(std::begin(numbers), std::end(numbers), out);
}

// Built with AddressSanitizer, marks bytes as out of bounds, or as usable again.
EXPORT void emulator_poison([[maybe_unused]] const void* from, [[maybe_unused]] size_t bytes,
                            [[maybe_unused]] int on) {
#ifdef __SANITIZE_ADDRESS__
  if (on) {
    __asan_poison_memory_region(from, bytes);
  } else {
    __asan_unpoison_memory_region(from, bytes);
  }
#endif
}

EXPORT int64_t workspace_of_encode(int64_t numel, int64_t segments, int value_dtype,
                                   int64_t capacity) {
  megatron_sparse::EncodeArguments call = {};
  call.numel = numel, call.segment_count = segments;
  call.value_dtype = value_dtype, call.capacity = capacity;
  return megatron_sparse::encode_workspace_bytes(call);
}

EXPORT int64_t workspace_of_rice_encode(int64_t numel, int64_t segments, int value_dtype,
                                        int64_t capacity, int log2_span, bool without_indices,
                                        bool at_once) {
  megatron_sparse::EncodeArguments call = {};
  call.numel = numel, call.segment_count = segments, call.capacity = capacity;
  call.value_dtype = megatron_sparse::staged_dtype(value_dtype);
  return megatron_sparse::rice_encode_workspace_bytes(
      call,
      {value_dtype, log2_span, without_indices, nullptr, megatron_sparse::kFp32, -1, at_once});
}
