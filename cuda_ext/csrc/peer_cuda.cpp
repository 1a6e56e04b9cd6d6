// peer_collective: checks, device, stream, launch.
//
// Reads nothing from the device and waits for nothing: errors on the device are in the windows'
// error words.
#include <optional>
#include <vector>

#include "cuda_binding.h"
#include "peer_launch.h"

namespace megatron_sparse {
namespace {

constexpr int64_t kDomainWords = 8;  // before the windows; in the order of peer_ops.py

const int64_t* check_domain(const Tensor& domain) {
  check_vector(domain, "peer_collective: domain", ScalarType::Long, -1);
  MS_CHECK(domain.is_cpu(), "peer_collective: domain is on the wrong device", "cpu", "another");
  MS_CHECK(domain.numel() > kDomainWords && domain.numel() <= kDomainWords + kMaxPeers,
           "peer_collective: domain has the wrong length",
           kDomainWords << " words and 1 to " << kMaxPeers << " windows", domain.numel());
  const int64_t* word = static_cast<const int64_t*>(domain.const_data_ptr());
  MS_CHECK(word[0] == domain.numel() - kDomainWords, "peer_collective: a window is missing",
           word[0], domain.numel() - kDomainWords);
  MS_CHECK(word[1] >= 0 && word[2] >= 1 && word[1] + word[2] <= word[0],
           "peer_collective: the ranks of this process are not of the domain",
           "ranks below " << word[0], word[1] << " to " << word[1] + word[2] - 1);
  for (int64_t i = 0; i < word[0]; ++i) {
    MS_CHECK(word[kDomainWords + i] % 256 == 0 && word[kDomainWords + i] != 0,
             "peer_collective: a window is not aligned", "an address that 256 divides",
             "rank " << i << "'s");
  }
  return word;
}

void peer_collective(const Tensor& out, const std::vector<Tensor>& more_outs,
                     const std::vector<Tensor>& inputs, int64_t operation, const Tensor& domain,
                     const std::vector<Tensor>& tables, const Tensor& cuts,
                     std::optional<Tensor> message_slots, int64_t value_dtype, int64_t step,
                     double message_density, double sum_density, bool in_order_of_coming) {
  const int64_t* word = check_domain(domain);
  const int64_t world = word[0], local_ranks = word[2];
  MS_CHECK(operation >= kPeerAllReduce && operation <= kPeerAllGather,
           "peer_collective: operation is unknown", "0, 1 or 2", operation);
  check_dtype_code(value_dtype, "peer_collective: value_dtype");
  MS_CHECK(cuts.is_cpu() && cuts.dim() == 2 && cuts.is_contiguous() &&
               cuts.scalar_type() == ScalarType::Long && cuts.numel() == 2 * (world + 1),
           "peer_collective: cuts has the wrong shape",
           "2 x " << world + 1 << " numbers on the CPU", cuts.numel());
  MS_CHECK(tables.size() == 6, "peer_collective: tables are missing", 6, tables.size());
  for (const Tensor& table : tables) check_beside(table, out, "peer_collective: a table");
  MS_CHECK(static_cast<int64_t>(inputs.size()) == local_ranks &&
               static_cast<int64_t>(more_outs.size()) == local_ranks - 1,
           "peer_collective: a rank's tensor is missing", local_ranks, inputs.size());
  const int64_t* cut = static_cast<const int64_t*>(cuts.const_data_ptr());

  std::vector<PeerRank> ranks(static_cast<size_t>(local_ranks));
  for (size_t i = 0; i < ranks.size(); ++i) {
    const Tensor& result = i == 0 ? out : more_outs[i - 1];
    check_flat(result, "peer_collective: outs");
    check_flat(inputs[i], "peer_collective: inputs");
    check_beside(result, out, "peer_collective: outs");
    check_beside(inputs[i], out, "peer_collective: inputs");
    ranks[i] = {};
    ranks[i].out = result.mutable_data_ptr();
    if (inputs[i].scalar_type() == ScalarType::Byte) {
      check_alignment(inputs[i], 16, "peer_collective: a message");
      ranks[i].message = static_cast<const uint8_t*>(inputs[i].const_data_ptr());
      ranks[i].message_bytes = inputs[i].numel();
      if (message_slots.has_value()) {
        check_beside(*message_slots, out, "peer_collective: message_slots");
        check_vector(*message_slots, "peer_collective: message_slots", ScalarType::Long,
                     cut[world] + 1);
        ranks[i].message_slots = entries_of(*message_slots);
      }
    } else {
      ranks[i].grad = inputs[i].const_data_ptr();
    }
  }

  PeerCall call = {};
  call.operation = static_cast<PeerOperation>(operation);
  for (int64_t i = 0; i < world; ++i) {
    call.domain.windows[i] = reinterpret_cast<uint8_t*>(word[kDomainWords + i]);
  }
  call.domain.world = static_cast<int>(world);
  call.domain.first_rank = static_cast<int>(word[1]);
  call.domain.local_ranks = static_cast<int>(local_ranks);
  call.domain.message_room = word[3];
  call.domain.sum_room = word[4];
  call.domain.deadline_ns = word[5];
  call.tables = {entries_of(tables[0]), static_cast<const uint8_t*>(tables[1].const_data_ptr()),
                 entries_of(tables[2]), entries_of(tables[3]),
                 entries_of(tables[4]), entries_of(tables[5])};
  call.segment_count = cut[world];
  call.shard_segments = cut;
  call.shard_begins = cut + world + 1;
  call.ranks = ranks.data();
  call.dtype = dtype_code(out, "peer_collective: outs");
  call.value_dtype = static_cast<int>(value_dtype);
  call.step = static_cast<uint32_t>(step);
  call.message_density = message_density;
  call.sum_density = sum_density;
  call.in_order_of_coming = in_order_of_coming;
  call.buffers[kPeerMessages] = static_cast<int>(word[6]);
  call.buffers[kPeerSums] = static_cast<int>(word[7]);

  torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const Tensor workspace = new_workspace(out, peer_workspace_bytes(call));
  call.workspace = workspace.mutable_data_ptr();
  launch_peer_collective(call, current_stream(out));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def(
      "peer_collective(Tensor(a!) out, Tensor(b!)[] more_outs, Tensor[] inputs, int operation, "
      "Tensor domain, Tensor[] tables, Tensor cuts, Tensor? message_slots, int value_dtype, "
      "int step, float message_density, float sum_density, bool in_order_of_coming) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("peer_collective", TORCH_BOX(&megatron_sparse::peer_collective));
}
