// The choice among the compiled instruction sets.
#pragma once

#include <string>

#include "kernels.h"

namespace megatron_sparse {

// The kernels of the best instruction set that this machine has, or of the one that
// MEGATRON_SPARSE_ISA (portable | avx2 | avx512) names; read at each call.
const Kernels& kernels();

// The names that MEGATRON_SPARSE_ISA may take here, worst first, separated by commas.
std::string supported_isas();

}  // namespace megatron_sparse
