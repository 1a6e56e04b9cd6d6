// The launchers of messages of kind Rice, unmodified, compiled for the emulator; called from Python
// through ctypes.
#include "emulator_api.h"

#include "rice_encode.cu"

using megatron_sparse::EncodeArguments;
using megatron_sparse::PruneArguments;
using megatron_sparse::RiceArguments;

EXPORT int64_t workspace_of_rice_encode(const EncodeArguments* arguments,
                                        const RiceArguments* rice) {
  return megatron_sparse::rice_encode_workspace_bytes(*arguments, *rice);
}

EXPORT const char* rice_encode(const EncodeArguments* arguments, const RiceArguments* rice) {
  return guarded([&] { megatron_sparse::launch_rice_encode(*arguments, *rice, nullptr); });
}

EXPORT const char* rice_prune_encode(const EncodeArguments* arguments, const RiceArguments* rice,
                                     const PruneArguments* prune) {
  return guarded(
      [&] { megatron_sparse::launch_rice_prune_encode(*arguments, *rice, *prune, nullptr); });
}
