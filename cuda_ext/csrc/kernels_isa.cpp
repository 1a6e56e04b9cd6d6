// Compiled once for each instruction set, with -DMS_ISA=<name> -DMS_WIDTH=<fp32 lanes> and the
// compiler flags that go with them (build.py). Nothing here may be inlined into another file.
#include "codec_cpu.h"
#include "hash_cpu.h"
#include "kernels.h"
#include "moves_rans_cpu.h"
#include "quantise_cpu.h"
#include "rice_cpu.h"
#include "stage_cpu.h"

#define MS_GETTER_NAME(isa) kernels_##isa
#define MS_GETTER(isa) MS_GETTER_NAME(isa)

namespace megatron_sparse {

namespace {

template <int D>
constexpr void fill_dtype(Kernels& kernels) {
  MS_ISA::fill_stage<D, kFp32>(kernels);
  MS_ISA::fill_stage<D, kBf16>(kernels);
  MS_ISA::fill_stage<D, kFp16>(kernels);
  MS_ISA::fill_codec<D>(kernels);
  MS_ISA::fill_moves<D>(kernels);
}

}  // namespace

const Kernels& MS_GETTER(MS_ISA)() {
  static const Kernels kernels = [] {
    Kernels filled = {};
    fill_dtype<kFp32>(filled);
    fill_dtype<kBf16>(filled);
    fill_dtype<kFp16>(filled);
    filled.count_bits = MS_ISA::count_bits;
    filled.list_bits = MS_ISA::list_bits;
    filled.copy_past_caches = MS_ISA::copy_past_caches;
    filled.permute = MS_ISA::permute;
    filled.unpermute = MS_ISA::unpermute;
    filled.mixed_sum = MS_ISA::mixed_sum;
    MS_ISA::fill_quantise<4>(filled);
    MS_ISA::fill_quantise<8>(filled);
    MS_ISA::fill_rice<8>(filled, kQ8);
    MS_ISA::fill_rice<4>(filled, kQ4);
    MS_ISA::fill_rice<3>(filled, kQ3);
    MS_ISA::fill_rice<2>(filled, kQ2);
    filled.rice_round[kFp32] = MS_ISA::rice_round<kFp32>;
    filled.rice_round[kBf16] = MS_ISA::rice_round<kBf16>;
    filled.rice_code_gaps = MS_ISA::rice_code_gaps;
    filled.rice_positions = MS_ISA::rice_positions;
    return filled;
  }();
  return kernels;
}

}  // namespace megatron_sparse
