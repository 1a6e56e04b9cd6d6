// Replaces NVIDIA's header when kernels are compiled for the emulator.
#pragma once

#include "cuda_on_cpu.h"
