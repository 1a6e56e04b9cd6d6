// sample_threshold on the CPU: a stratified sample of each range, its quantile, and the
// chance of what ties with that.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "load_value.h"
#include "sample_position.h"

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

std::tuple<Tensor, Tensor, Tensor> sample_threshold_cpu(const Tensor& grad,
                                                        std::optional<Tensor> residual,
                                                        const Tensor& range_offsets,
                                                        const Tensor& densities, int64_t samples,
                                                        const Tensor& keys) {
  check_flat(grad, "sample_threshold: grad");
  MS_CHECK(grad.is_cpu(), "sample_threshold: grad is on the wrong device", "cpu", "another");
  const int grad_type = dtype_code(grad, "sample_threshold: grad");
  int residual_type = kFp32;
  const void* residual_data = nullptr;
  if (residual.has_value()) {
    check_flat(*residual, "sample_threshold: residual");
    MS_CHECK(residual->is_cpu(), "sample_threshold: residual is on the wrong device", "cpu",
             "another");
    MS_CHECK(residual->numel() == grad.numel(), "sample_threshold: residual has the wrong length",
             grad.numel(), residual->numel());
    residual_type = dtype_code(*residual, "sample_threshold: residual");
    residual_data = residual->const_data_ptr();
  }
  const int64_t range_count = densities.numel();
  check_vector(densities, "sample_threshold: densities", ScalarType::Float, -1);
  check_vector(keys, "sample_threshold: keys", ScalarType::Long, range_count);
  check_vector(range_offsets, "sample_threshold: range_offsets", ScalarType::Long, range_count + 1);
  MS_CHECK(densities.is_cpu() && keys.is_cpu(),
           "sample_threshold: densities or keys are on the wrong device", "cpu", "another");
  const int64_t* offsets = check_offsets(range_offsets, "sample_threshold: range_offsets");
  check_cut(offsets, range_count, grad.numel(), "sample_threshold: range_offsets");
  MS_CHECK(samples >= 1 && samples < int64_t{1} << 31, "sample_threshold: samples is out of range",
           "1 to 2^31 - 1", samples);
  const float* wanted = static_cast<const float*>(densities.const_data_ptr());
  for (int64_t r = 0; r < range_count; ++r) {
    MS_CHECK(wanted[r] > 0, "sample_threshold: a density is out of range", "above 0", wanted[r]);
  }

  const void* grad_data = grad.const_data_ptr();
  const int64_t* range_keys = static_cast<const int64_t*>(keys.const_data_ptr());
  Tensor thresholds = torch::stable::new_empty(densities, {range_count});
  Tensor tie_chances = torch::stable::new_empty(densities, {range_count});
  Tensor ties = torch::stable::new_empty(keys, {range_count});
  int64_t* equal = static_cast<int64_t*>(ties.mutable_data_ptr());
  float* out = static_cast<float*>(thresholds.mutable_data_ptr());
  float* chances = static_cast<float*>(tie_chances.mutable_data_ptr());
  torch::stable::parallel_for(0, range_count, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> magnitudes;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = offsets[r + 1] - offsets[r], s = std::min(n, samples);
      if (n == 0 || wanted[r] >= 1) {
        out[r] = -1;
        chances[r] = 0;
        equal[r] = 0;
        continue;
      }
      const HashSeed seed = hash_seed(static_cast<uint64_t>(range_keys[r]), kDrawSample);
      magnitudes.resize(s);
      for (int64_t begin = 0; begin < s; begin += kFetched) {
        const int64_t count = std::min(kFetched, s - begin);
        int64_t at[kFetched];
        for (int64_t k = 0; k < count; ++k) {
          const int64_t j = begin + k;
          at[k] = offsets[r] + sample_position(n, s, j, hash_at(seed, static_cast<uint64_t>(j)));
          fetch(grad_data, grad_type, at[k]);
          if (residual_data != nullptr) fetch(residual_data, residual_type, at[k]);
        }
        for (int64_t k = 0; k < count; ++k) {
          float x = load_as_float(grad_data, grad_type, at[k]);
          if (residual_data != nullptr) x += load_as_float(residual_data, residual_type, at[k]);
          magnitudes[begin + k] = magnitude_bits(x);
        }
      }
      const Quantile found = quantile(magnitudes, wanted[r]);
      out[r] = found.threshold;
      chances[r] = settle_single(found.tie_chance, found.ties, range_keys[r]);
      equal[r] = found.ties;
    }
  });
  return {thresholds, tie_chances, ties};
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("sample_threshold", TORCH_BOX(&megatron_sparse::sample_threshold_cpu));
}
