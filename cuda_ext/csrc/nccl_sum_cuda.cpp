// nccl_sparse_sum: checks, device, stream, launch.
//
// Reads nothing from the device and waits for nothing. NCCL may block the host at a group's end,
// while it connects to peers for the first time.
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "cuda_binding.h"
#include "nccl_sum_launch.h"

namespace megatron_sparse {
namespace {

constexpr int64_t kCommunicatorWords = 7;  // in the order of NcclCommunicator.words
constexpr int64_t kShardWords = sizeof(NcclShard) / sizeof(int64_t);

const int64_t* check_words(const Tensor& words, int64_t count, const char* name) {
  check_vector(words, name, ScalarType::Long, count);
  MS_CHECK(words.is_cpu(), name << " is on the wrong device", "cpu", "another");
  return entries_of(words);
}

std::tuple<Tensor, int64_t> nccl_sparse_sum(const Tensor& acc, const Tensor& received,
                                            const Tensor& sums, const Tensor& message,
                                            const Tensor& communicator, const Tensor& shards,
                                            const Tensor& tables, const Tensor& kinds,
                                            const Tensor& earlier, const Tensor& sum_steps,
                                            const Tensor& events, int64_t value_dtype, int64_t step,
                                            bool gathers) {
  const int64_t* word =
      check_words(communicator, kCommunicatorWords, "nccl_sparse_sum: communicator");
  const int64_t rank = word[0], world = word[1];
  MS_CHECK(world >= 1 && rank >= 0 && rank < world, "nccl_sparse_sum: the rank is not of the group",
           "0 to " << world - 1, rank);
  const int64_t* row = check_words(shards, -1, "nccl_sparse_sum: shards");
  const int64_t shard_count = shards.numel() / kShardWords;
  MS_CHECK(
      shards.numel() % kShardWords == 0 && (shard_count == world || (shard_count == 1 && !gathers)),
      "nccl_sparse_sum: shards has the wrong length",
      kShardWords << " words for each of " << world << " ranks", shards.numel());
  const int64_t segments = kinds.numel();
  check_vector(acc, "nccl_sparse_sum: acc", ScalarType::Float, -1);
  check_vector(kinds, "nccl_sparse_sum: kinds", ScalarType::Byte, -1);
  check_vector(tables, "nccl_sparse_sum: tables", ScalarType::Long,
               segments + 1 + 3 * (segments + shard_count));
  check_vector(earlier, "nccl_sparse_sum: earlier", ScalarType::Long, -1);
  for (const Tensor* each : {&received, &sums, &message}) {
    check_vector(*each, "nccl_sparse_sum: records", ScalarType::Byte, -1);
    check_alignment(*each, 16, "nccl_sparse_sum: records");
  }
  for (const Tensor* each : {&received, &sums, &message, &tables, &kinds, &earlier}) {
    check_beside(*each, acc, "nccl_sparse_sum: a tensor");
  }
  MS_CHECK(acc.is_cuda(), "nccl_sparse_sum: acc is on the wrong device", "cuda", "another");
  check_dtype_code(value_dtype, "nccl_sparse_sum: value_dtype");

  const NcclShard* shard = reinterpret_cast<const NcclShard*>(row);
  const int64_t message_bytes = message.numel();  // MS_CHECK declares its own `message`
  int64_t sum_bytes = 0;
  for (int64_t i = 0; i < shard_count; ++i) {
    const NcclShard& s = shard[i];
    MS_CHECK(s.begin >= 0 && s.numel >= 0 && s.begin + s.numel <= acc.numel() &&
                 s.first_segment >= 0 && s.segment_count >= 0 &&
                 s.first_segment + s.segment_count <= segments && s.message_begin >= 0 &&
                 s.message_bytes >= 0 && s.message_begin + s.message_bytes <= message_bytes &&
                 s.sum_begin >= 0 && s.sum_bytes >= 0,
             "nccl_sparse_sum: shard " << i << " does not lie in the bucket",
             acc.numel() << " elements, " << segments << " segments, " << message_bytes
                         << " bytes of a message",
             s.begin << " + " << s.numel << ", " << s.first_segment << " + " << s.segment_count
                     << ", " << s.message_begin << " + " << s.message_bytes);
    sum_bytes = s.sum_begin + s.sum_bytes;
  }
  const NcclShard& own = shard[shard_count == 1 ? 0 : rank];
  MS_CHECK(received.numel() >= world * own.message_bytes,
           "nccl_sparse_sum: there is no room for what comes", world * own.message_bytes,
           received.numel());
  MS_CHECK(!gathers || sums.numel() >= sum_bytes, "nccl_sparse_sum: there is no room for the sums",
           sum_bytes, sums.numel());

  NcclSum sum = {};
  sum.comm = reinterpret_cast<void*>(word[2]);
  static_assert(sizeof sum.nccl == (kCommunicatorWords - 3) * sizeof *word);
  std::memcpy(&sum.nccl, word + 3, sizeof sum.nccl);
  sum.rank = static_cast<int>(rank);
  sum.world = static_cast<int>(world);
  sum.shards = shard;
  sum.shard_count = shard_count;
  const int64_t* table = entries_of(tables);
  const int64_t entries = segments + shard_count;
  sum.tables = {table, static_cast<const uint8_t*>(kinds.const_data_ptr()), table + segments + 1,
                table + segments + 1 + entries, table + segments + 1 + 2 * entries};
  sum.gathers = gathers;
  sum.acc = static_cast<float*>(acc.mutable_data_ptr());
  sum.message = static_cast<const uint8_t*>(message.const_data_ptr());
  sum.received = static_cast<uint8_t*>(received.mutable_data_ptr());
  sum.sums = static_cast<uint8_t*>(sums.mutable_data_ptr());
  sum.value_dtype = static_cast<int>(value_dtype);
  sum.step = static_cast<uint32_t>(step);
  sum.sum_steps = check_words(sum_steps, shard_count, "nccl_sparse_sum: sum_steps");
  sum.earlier = entries_of(earlier);
  sum.earlier_count = earlier.numel();
  const int64_t* event = check_words(events, kNcclMarks, "nccl_sparse_sum: events");
  for (int i = 0; i < kNcclMarks; ++i) sum.events[i] = reinterpret_cast<void*>(event[i]);

  torch::stable::accelerator::DeviceGuard guard(acc.get_device_index());
  const Tensor report = new_words(acc, nccl_sum_report_words(sum));
  const Tensor workspace = new_workspace(acc, nccl_sum_workspace_bytes(sum));
  sum.report = words_of(report);
  sum.workspace = workspace.mutable_data_ptr();
  const int64_t result = launch_nccl_sparse_sum(sum, current_stream(acc));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {report, result};
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def(
      "nccl_sparse_sum(Tensor(a!) acc, Tensor(b!) received, Tensor(c!) sums, Tensor message, "
      "Tensor communicator, Tensor shards, Tensor tables, Tensor kinds, Tensor earlier, "
      "Tensor sum_steps, Tensor events, int value_dtype, int step, bool gathers) "
      "-> (Tensor, int)");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("nccl_sparse_sum", TORCH_BOX(&megatron_sparse::nccl_sparse_sum));
}
