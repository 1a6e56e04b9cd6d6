// The sum of several messages on the CPU: each is checked completely, then all are added in one
// pass over the accumulator.
//
// The pass goes window by window. A window stays in a cache while every message adds its entries to
// it, in the order of the messages. So memory is read and written once, not once for each message.
// A large fresh sum is added up beside the accumulator, in memory that stays in a cache, and then
// copied past the caches: memory is only written. The bits are those of one message after another.
// Free of torch, as decode_records.h is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "decode_records.h"

namespace megatron_sparse {

// Elements of a sum that the processor's caches do not hold until it is read.
inline constexpr int64_t kLargeSum = int64_t{1} << 21;

struct MessageBytes {
  const uint8_t* bytes;
  int64_t size;
  const int64_t* sums = nullptr;  // as Expected's, which is not read here
};

// Elements of a segment, so that no unit of a record lies on both sides of a border.
struct Window {
  int64_t segment;
  int64_t begin;
  int64_t end;
  int64_t acc_begin;  // of the segment, in the accumulator
};

using Records = std::vector<DecodeChunk>;  // of a message, one for each segment

// Cuts the segments into windows; `messages` are the records of those that are added.
std::vector<Window> cut_windows(const std::vector<Records>& messages, const Expected& expected);

// Adds the entries of checked messages in a window. With `fresh` the window becomes their sum;
// `is_large`: the whole sum does not fit a cache.
void add_window(const std::vector<Records>& messages, const Window& window, bool fresh,
                bool is_large, float* acc, const Kernels& kernel);

// Adds messages, which all must be as expected. A bad one is left out. With `fresh` the content of
// the accumulator is ignored, and it becomes the sum of the good messages.
//
// parallel(n, work) calls work(begin, end) on parts of [0, n). A sum of `large` elements counts as
// one that no cache holds.
template <class Parallel>
std::vector<Status> sum_records(const std::vector<MessageBytes>& messages, const Expected& expected,
                                bool fresh, float* acc, const Kernels& kernel, Parallel parallel,
                                int64_t large = kLargeSum) {
  std::vector<Status> statuses;
  std::vector<Records> good;
  for (const MessageBytes& message : messages) {
    Records records;
    Expected own = expected;
    own.sums = message.sums;
    Status status = find_records(message.bytes, message.size, own, records);
    if (!status.wrong) status = check_chunks(cut_records(records), kernel, parallel);
    if (!status.wrong) good.push_back(std::move(records));
    statuses.push_back(status);
  }
  const std::vector<Window> windows = cut_windows(good, expected);
  const int64_t numel = expected.offsets[expected.segment_count] - expected.offsets[0];
  const bool is_large = numel >= large;
  parallel(static_cast<int64_t>(windows.size()), [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      add_window(good, windows[w], fresh, is_large, acc, kernel);
    }
  });
  return statuses;
}

}  // namespace megatron_sparse
