// What the decoder is asked for, on the CPU and on CUDA: one order of arguments, and the checks
// that read no table's content. library.cpp has the schema.
#pragma once

#include <optional>
#include <vector>

#include "check.h"

namespace megatron_sparse {

struct DecodeRequest {
  const Tensor& acc;
  const std::vector<Tensor>& messages;  // of one rank each
  const Tensor& segment_offsets;        // [segments + 1]
  int64_t value_dtype;
  int64_t step;
  int64_t base;                 // acc's first element in the bucket
  bool fresh;                   // the segments' part of acc counts as zero
  bool is_sum;                  // decode_sum_; else decode_add_, of one message
  std::optional<Tensor> slots;  // [segments + 1]; none for records back to back
  std::optional<Tensor> sums;   // [messages, segments] of sealed records: those of their payloads

  int64_t segment_count() const { return segment_offsets.numel() - 1; }
  int64_t message_count() const { return static_cast<int64_t>(messages.size()); }
  // The sums of a message; null if its records are not sealed.
  const int64_t* sums_of(int64_t message) const {
    if (!sums.has_value()) return nullptr;
    return static_cast<const int64_t*>(sums->const_data_ptr()) + message * segment_count();
  }
};

// The op's function; a device's implementation gets the request. Of each message the status is four
// words: {code, segment, field, value}; a message is right, and added, if the code is 0.
template <Tensor (*RUN)(const DecodeRequest&)>
Tensor decode(const Tensor& acc, const std::vector<Tensor>& messages, const Tensor& segment_offsets,
              int64_t value_dtype, int64_t step, int64_t base, bool fresh, bool is_sum,
              std::optional<Tensor> slots, std::optional<Tensor> sums) {
  const DecodeRequest r = {acc,  messages, segment_offsets, value_dtype, step,
                           base, fresh,    is_sum,          slots,       sums};
  check_vector(acc, "decode: acc", ScalarType::Float, -1);
  check_vector(segment_offsets, "decode: segment_offsets", ScalarType::Long, -1, acc);
  check_message_dtype(value_dtype, "decode: value_dtype");
  MS_CHECK(segment_offsets.numel() >= 1 && segment_offsets.numel() <= int64_t{1} << 31,
           "decode: segment_offsets has the wrong length", "1 to 2^31", segment_offsets.numel());
  MS_CHECK(base >= 0 && base <= kMaxNumel, "decode: base is out of range", "0 to 2^40", base);
  MS_CHECK(is_sum ? !messages.empty() : messages.size() == 1,
           "decode: the number of messages is wrong", "one, or more in a sum", messages.size());
  for (const Tensor& message : messages) {
    check_vector(message, "decode: message", ScalarType::Byte, -1, acc);
  }
  check_table(slots, "decode: slots", segment_offsets.numel(), acc);
  check_table(sums, "decode: sums", r.message_count() * r.segment_count(), acc);
  return RUN(r);
}

}  // namespace megatron_sparse
