// The choice among the compiled instruction sets.
#pragma once

#include <string>

#include "kernels.h"

namespace megatron_sparse {

// The kernels of the best instruction set that this machine has, or of the chosen one.
const Kernels& kernels();

// Chooses portable, avx2 or avx512 for all later calls, or the best for an empty name. Not by
// getenv, which must not run while another thread changes the environment.
void choose_isa(std::string name);

// The names that choose_isa takes here, worst first, separated by commas.
std::string supported_isas();

}  // namespace megatron_sparse
