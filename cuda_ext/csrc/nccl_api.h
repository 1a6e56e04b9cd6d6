// NCCL's functions, called by address: the library is the one that torch has loaded, so the build
// needs none. Types and numbers are those of nccl.h, unchanged since NCCL 2.7.
#pragma once

#include <cstddef>

namespace megatron_sparse {

inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclUint8 = 1;

// `comm` is an ncclComm_t, `stream` a cudaStream_t; all return an ncclResult_t.
struct NcclApi {
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* from, size_t count, int type, int peer, void* comm, void* stream);
  int (*recv)(void* into, size_t count, int type, int peer, void* comm, void* stream);
};

}  // namespace megatron_sparse
