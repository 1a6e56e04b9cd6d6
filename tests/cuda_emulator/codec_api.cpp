// The codecs' launchers, unmodified, compiled for the emulator; called from Python through ctypes.
#include "emulator_api.h"

#include "decode.cu"
#include "encode.cu"
#include "prune_encode_kernel.cuh"
#include "threshold.cu"

namespace megatron_sparse {
void launch_prune_encode(const EncodeArguments& arguments, const PruneArguments& prune,
                         void* stream);
}

namespace {

using TileSource = megatron_sparse::PruneSource<megatron_sparse::kFp32, megatron_sparse::kBf16,
                                                megatron_sparse::Grid::kBf16, true>;

__global__ void prune_tile_kernel(TileSource source, int64_t begin, int length, uint32_t* out) {
  __shared__ __align__(16) uint32_t raw[megatron_sparse::kPiciTile + TileSource::kVector];
  source.fill({begin, length, 0}, raw);
  __syncthreads();
  for (int p = threadIdx.x; p < length; p += megatron_sparse::kCompactThreads) out[p] = raw[p];
}

}  // namespace

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

EXPORT int64_t workspace_of_encode(const megatron_sparse::EncodeArguments* arguments) {
  return megatron_sparse::encode_workspace_bytes(*arguments);
}

EXPORT int64_t workspace_of_decode(int64_t segment_count) {
  return megatron_sparse::decode_workspace_bytes(segment_count);
}

EXPORT const char* encode(const megatron_sparse::EncodeArguments* arguments) {
  return guarded([&] { megatron_sparse::launch_encode(*arguments, nullptr); });
}

EXPORT const char* prune_encode(const megatron_sparse::EncodeArguments* arguments,
                                const megatron_sparse::PruneArguments* prune) {
  return guarded([&] { megatron_sparse::launch_prune_encode(*arguments, *prune, nullptr); });
}

EXPORT const char* decode_add(const megatron_sparse::DecodeArguments* arguments) {
  return guarded([&] { megatron_sparse::launch_decode_add(*arguments, nullptr); });
}

EXPORT const char* decode_sum(const megatron_sparse::DecodeArguments* calls, int64_t count) {
  return guarded([&] { megatron_sparse::launch_decode_sum(calls, count, nullptr); });
}

EXPORT const char* decode_place(const megatron_sparse::DecodeArguments* calls, int64_t count) {
  return guarded([&] { megatron_sparse::launch_decode_place(calls, count, nullptr); });
}

EXPORT int64_t workspace_of_threshold(const megatron_sparse::ThresholdArguments* call) {
  return megatron_sparse::threshold_workspace_bytes(call->range_count, call->numel, call->samples);
}

EXPORT const char* sample_threshold(const megatron_sparse::ThresholdArguments* call) {
  return guarded([&] { megatron_sparse::launch_sample_threshold(*call, nullptr); });
}

// One tile that lies at `begin` of a bucket too long for this machine: the bucket's first element
// is an address that nothing is read from.
EXPORT const char* prune_tile(const float* grad, uint16_t* residual, uint32_t* out, int64_t begin,
                              int length, float threshold, float tie_chance, float leak,
                              int64_t key) {
  return guarded([&] {
    using namespace megatron_sparse;
    const int64_t ranges[] = {begin, begin + length};
    const auto moved = [begin](const void* tile, int64_t bytes) {
      return reinterpret_cast<uintptr_t>(tile) - static_cast<uintptr_t>(begin * bytes);
    };
    const TileSource source = {reinterpret_cast<const void*>(moved(grad, 4)),
                               reinterpret_cast<void*>(moved(residual, 2)),
                               ranges,
                               &threshold,
                               &tie_chance,
                               1,
                               leak,
                               prune_seeds(key)};
    const cudaLaunchConfig_t config = grid_for(1, 1, kCompactThreads, nullptr);
    cudaLaunchKernelEx(&config, prune_tile_kernel, source, begin, length, out);
  });
}
