// The decoder on CUDA: device, stream, launch. Its schema is library.cpp's.
//
// The tables lie on the device, and the statuses stay there: the caller has checked the slots, and
// waits for the device when it reads the statuses.
#include "cuda_binding.h"
#include "decode_launch.h"
#include "decode_request.h"

namespace megatron_sparse {
namespace {

Tensor decode_cuda(const DecodeRequest& r) {
  MS_CHECK(r.fresh || !r.is_sum, "decode: a sum begins from zero", "fresh",
           "acc's content to be kept");
  const int64_t count = r.message_count(), segments = r.segment_count();
  torch::stable::accelerator::DeviceGuard guard(r.acc.get_device_index());
  Tensor statuses = new_words(r.acc, 4 * count);
  const int64_t bytes = decode_workspace_bytes(segments);
  const Tensor workspace = new_workspace(r.acc, count * bytes);
  std::vector<DecodeArguments> calls;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor& message = r.messages[i];
    check_alignment(message, 16, "decode: message");
    calls.push_back({static_cast<float*>(r.acc.mutable_data_ptr()), r.acc.numel(),
                     static_cast<const uint8_t*>(message.const_data_ptr()), message.numel(),
                     entries_of(r.segment_offsets), segments, r.base,
                     static_cast<int>(r.value_dtype), static_cast<uint32_t>(r.step), r.fresh,
                     static_cast<uint8_t*>(workspace.mutable_data_ptr()) + i * bytes,
                     words_of(statuses) + 4 * i, entries_or_null(r.slots), r.sums_of(i)});
  }
  if (r.is_sum) {
    launch_decode_sum(calls.data(), count, current_stream(r.acc));
  } else {
    launch_decode_add(calls[0], current_stream(r.acc));
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return statuses;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("decode_", TORCH_BOX(&megatron_sparse::decode<megatron_sparse::decode_cuda>));
}
