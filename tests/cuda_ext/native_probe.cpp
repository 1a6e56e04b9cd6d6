// Prints results of the torch-free kernel headers for sizes that no test has the memory for:
// indices over 2^32, and sample positions in the longest bucket. test_native_probe.py compares.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dtypes.h"
#include "kernels.h"
#include "lanes.h"
#include "sample_position.h"

using namespace megatron_sparse;

int main() {
  const uint64_t keys[] = {0, 1, 0x123456789abcdef0ull};
  const uint64_t indices[] = {0, 1, 0xffffffffull, 1ull << 32, (5ull << 32) + 7, (1ull << 40) - 1};
  for (const uint64_t key : keys) {
    for (uint64_t draw = 0; draw < 4; ++draw) {
      for (const uint64_t index : indices) {
        std::printf("hash %llu %llu %llu %u\n", (unsigned long long)key, (unsigned long long)draw,
                    (unsigned long long)index, hash_at(hash_seed(key, draw), index));
      }
    }
  }
  const int64_t n = (1ll << 40) - 3;
  for (const long long s : {1ll, 7ll, (1ll << 31) - 1}) {
    for (const long long j : {0ll, s / 2, s - 1}) {
      for (const uint32_t random : {0u, 0x80000001u, 0xffffffffu}) {
        std::printf("position %lld %lld %lld %u %lld\n", (long long)n, s, j, random,
                    (long long)sample_position(n, s, j, random));
      }
    }
  }
  // 40 elements of a bucket, the first of which is number 5 * 2^32 + 3: fp32, sent as bf16.
  std::vector<float> grad(40), residual(40);
  // Half of them tie with the threshold.
  for (int i = 0; i < 40; ++i) grad[i] = i % 2 ? 1.02f : 1.0f + i * 0.001f;
  const PruneCall call = {grad.data(), residual.data(),  residual.data(),
                          40,          (5ull << 32) + 3, limit_of(1.02f, 0.5f),
                          1.0f,        prune_seeds(9)};
  kernels_portable().prune[kFp32][kFp32][kBf16][1](call);
  for (int i = 0; i < 40; ++i) std::printf("prune %d %.9g %.9g\n", i, grad[i], residual[i]);
  return 0;
}
