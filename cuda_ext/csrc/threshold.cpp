// sample_threshold on the CPU: a stratified sample of each range, its quantile, and the
// chance of what ties with that. The caller has checked what the tables hold.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "load_value.h"
#include "sample_position.h"
#include "threshold_check.h"

namespace megatron_sparse {
namespace {

struct Quantile {
  float threshold;
  float tie_chance;
  int64_t ties;
};

Quantile quantile(std::vector<uint32_t>& magnitudes, float density) {
  const int64_t count = static_cast<int64_t>(magnitudes.size());
  const double wanted = wanted_samples(density, count);
  const auto place = magnitudes.begin() + threshold_rank(wanted, count);
  std::nth_element(magnitudes.begin(), place, magnitudes.end(), std::greater<uint32_t>());
  // nth_element leaves the larger ones before `place`.
  const uint32_t threshold = *place;
  const int64_t before = std::count(magnitudes.begin(), place, threshold);
  const int64_t above = place - magnitudes.begin() - before;
  const int64_t equal = before + std::count(place, magnitudes.end(), threshold);
  return {ScalarLanes::as_float(threshold), tie_chance(threshold, wanted, above, equal), equal};
}

// Sampled elements lie too far apart for the hardware to fetch them ahead. So many are fetched into
// the second-level cache at a time: it allows far more outstanding fetches than the first.
constexpr int64_t kFetched = 512;

void fetch(const void* data, int dtype, int64_t element) {
  __builtin_prefetch(static_cast<const char*>(data) + element * dtype_bytes(dtype), 0, 2);
}

// Reads the magnitudes of a range's samples, of which there are `magnitudes.size()`.
void read_samples(const ThresholdArguments& call, int64_t r, std::vector<uint32_t>& magnitudes) {
  const int64_t first = call.range_offsets[r], n = call.range_offsets[r + 1] - first;
  const int64_t s = static_cast<int64_t>(magnitudes.size());
  const HashSeed seed = hash_seed(static_cast<uint64_t>(call.keys[r]), kDrawSample);
  for (int64_t begin = 0; begin < s; begin += kFetched) {
    const int64_t count = std::min(kFetched, s - begin);
    int64_t at[kFetched];
    for (int64_t k = 0; k < count; ++k) {
      const int64_t j = begin + k;
      at[k] = first + sample_position(n, s, j, hash_at(seed, static_cast<uint64_t>(j)));
      fetch(call.grad, call.grad_dtype, at[k]);
      if (call.residual != nullptr) fetch(call.residual, call.residual_dtype, at[k]);
    }
    for (int64_t k = 0; k < count; ++k) {
      float x = load_as_float(call.grad, call.grad_dtype, at[k]);
      if (call.residual != nullptr) x += load_as_float(call.residual, call.residual_dtype, at[k]);
      magnitudes[begin + k] = magnitude_bits(x);
    }
  }
}

ThresholdResults sample_threshold_cpu(const Tensor& grad, std::optional<Tensor> residual,
                                      const Tensor& range_offsets, const Tensor& densities,
                                      int64_t samples, const Tensor& keys) {
  ThresholdArguments call =
      check_threshold(grad, residual, range_offsets, densities, samples, keys);
  const ThresholdResults results = make_results(call, densities, keys);
  torch::stable::parallel_for(0, call.range_count, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> magnitudes;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = call.range_offsets[r + 1] - call.range_offsets[r];
      Quantile found = {-1, 0, 0};  // of a range that is sent whole
      if (n > 0 && call.densities[r] < 1) {
        magnitudes.resize(std::min(n, samples));
        read_samples(call, r, magnitudes);
        found = quantile(magnitudes, call.densities[r]);
      }
      call.thresholds[r] = found.threshold;
      call.tie_chances[r] = settle_single(found.tie_chance, found.ties, call.keys[r]);
      call.ties[r] = found.ties;
    }
  });
  return results;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("sample_threshold", TORCH_BOX(&megatron_sparse::sample_threshold_cpu));
}
