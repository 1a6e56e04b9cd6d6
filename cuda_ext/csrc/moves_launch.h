// The launchers of records of moves on CUDA, between nvcc (no torch) and the bindings.
//
// All pointers of the arguments are on the device; workspaces are 256-byte aligned. Launches go to
// `stream` (a cudaStream_t) and return at once; the caller reads their error with cudaGetLastError.
#pragma once

#include <cstdint>

namespace megatron_sparse {

struct MovesEncodeArguments {
  const void* old;       // [numel]
  const void* now;       // [numel]
  const uint32_t* down;  // a bit for each number: whether its last move was down
  int64_t numel;
  int dtype;
  uint32_t step;
  uint8_t* out;   // moves_room bytes, 16-byte aligned; the record is at its front
  int64_t* size;  // [1], written: the record's bytes
  void* workspace;
};

int64_t moves_encode_workspace_bytes(int64_t numel, int dtype);

// Six launches, of no numbers one; and one memset.
void launch_moves_encode(const MovesEncodeArguments& arguments, void* stream);

// One record; those of a call have the same dtype.
struct MovesDecodeArguments {
  void* held;      // [numel]; changed only if nothing is wrong
  uint32_t* down;  // of the sender's numbers; changed with them
  int64_t numel;
  int dtype;
  int coder;            // of the header
  const uint8_t* body;  // the record behind its header, not trusted; 16-byte aligned
  int64_t body_bytes;   // a multiple of 16
  int64_t* status;      // [2], written: MovesField and what was found, as on the CPU
};

// For the 32 records that need most: the next ones use it again.
int64_t moves_decode_workspace_bytes(const MovesDecodeArguments* calls, int64_t count);

// For each 32 records one memset and 3 launches, 2 if all are raw.
void launch_moves_decode(const MovesDecodeArguments* calls, int64_t count, void* workspace,
                         void* stream);

// `held` becomes `now`. A number's bit of `down` is set if it falls, cleared if it rises.
struct MovesKeepArguments {
  void* held;       // [numel]
  const void* now;  // [numel]
  int64_t numel;
  int dtype;
  uint32_t* down;
};

// One launch.
void launch_moves_keep(const MovesKeepArguments& arguments, void* stream);

}  // namespace megatron_sparse
