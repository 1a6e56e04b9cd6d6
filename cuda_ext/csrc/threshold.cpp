// sample_threshold on the CPU: a stratified sample of each range, and its quantile.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "check.h"
#include "elementwise.h"
#include "lanes.h"
#include "sample_position.h"

namespace megatron_sparse {
namespace {

// fp32 bits of |x|; NaN counts as infinite.
using Magnitude = uint32_t;

float load_as_float(const void* base, int dtype, int64_t element) {
  if (dtype == kFp32) return static_cast<const float*>(base)[element];
  const uint32_t raw = static_cast<const uint16_t*>(base)[element];
  return dtype == kBf16 ? widen<ScalarLanes, kBf16>(raw) : widen<ScalarLanes, kFp16>(raw);
}

float quantile(std::vector<Magnitude>& magnitudes, double density) {
  const int64_t count = static_cast<int64_t>(magnitudes.size());
  const int64_t wanted = static_cast<int64_t>(density * static_cast<double>(count));
  const int64_t rank = std::min(std::max<int64_t>(wanted, 1), count - 1);
  std::nth_element(magnitudes.begin(), magnitudes.begin() + rank, magnitudes.end(),
                   std::greater<Magnitude>());
  Magnitude threshold = magnitudes[rank];
  // nth_element leaves the larger ones before `rank`.
  const Magnitude largest = *std::max_element(magnitudes.begin(), magnitudes.begin() + rank + 1);
  // Equal gradients would be starved for ever if nothing exceeded the threshold.
  if (largest == threshold && threshold > 0) threshold -= 1;
  return ScalarLanes::as_float(threshold);
}

Tensor sample_threshold_cpu(const Tensor& grad, std::optional<Tensor> residual,
                            const Tensor& range_offsets, const Tensor& densities, int64_t samples,
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
  float* out = static_cast<float*>(thresholds.mutable_data_ptr());
  torch::stable::parallel_for(0, range_count, 1, [&](int64_t begin, int64_t end) {
    std::vector<Magnitude> magnitudes;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n = offsets[r + 1] - offsets[r], s = std::min(n, samples);
      if (n == 0 || wanted[r] >= 1) {
        out[r] = -1;
        continue;
      }
      const HashSeed seed = hash_seed(static_cast<uint64_t>(range_keys[r]), kDrawSample);
      magnitudes.resize(s);
      for (int64_t j = 0; j < s; ++j) {
        const int64_t at =
            offsets[r] + sample_position(n, s, j, hash_at(seed, static_cast<uint64_t>(j)));
        float x = load_as_float(grad_data, grad_type, at);
        if (residual_data != nullptr) x += load_as_float(residual_data, residual_type, at);
        magnitudes[j] = std::min(ScalarLanes::as_bits(x) & kMagnitude, kInfinity);
      }
      out[r] = quantile(magnitudes, wanted[r]);
    }
  });
  return thresholds;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("sample_threshold", TORCH_BOX(&megatron_sparse::sample_threshold_cpu));
}
