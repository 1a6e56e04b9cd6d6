// Records of moves on CUDA: the encoders' launches; moves.cpp is the same for the CPU.
//
// The bytes are the CPU's. The launch that writes chunks sums them. The last launch sums the rest
// of the record, makes it raw where coding does not pay, and writes the header.
#include "moves_launch.h"
#include "moves_rans_encode.cuh"

namespace megatron_sparse {
namespace {

constexpr int kSealThreads = 256;

// The last block writes both headers.
__device__ __forceinline__ void write_headers(const MovesEncodeArguments& call,
                                              const MovesEncodeWork& work, bool coded,
                                              int64_t chunks, int64_t bytes, uint32_t sum) {
  uint4 head;
  head.y = coded ? static_cast<uint32_t>(chunks) : 0;
  head.z = coded ? work.tables->table_bytes : 0;
  head.w = coded ? work.tables->base : 0;
  head.x = sum + mix_word(head.y, 1) + mix_word(head.z, 2) + mix_word(head.w, 3);
  *reinterpret_cast<uint4*>(call.out + kHeaderBytes) = head;
  Header header = {};
  header.magic = kMagic;
  header.version = kVersion;
  header.format = kFormatMoves;
  header.dtype = static_cast<uint8_t>(call.dtype);
  header.flags = static_cast<uint8_t>(coded ? kMovesRans : kMovesRaw);
  header.numel = static_cast<uint64_t>(call.numel);
  header.payload_bytes = sizeof(MovesSubHeader) + static_cast<uint64_t>(bytes);
  header.step = call.step;
  header.checksum = checksum_of(header);
  *reinterpret_cast<Header*>(call.out) = header;
  *call.size = kMovesSectionsAt + bytes;
}

template <int D>
__global__ void __launch_bounds__(kSealThreads, 4)
    moves_seal_kernel(MovesEncodeArguments call, MovesEncodeWork work) {
  __shared__ bool is_last;
  constexpr int kItems = 16 / sizeof(MovesRaw<D>);
  const int64_t chunks = chunk_count(call.numel);
  const int64_t raw_bytes = pad16(call.numel * sizeof(MovesRaw<D>));
  uint8_t* sections = call.out + kMovesSectionsAt;
  const int64_t chunks_at = chunks_of_record(call, work, chunks) - sections;
  const int64_t coded_bytes = chunks_at + 16 * prefix_after(work.ends, chunks - 1);
  const bool coded = chunks > 0 && coded_bytes < raw_bytes;
  const int64_t bytes = coded ? coded_bytes : raw_bytes;
  const MovesRaw<D>* now = static_cast<const MovesRaw<D>*>(call.now);
  uint4* vectors = reinterpret_cast<uint4*>(sections);
  uint32_t sum = 0;
  for (int64_t v = first_item(); v < (coded ? chunks_at : bytes) / 16; v += item_stride()) {
    const uint4 vector = coded ? vectors[v] : vector_of(now, v * kItems, call.numel);
    if (!coded) vectors[v] = vector;
    sum += mix_vector(vector, static_cast<uint32_t>(4 * v + 4));
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) atomicAdd(work.sum, sum);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // this block's sums come before its count
    is_last = atomicAdd(work.sealed, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!is_last || threadIdx.x != 0) return;
  __threadfence();  // the other blocks' sums come before their count
  sum = atomicAdd(work.sum, 0u) + (coded ? *work.chunk_sum : 0);
  write_headers(call, work, coded, chunks, bytes, sum);
}

template <int D>
void launch_encode_of(const MovesEncodeArguments& call, const MovesEncodeWork& work,
                      cudaStream_t stream) {
  const int64_t chunks = chunk_count(call.numel), resident = multiprocessors();
  if (chunks > 0) {
    const cudaLaunchConfig_t once = grid_for(1, 1, kBaseThreads, stream);
    cudaLaunchKernelEx(&once, moves_base_kernel<D>, call, work);
    const int64_t apart = int64_t{kCountBlock} * count_stride(call.numel);
    const cudaLaunchConfig_t counts =
        grid_for((call.numel + apart - 1) / apart, resident * 8, kCountThreads, stream);
    cudaLaunchKernelEx(&counts, moves_count_kernel<D>, call, work);
    const cudaLaunchConfig_t contexts = grid_for(1, 1, kQuantiseThreads, stream);
    cudaLaunchKernelEx(&contexts, moves_quantise_kernel<D>, call, work);
    const int warps = warps_for(chunks, kRansWarps);
    const cudaLaunchConfig_t codes =
        grid_for((chunks + warps - 1) / warps, resident * 5, 32 * warps, stream);
    cudaLaunchKernelEx(&codes, moves_rans_kernel<D>, call, work);
    const cudaLaunchConfig_t places = grid_for(chunks, resident * 4, kScanThreads, stream);
    cudaLaunchKernelEx(&places, moves_place_kernel<D>, call, work);
  }
  const int64_t vectors = call.numel * int64_t{sizeof(MovesRaw<D>)} / 16 + 1;
  const cudaLaunchConfig_t seals = grid_of_items(vectors, kSealThreads, stream);
  cudaLaunchKernelEx(&seals, moves_seal_kernel<D>, call, work);
}

}  // namespace

int64_t moves_encode_workspace_bytes(int64_t numel, int dtype) {
  return lay_out_encode(nullptr, numel, dtype).bytes;
}

void launch_moves_encode(const MovesEncodeArguments& call, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const MovesEncodeWork work = lay_out_encode(call.workspace, call.numel, call.dtype);
  cudaMemsetAsync(call.workspace, 0, static_cast<size_t>(work.zeroed_bytes), stream);
  with_constant<kFp32, kBf16, kFp16>(
      call.dtype, [&](auto dtype) { launch_encode_of<dtype.value>(call, work, stream); });
}

}  // namespace megatron_sparse
