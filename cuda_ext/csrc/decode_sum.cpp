#include "decode_sum.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

namespace megatron_sparse {
namespace {

// Elements of a window, at least: 128 KiB, so that it stays in the second-level cache with what the
// messages' entries need there.
constexpr int64_t kWindow = int64_t{1} << 15;
// Of one that is added up beside the accumulator, at most: 512 KiB.
constexpr int64_t kMostBeside = int64_t{1} << 17;

// The kernels for an accumulator that is in a cache.
Kernels of_cached(const Kernels& kernel) {
  Kernels cached = kernel;
  std::copy(std::begin(kernel.add_sparse_cached), std::end(kernel.add_sparse_cached),
            std::begin(cached.add_sparse));
  return cached;
}

// Adds the messages' entries in a window; `acc_begin` is where its segment begins in `acc`.
void add_part(const std::vector<Records>& messages, const Window& window, int64_t acc_begin,
              float* acc, const Kernels& kernel) {
  for (const Records& records : messages) {
    DecodeChunk part = part_of(records[window.segment], window.begin, window.end);
    part.acc_begin = acc_begin;
    for (const DecodeChunk& chunk : cut_records({part})) add_chunk(chunk, false, acc, kernel);
  }
}

}  // namespace

std::vector<Window> cut_windows(const std::vector<Records>& messages, const Expected& expected) {
  std::vector<Window> windows;
  for (int64_t s = 0; s < expected.segment_count; ++s) {
    const int64_t numel = expected.offsets[s + 1] - expected.offsets[s];
    // Widths are below 2^32, and the multiple stays below numel, so the products fit 64 bits.
    int64_t width = 1;
    for (const Records& records : messages) {
      width = std::min(std::lcm(width, unit_width(records[s])), std::max(numel, int64_t{1}));
      if (width >= numel) break;
    }
    const int64_t step = (std::max(kWindow, width) + width - 1) / width * width;
    for (int64_t begin = 0; begin < numel; begin += step) {
      windows.push_back(
          {s, begin, std::min(begin + step, numel), expected.offsets[s] - expected.base});
    }
  }
  return windows;
}

void add_window(const std::vector<Records>& messages, const Window& window, bool fresh,
                bool is_large, float* acc, const Kernels& kernel) {
  const int64_t numel = window.end - window.begin;
  float* to = acc + window.acc_begin + window.begin;
  if (!fresh || !is_large || numel > kMostBeside) {
    if (fresh) std::fill(to, to + numel, 0.0f);
    add_part(messages, window, window.acc_begin, acc, kernel);
    return;
  }
  // Kept from call to call: fresh memory would cost more than the work.
  static thread_local std::vector<float> sum;
  if (static_cast<int64_t>(sum.size()) < numel) sum.resize(numel);
  std::memset(sum.data(), 0, 4 * numel);
  add_part(messages, window, -window.begin, sum.data(), of_cached(kernel));
  kernel.copy_past_caches(sum.data(), numel, to);
}

}  // namespace megatron_sparse
