// The sum of several messages on the CPU: each is checked completely, then all are added in one
// pass over the accumulator.
//
// The pass goes window by window. A window stays in a cache while every message adds its entries to
// it, in the order of the messages. So memory is read and written once, not once for each message.
// A large fresh sum is added up beside the accumulator, in memory that stays in a cache, and then
// copied past the caches: memory is only written. The bits are those of one message after another.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

#include "decode_records.h"
#include "parallel.h"

namespace megatron_sparse {
namespace {

// Elements of a sum that the processor's caches do not hold until it is read.
constexpr int64_t kLargeSum = int64_t{1} << 21;
// Elements of a window, at least: 128 KiB, so that it stays in the second-level cache with what the
// messages' entries need there.
constexpr int64_t kWindow = int64_t{1} << 15;
// Of one that is added up beside the accumulator, at most: 512 KiB.
constexpr int64_t kMostBeside = int64_t{1} << 17;

// Elements of a segment, so that no unit of a record lies on both sides of a border.
struct Window {
  int64_t segment;
  int64_t begin;
  int64_t end;
  int64_t acc_begin;  // of the segment, in the accumulator
};

using Records = std::vector<DecodeChunk>;  // of a message, one for each segment

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

// Cuts the segments into windows; `messages` are the records of those that are added.
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

// Adds the entries of checked messages in a window. With `fresh` the window becomes their sum;
// `is_large`: the whole sum does not fit a cache.
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

}  // namespace

std::vector<Status> sum_records(const std::vector<MessageBytes>& messages, const Expected& expected,
                                bool fresh, float* acc, const Kernels& kernel) {
  std::vector<Status> statuses;
  std::vector<Records> good;
  for (const MessageBytes& message : messages) {
    Records records;
    Status status = find_records(message, expected, records);
    if (!status.wrong) status = check_chunks(cut_records(records), kernel);
    if (!status.wrong) good.push_back(std::move(records));
    statuses.push_back(status);
  }
  const std::vector<Window> windows = cut_windows(good, expected);
  const int64_t numel = expected.offsets[expected.segment_count] - expected.offsets[0];
  for_each(windows.size(), [&](int64_t w) {
    add_window(good, windows[w], fresh, numel >= kLargeSum, acc, kernel);
  });
  return statuses;
}

}  // namespace megatron_sparse
