// The sum of the parts that the ranks of a node hold, for shared_engine.h.
#pragma once

#include <cstdint>

namespace megatron_sparse {

// Dtypes beyond those of the wire format (dtypes.h), which have the same codes here.
enum SumDtype : int { kFp64 = 3, kInt8 = 4, kUint8 = 5, kInt32 = 6, kInt64 = 7, kSumDtypes = 8 };

int64_t sum_dtype_bytes(int dtype);

// out = parts[0] + parts[1] + ..., added in this order, over `bytes` bytes; `out` may be one of the
// parts. bf16 and fp16 are added in fp32 and rounded once, to nearest even; integers wrap. Where
// `divisor` is not 0, the sum of a floating-point dtype is divided by it before it is rounded.
void add_in_order(const void* const* parts, int count, int64_t bytes, int dtype, int divisor,
                  void* out);

}  // namespace megatron_sparse
