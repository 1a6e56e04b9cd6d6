#include "isa.h"

#include <atomic>
#include <string>

#include "check.h"

namespace megatron_sparse {
namespace {

bool has_avx2() {
#ifdef MS_X86
  return __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

bool has_avx512() {
#ifdef MS_X86
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

// The kernels of an instruction set; of the best one for an empty name.
const Kernels& kernels_named(const std::string& name) {
  static const bool avx2 = has_avx2(), avx512 = has_avx512();
  const bool best = name.empty();
#ifdef MS_X86
  if (avx512 && (best || name == "avx512")) return kernels_avx512();
  if (avx2 && (best || name == "avx2")) return kernels_avx2();
#endif
  MS_CHECK(best || name == "portable",
           "MEGATRON_SPARSE_ISA names no instruction set of this machine", supported_isas(), name);
  return kernels_portable();
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

std::string supported_isas() {
  std::string names = "portable";
  if (has_avx2()) names += ",avx2";
  if (has_avx512()) names += ",avx512";
  return names;
}

void choose_isa(std::string name) {
  chosen = &kernels_named(name);
}

const Kernels& kernels() {
  const Kernels* named = chosen;
  return named == nullptr ? kernels_named("") : *named;
}

}  // namespace megatron_sparse
