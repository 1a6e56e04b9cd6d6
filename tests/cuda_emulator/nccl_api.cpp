// The launcher of sums over NCCL, unmodified, compiled for the emulator; called through ctypes.
#include "emulator_api.h"
#include "nccl_sum.cu"

using megatron_sparse::NcclSum;

EXPORT int64_t size_of_nccl_sum() {
  return sizeof(NcclSum);
}

EXPORT int64_t report_words_of_nccl_sum(const NcclSum* sum) {
  return megatron_sparse::nccl_sum_report_words(*sum);
}

EXPORT int64_t workspace_of_nccl_sum(const NcclSum* sum) {
  return megatron_sparse::nccl_sum_workspace_bytes(*sum);
}

EXPORT const char* nccl_sum(const NcclSum* sum, int* result) {
  return guarded([&] { *result = megatron_sparse::launch_nccl_sparse_sum(*sum, nullptr); });
}
