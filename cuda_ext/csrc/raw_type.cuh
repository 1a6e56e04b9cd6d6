// The integers that hold a dtype's bits in memory.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace megatron_sparse {

template <int D>
struct RawType {
  using type = uint16_t;
};
template <>
struct RawType<kFp32> {
  using type = uint32_t;
};

}  // namespace megatron_sparse
