#include "isa.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "check.h"

namespace megatron_sparse {
namespace {

struct Isa {
  std::string name;
  const Kernels& (*kernels)();
};

// Those of this machine, worst first.
const std::vector<Isa>& isas() {
  static const std::vector<Isa> here = [] {
    std::vector<Isa> found = {{"portable", kernels_portable}};
#ifdef MS_X86
    if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", kernels_avx2});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      found.push_back({"avx512", kernels_avx512});
    }
#endif
    return found;
  }();
  return here;
}

std::atomic<const Kernels*> chosen{nullptr};  // null: the best ones

}  // namespace

std::string supported_isas() {
  std::string names;
  for (const Isa& isa : isas()) names += (names.empty() ? "" : ",") + isa.name;
  return names;
}

void choose_isa(std::string name) {
  const auto named =
      std::find_if(isas().begin(), isas().end(), [&](const Isa& isa) { return isa.name == name; });
  MS_CHECK(name.empty() || named != isas().end(),
           "MEGATRON_SPARSE_ISA names no instruction set of this machine", supported_isas(), name);
  chosen = name.empty() ? nullptr : &named->kernels();
}

const Kernels& kernels() {
  const Kernels* named = chosen;
  return named != nullptr ? *named : isas().back().kernels();
}

}  // namespace megatron_sparse
