// decode_add_ and decode_sum_ on CUDA: checks, device, stream, launch. Their schemas are
// library.cpp's.
//
// segment_offsets lies on the device, and the statuses stay there: the caller waits for the device
// when it reads them.
#include <optional>
#include <vector>

#include "cuda_binding.h"
#include "decode_launch.h"

namespace megatron_sparse {
namespace {

// What the calls of all messages have in common; message, workspace and status are missing.
DecodeArguments check_decode(const Tensor& acc, const Tensor& segment_offsets, int64_t value_dtype,
                             int64_t step, int64_t base, const std::optional<Tensor>& slots) {
  check_vector(acc, "decode: acc", ScalarType::Float, -1);
  check_vector(segment_offsets, "decode: segment_offsets", ScalarType::Long, -1);
  MS_CHECK(acc.is_cuda(), "decode: acc is on the wrong device", "a CUDA device", "another");
  check_beside(segment_offsets, acc, "decode: segment_offsets");
  check_message_dtype(value_dtype, "decode: value_dtype");
  MS_CHECK(segment_offsets.numel() >= 1, "decode: segment_offsets is empty", "at least one offset",
           0);
  MS_CHECK(segment_offsets.numel() <= int64_t{1} << 31, "decode: there are too many segments",
           "fewer than 2^31", segment_offsets.numel() - 1);
  MS_CHECK(base >= 0 && base <= kMaxNumel, "decode: base is out of range", "0 to 2^40", base);
  DecodeArguments call = {};
  call.acc = static_cast<float*>(acc.mutable_data_ptr());
  call.acc_numel = acc.numel();
  call.segment_offsets = entries_of(segment_offsets);
  call.segment_count = segment_offsets.numel() - 1;
  call.base = base;
  call.value_dtype = static_cast<int>(value_dtype);
  call.step = static_cast<uint32_t>(step);
  if (slots.has_value()) {
    check_vector(*slots, "decode: slots", ScalarType::Long, segment_offsets.numel());
    check_beside(*slots, acc, "decode: slots");
    call.slots = entries_of(*slots);
  }
  return call;
}

// Of the records of so many messages; null if they are not sealed.
const int64_t* check_sums(const std::optional<Tensor>& sums, int64_t messages,
                          const DecodeArguments& call, const Tensor& acc) {
  if (!sums.has_value()) return nullptr;
  check_vector(*sums, "decode: sums", ScalarType::Long, messages * call.segment_count);
  check_beside(*sums, acc, "decode: sums");
  return entries_of(*sums);
}

void set_message(DecodeArguments& call, const Tensor& message, const Tensor& acc) {
  check_vector(message, "decode: message", ScalarType::Byte, -1);
  check_beside(message, acc, "decode: message");
  check_alignment(message, 16, "decode: message");
  call.message = static_cast<const uint8_t*>(message.const_data_ptr());
  call.message_bytes = message.numel();
}

Tensor decode_add_cuda(const Tensor& acc, const Tensor& message, const Tensor& segment_offsets,
                       int64_t value_dtype, int64_t step, int64_t base, bool fresh,
                       std::optional<Tensor> slots, std::optional<Tensor> sums) {
  DecodeArguments call = check_decode(acc, segment_offsets, value_dtype, step, base, slots);
  call.sums = check_sums(sums, 1, call, acc);
  set_message(call, message, acc);
  torch::stable::accelerator::DeviceGuard guard(acc.get_device_index());
  Tensor status = new_words(acc, 4);
  const Tensor workspace = new_workspace(acc, decode_workspace_bytes(call.segment_count));
  call.fresh = fresh;
  call.workspace = workspace.mutable_data_ptr();
  call.status = words_of(status);
  launch_decode_add(call, current_stream(acc));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return status;
}

Tensor decode_sum_cuda(const Tensor& acc, const std::vector<Tensor>& messages,
                       const Tensor& segment_offsets, int64_t value_dtype, int64_t step,
                       int64_t base, bool fresh, std::optional<Tensor> slots,
                       std::optional<Tensor> sums) {
  const DecodeArguments common = check_decode(acc, segment_offsets, value_dtype, step, base, slots);
  MS_CHECK(fresh, "decode: a sum begins from zero", "fresh", "acc's content to be kept");
  const int64_t count = static_cast<int64_t>(messages.size());
  MS_CHECK(count > 0, "decode: there are no messages", "at least one", 0);
  torch::stable::accelerator::DeviceGuard guard(acc.get_device_index());
  Tensor statuses = new_words(acc, 4 * count);
  const int64_t bytes = decode_workspace_bytes(common.segment_count);
  const Tensor workspace = new_workspace(acc, count * bytes);
  std::vector<DecodeArguments> calls(messages.size(), common);
  const int64_t* found = check_sums(sums, count, common, acc);
  for (int64_t i = 0; i < count; ++i) {
    if (found != nullptr) calls[i].sums = found + i * common.segment_count;
    set_message(calls[i], messages[i], acc);
    calls[i].workspace = static_cast<uint8_t*>(workspace.mutable_data_ptr()) + i * bytes;
    calls[i].status = words_of(statuses) + 4 * i;
  }
  launch_decode_sum(calls.data(), count, current_stream(acc));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return statuses;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("decode_add_", TORCH_BOX(&megatron_sparse::decode_add_cuda));
  m.impl("decode_sum_", TORCH_BOX(&megatron_sparse::decode_sum_cuda));
}
