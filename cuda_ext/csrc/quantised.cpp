// Records of quantised differences, on the CPU; docs/quantised.md specifies them. Python
// (formats/quantised.py) checks the header before it calls the decoder.
#include <torch/csrc/stable/library.h>

#include "quantise.h"
#include "record_checksum.h"

namespace megatron_sparse {
namespace {

constexpr int64_t kBodyAt = kHeaderBytes;
constexpr int64_t kScalesAt = kBodyAt + sizeof(QuantisedSubHeader);
constexpr int64_t kQuantiseChunk = int64_t{1} << 16;  // that one task converts; whole groups
static_assert(kQuantiseChunk % kGroup == 0, "a group belongs to one task");

// The fields of a record that a decoder refuses; formats/quantised.py names them.
enum QuantisedField : int64_t {
  kFine = 0,
  kChecksum = 1,
  kGroupSize = 2,
  kZeros = 3,
  kScale = 4,
};

int64_t codes_at(int64_t numel) {
  return kScalesAt + pad16(2 * groups_of(numel));
}

// The bytes of a record, header included.
int64_t quantised_bytes(int64_t numel, int64_t bits) {
  MS_CHECK(bits == 4 || bits == 8, "quantised: bits is unknown", "4 or 8", bits);
  MS_CHECK(numel >= 0 && numel <= kMaxQuantised, "quantised: numel is out of range", "0 to 2^34",
           numel);
  return codes_at(numel) + groups_of(numel) * group_code_bytes(static_cast<int>(bits));
}

void quantise_cpu(const Tensor& now, const Tensor& old, int64_t bits, int64_t step,
                  const Tensor& out) {
  const int64_t numel = now.numel();
  check_vector(now, "quantise: new", ScalarType::Float, -1);
  check_vector(old, "quantise: old", ScalarType::Float, numel);
  check_vector(out, "quantise: out", ScalarType::Byte, quantised_bytes(numel, bits));
  uint8_t* record = static_cast<uint8_t*>(out.mutable_data_ptr());
  const float* values = static_cast<const float*>(now.const_data_ptr());
  const float* minus = static_cast<const float*>(old.const_data_ptr());
  const int64_t groups = groups_of(numel), code_bytes = group_code_bytes(static_cast<int>(bits));
  uint8_t* codes = record + codes_at(numel);
  std::memset(record + kScalesAt + 2 * groups, 0, codes_at(numel) - kScalesAt - 2 * groups);
  for_each_chunk(numel, kQuantiseChunk, [&](int64_t, int64_t begin, int64_t end) {
    uint16_t scales[kQuantiseChunk / kGroup];
    const int64_t first = begin / kGroup;
    kernels().quantise_difference[bits == 8](values + begin, minus + begin, end - begin, scales,
                                             codes + first * code_bytes);
    std::memcpy(record + kScalesAt + 2 * first, scales, 2 * groups_of(end - begin));
  });
  QuantisedSubHeader head = {};
  head.group = kGroup;
  std::memcpy(record + kBodyAt, &head, sizeof head);
  Header header = {};
  header.format = kFormatQuantised;
  header.dtype = kFp32;
  header.flags = static_cast<uint8_t>(bits);
  header.numel = numel;
  header.payload_bytes = out.numel() - kBodyAt;
  header.step = static_cast<uint32_t>(step);
  seal_record(record, header);
}

struct Fault {
  int64_t field, where;
};

// Checks everything behind the header, before anything is added.
Fault find_fault(const uint8_t* record, int64_t bytes, int64_t numel) {
  const QuantisedSubHeader head = read_at<QuantisedSubHeader>(record + kBodyAt);
  if (head.group != kGroup) return {kGroupSize, head.group};
  if (head.zeros != 0) return {kZeros, 0};
  if (head.checksum != body_checksum(record + kBodyAt, bytes - kBodyAt)) return {kChecksum, 0};
  for (int64_t group = 0; group < groups_of(numel); ++group) {
    if (!is_scale(read_at<uint16_t>(record + kScalesAt, group))) return {kScale, group};
  }
  return {kFine, 0};
}

// The field that is wrong and where, or zeros; what is held has changed only then.
Tensor add_quantised_cpu(const Tensor& held, const Tensor& record, int64_t bits) {
  check_vector(held, "add_quantised_: held", ScalarType::Float, -1);
  const int64_t numel = held.numel();
  check_vector(record, "add_quantised_: record", ScalarType::Byte, quantised_bytes(numel, bits));
  const uint8_t* from = static_cast<const uint8_t*>(record.const_data_ptr());
  const Fault fault = find_fault(from, record.numel(), numel);
  if (fault.field == kFine) {
    float* to = static_cast<float*>(held.mutable_data_ptr());
    const int64_t code_bytes = group_code_bytes(static_cast<int>(bits));
    for_each_chunk(numel, kQuantiseChunk, [&](int64_t, int64_t begin, int64_t end) {
      const int64_t first = begin / kGroup;
      kernels().add_quantised[bits == 8](from + kScalesAt + 2 * first,
                                         from + codes_at(numel) + first * code_bytes, end - begin,
                                         to + begin);
    });
  }
  return result_of(record, {fault.field, fault.where});
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def("quantised_bytes(int numel, int bits) -> int");
  m.def("quantise(Tensor new, Tensor old, int bits, int step, Tensor(a!) out) -> ()");
  m.def("add_quantised_(Tensor(a!) held, Tensor record, int bits) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CompositeExplicitAutograd, m) {
  m.impl("quantised_bytes", TORCH_BOX(&megatron_sparse::quantised_bytes));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("quantise", TORCH_BOX(&megatron_sparse::quantise_cpu));
  m.impl("add_quantised_", TORCH_BOX(&megatron_sparse::add_quantised_cpu));
}
