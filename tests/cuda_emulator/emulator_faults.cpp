// Kernels with planted bugs, and healthy twins: one program, `emulator_faults CASE SCHEDULE SEED`.
//
// Prints "ok", or "wrong: ..." if a result is wrong, or "caught: ..." if the emulator threw.
#include <cstdio>
#include <cstdlib>
#include <map>

#include "cuda_runtime.h"

namespace {

constexpr unsigned kFull = 0xffffffffu;

// Each thread passes its value to the thread opposite in the block, through shared memory.
template <bool BARRIER>
__global__ void reverse_kernel(int* values) {
  __shared__ int shared[256];
  shared[threadIdx.x] = values[blockIdx.x * 256 + threadIdx.x];
  if (BARRIER) __syncthreads();
  values[blockIdx.x * 256 + threadIdx.x] = shared[255 - threadIdx.x];
}

// The same within a warp.
template <bool BARRIER>
__global__ void reverse_warp_kernel(int* values) {
  __shared__ int shared[256];
  shared[threadIdx.x] = values[blockIdx.x * 256 + threadIdx.x];
  if (BARRIER) __syncwarp();
  const unsigned warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  values[blockIdx.x * 256 + warp + lane] = shared[warp + 31 - lane];
}

extern __shared__ int dynamic_shared[];

__global__ void reverse_dynamic_kernel(int* values) {
  dynamic_shared[threadIdx.x] = values[blockIdx.x * 256 + threadIdx.x];
  __syncthreads();
  values[blockIdx.x * 256 + threadIdx.x] = dynamic_shared[255 - threadIdx.x];
}

CUDA_EMULATOR_DYNAMIC_SHARED(int, dynamic_shared, 256);

__global__ void accumulate_uninitialised_kernel(int* values) {
  __shared__ int sum;
  __syncthreads();
  if (threadIdx.x == 0) sum += 1;
  __syncthreads();
  values[blockIdx.x * 256 + threadIdx.x] = sum - 1 + int(threadIdx.x);
}

__global__ void divergent_barrier_kernel(int* values) {
  if (threadIdx.x < 128) {
    __syncthreads();
  } else {
    values[threadIdx.x] += 0;
    __syncthreads();
  }
}

__global__ void early_exit_kernel(int*) {
  if (threadIdx.x == 77) return;
  __syncthreads();
}

__global__ void left_out_kernel(int* values) {
  values[threadIdx.x] += int(__ballot_sync(0x0000ffffu, 1) * 0);
}

__global__ void divergent_ballot_kernel(int* values) {
  if ((threadIdx.x & 31) < 16) values[threadIdx.x] += int(__ballot_sync(kFull, 1) * 0);
}

__global__ void divergent_collective_kernel(int* values) {
  if (threadIdx.x & 1) {
    values[threadIdx.x] += int(__ballot_sync(kFull, 1) * 0);
  } else {
    values[threadIdx.x] += __shfl_sync(kFull, 1, 0) * 0;
  }
}

__global__ void shuffle_from_outside_kernel(int* values) {
  // The lower half reads from a lane that is not in its mask.
  const unsigned half = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  const int got = __shfl_sync(half, values[blockIdx.x * 256 + threadIdx.x], 20);
  if (threadIdx.x % 32 < 16) values[blockIdx.x * 256 + threadIdx.x] = got;
}

// Blocks take tickets and wait for the ticket before theirs; or, wrongly, for the one after.
template <int STEP>
__global__ void chain_kernel(unsigned* ticket, unsigned* finished, int* values) {
  __shared__ unsigned mine;
  if (threadIdx.x == 0) {
    mine = atomicAdd(ticket, 1);
    const unsigned wanted = mine + STEP;
    while (wanted < gridDim.x && atomicAdd(&finished[wanted], 0) == 0) __nanosleep(20);
  }
  __syncthreads();
  values[mine * 256 + threadIdx.x] = 255 - int(threadIdx.x);
  if (threadIdx.x == 0) atomicExch(&finished[mine], 1u);
}

// A non-atomic counter of blocks that reads, lets others run, and writes.
template <bool ATOMIC>
__global__ void count_kernel(unsigned* count, int* values) {
  if (threadIdx.x == 0) {
    if (ATOMIC) {
      atomicAdd(count, 1u);
    } else {
      const unsigned old = *count;
      __threadfence();
      atomicAdd(&count[1], 1u);  // where another block may come between
      *count = old + 1;
    }
  }
  const int kept = values[blockIdx.x * 256 + 255 - threadIdx.x];
  __syncthreads();
  values[blockIdx.x * 256 + threadIdx.x] = kept;
}

__global__ void out_of_bounds_kernel(int* values) {
  values[blockIdx.x * 256 + threadIdx.x + 1] = 0;
}

// Every collective, with results that are known.
__global__ void collectives_kernel(int* values) {
  const unsigned lane = threadIdx.x % 32;
  bool right = __ballot_sync(kFull, lane % 3 == 0) == 0x49249249u;
  right &=
      __shfl_sync(kFull, lane * 2, 5) == 10 && __shfl_sync(kFull, lane, 1, 8) == lane / 8 * 8 + 1;
  right &= __shfl_up_sync(kFull, lane, 1) == (lane == 0 ? 0 : lane - 1);
  right &= __shfl_xor_sync(kFull, uint64_t{lane} << 40, 9) == uint64_t{lane ^ 9} << 40;
  right &= __reduce_add_sync(kFull, lane) == 496 && __reduce_max_sync(kFull, lane) == 31;
  right &= __reduce_min_sync(kFull, lane + 3) == 3;
  right &= __any_sync(kFull, lane == 7) && !__all_sync(kFull, lane == 7);
  if (lane < 8) right &= __reduce_add_sync(0xffu, 1) == 8;  // a part of the warp
  __syncwarp();
  right &= __syncthreads_or(threadIdx.x == 200) == 1;
  if (right) values[blockIdx.x * 256 + threadIdx.x] = 255 - int(threadIdx.x);
}

constexpr unsigned kBlocks = 6;

template <class... P, class... A>
void run(void (*kernel)(P...), A... arguments) {
  const cudaLaunchConfig_t config = {dim3(kBlocks), dim3(256)};
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string name = argv[1];
  cuda_emulator::options.schedule = cuda_emulator::Schedule(std::atoi(argv[2]));
  cuda_emulator::options.seed = std::strtoull(argv[3], nullptr, 10);
  cuda_emulator::options.deadline_s = 0.5;
  std::vector<int> values(kBlocks * 256);
  for (size_t i = 0; i < values.size(); ++i) values[i] = int(i % 256);
  std::vector<unsigned> words(kBlocks + 2);
  const bool by_warp = name == "reverse_warp" || name == "missing_warp_barrier";
  int* data = values.data();
  unsigned* word = words.data();
  const std::map<std::string, std::function<void()>> kernels = {
      {"reverse", [&] { run(reverse_kernel<true>, data); }},
      {"missing_barrier", [&] { run(reverse_kernel<false>, data); }},
      {"reverse_warp", [&] { run(reverse_warp_kernel<true>, data); }},
      {"missing_warp_barrier", [&] { run(reverse_warp_kernel<false>, data); }},
      {"dynamic", [&] { run(reverse_dynamic_kernel, data); }},
      {"uninitialised", [&] { run(accumulate_uninitialised_kernel, data); }},
      {"divergent_barrier", [&] { run(divergent_barrier_kernel, data); }},
      {"early_exit", [&] { run(early_exit_kernel, data); }},
      {"left_out", [&] { run(left_out_kernel, data); }},
      {"divergent_ballot", [&] { run(divergent_ballot_kernel, data); }},
      {"divergent_collective", [&] { run(divergent_collective_kernel, data); }},
      {"shuffle_from_outside", [&] { run(shuffle_from_outside_kernel, data); }},
      {"chain", [&] { run(chain_kernel<-1>, word, word + 1, data); }},
      {"endless_spin", [&] { run(chain_kernel<0>, word, word + 1, data); }},
      {"count", [&] { run(count_kernel<true>, word, data); }},
      {"lost_count", [&] { run(count_kernel<false>, word, data); }},
      {"out_of_bounds", [&] { run(out_of_bounds_kernel, data); }},
      {"collectives", [&] { run(collectives_kernel, data); }},
  };
  try {
    if (kernels.count(name) == 0) return 2;
    kernels.at(name)();
  } catch (const cuda_emulator::Error& error) {
    std::printf("caught: %s\n", error.what());
    return 0;
  }
  if (name == "count" || name == "lost_count") {
    if (word[0] != kBlocks) {
      std::printf("wrong: counted %u of %u\n", word[0], kBlocks);
      return 0;
    }
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const int thread = int(i % 256);
    const int wanted = by_warp ? thread / 32 * 32 + 31 - thread % 32 : 255 - thread;
    if (values[i] != wanted) {
      std::printf("wrong: element %zu is %d, not %d\n", i, values[i], wanted);
      return 0;
    }
  }
  std::printf("ok\n");
  return 0;
}
