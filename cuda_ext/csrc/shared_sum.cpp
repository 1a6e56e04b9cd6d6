#include "shared_sum.h"

#include <algorithm>
#include <cstring>

#include "dtypes.h"
#include "isa.h"

namespace megatron_sparse {
namespace {

constexpr int64_t kBlock = 2048;  // elements whose sum stays in the first-level cache

const void* offset(const void* values, int64_t bytes) {
  return static_cast<const char*>(values) + bytes;
}

// fp32, bf16 and fp16, by the codec's kernels.
void add_floats(const void* const* parts, int count, int64_t numel, int dtype, int divisor,
                void* out) {
  const Kernels& kernel = kernels();
  const int64_t size = dtype_bytes(dtype);
  float sum[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t some = std::min(kBlock, numel - begin);
    kernel.convert[dtype][kFp32](offset(parts[0], begin * size), some, sum);
    for (int p = 1; p < count; ++p) {
      kernel.add_dense[dtype](sum, offset(parts[p], begin * size), some);
    }
    if (divisor != 0) {
      for (int64_t i = 0; i < some; ++i) sum[i] /= static_cast<float>(divisor);
    }
    kernel.convert[kFp32][dtype](sum, some, static_cast<char*>(out) + begin * size);
  }
}

template <class T>
void add_plain(const void* const* parts, int count, int64_t numel, int divisor, void* out) {
  T sum[kBlock], part[kBlock];
  constexpr int64_t size = sizeof(T);
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t some = std::min(kBlock, numel - begin);
    std::memcpy(sum, offset(parts[0], begin * size), some * size);
    for (int p = 1; p < count; ++p) {
      std::memcpy(part, offset(parts[p], begin * size), some * size);
      for (int64_t i = 0; i < some; ++i) sum[i] += part[i];
    }
    if (divisor != 0) {
      for (int64_t i = 0; i < some; ++i) sum[i] /= static_cast<T>(divisor);
    }
    std::memcpy(static_cast<char*>(out) + begin * size, sum, some * size);
  }
}

}  // namespace

int64_t sum_dtype_bytes(int dtype) {
  constexpr int64_t bytes[kSumDtypes] = {4, 2, 2, 8, 1, 1, 4, 8};
  return bytes[dtype];
}

void add_in_order(const void* const* parts, int count, int64_t bytes, int dtype, int divisor,
                  void* out) {
  const int64_t numel = bytes / sum_dtype_bytes(dtype);
  switch (dtype) {
    case kFp64:
      return add_plain<double>(parts, count, numel, divisor, out);
    // Unsigned: a sum that overflows wraps, as two's complement does.
    case kInt8:
    case kUint8:
      return add_plain<uint8_t>(parts, count, numel, 0, out);
    case kInt32:
      return add_plain<uint32_t>(parts, count, numel, 0, out);
    case kInt64:
      return add_plain<uint64_t>(parts, count, numel, 0, out);
    default:
      return add_floats(parts, count, numel, dtype, divisor, out);
  }
}

}  // namespace megatron_sparse
