// The launchers of records of moves, unmodified, compiled for the emulator.
#include "emulator_api.h"

#include "moves_decode.cu"
#include "moves_encode.cu"

using namespace megatron_sparse;

EXPORT const char* moves_encode(const MovesEncodeArguments* call) {
  return guarded([&] { launch_moves_encode(*call, nullptr); });
}

EXPORT const char* moves_decode(const MovesDecodeArguments* call) {
  return guarded([&] { launch_moves_decode(*call, nullptr); });
}

EXPORT int64_t workspace_of_moves_encode(int64_t numel, int dtype, int coder) {
  return moves_encode_workspace_bytes(numel, dtype, coder);
}

EXPORT int64_t workspace_of_moves_decode(int64_t numel, int dtype, int coder) {
  return moves_decode_workspace_bytes(numel, dtype, coder);
}
