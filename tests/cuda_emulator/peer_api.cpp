// The peer collectives' launcher, unmodified, compiled for the emulator; called through ctypes.
#include "emulator_api.h"
#include "peer.cu"

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
