// The peer collectives' launcher, unmodified, compiled for the emulator; called through ctypes.
#include "emulator_api.h"
#include "peer.cu"

namespace {

// Every thread of every block fails for a reason of its own, and makes its flag of the first error.
__global__ void fail_at_once_kernel(megatron_sparse::PeerControl* control,
                                    unsigned long long* flags) {
  const int number = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const auto code = number % 2 == 0 ? megatron_sparse::kPeerMissing : megatron_sparse::kPeerRecord;
  megatron_sparse::fail(control, {megatron_sparse::kPeerReduceScatter, megatron_sparse::kPeerSums},
                        {code, number, number, number, number, number});
  flags[number] = megatron_sparse::has_failed(control) ? megatron_sparse::failure_flag(control) : 0;
}

}  // namespace

EXPORT int64_t workspace_of_peer(const megatron_sparse::PeerCall* call) {
  return megatron_sparse::peer_workspace_bytes(*call);
}

EXPORT const char* peer_collective(const megatron_sparse::PeerCall* call) {
  return guarded([&] { megatron_sparse::launch_peer_collective(*call, nullptr); });
}

EXPORT int64_t peer_layout(int what) {
  using megatron_sparse::PeerControl;
  const int64_t sizes[] = {sizeof(megatron_sparse::PeerCall), offsetof(PeerControl, epochs),
                           offsetof(PeerControl, arrived), offsetof(PeerControl, error)};
  return sizes[what];
}

EXPORT const char* peer_fail_at_once(megatron_sparse::PeerControl* control,
                                     unsigned long long* flags, unsigned blocks, unsigned threads) {
  return guarded([&] {
    cudaLaunchConfig_t config;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    cudaLaunchKernelEx(&config, fail_at_once_kernel, control, flags);
  });
}
