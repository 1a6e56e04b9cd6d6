#include "decode_sum.h"

#include <numeric>

namespace megatron_sparse {
namespace {

// Elements of a window, at least: 256 KiB, so that it stays in the second-level cache.
constexpr int64_t kWindow = int64_t{1} << 16;

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
      windows.push_back({s, begin, std::min(begin + step, numel)});
    }
  }
  return windows;
}

void add_window(const DecodeChunk& record, const Window& window, float* acc,
                const Kernels& kernel) {
  const DecodeChunk part = part_of(record, window.begin, window.end);
  for (const DecodeChunk& chunk : cut_records({part})) add_chunk(chunk, false, acc, kernel);
}

}  // namespace megatron_sparse
