// decode_add_ on the CPU: checks a peer's message to the last index, then adds it.
//
// Nothing in the message is trusted. The status is {code, segment, field, value}; the accumulator
// is changed only if the code is 0.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "check.h"
#include "header.h"
#include "isa.h"

namespace megatron_sparse {
namespace {

// Names and order are repeated in cuda_ext/ops.py (MESSAGE_FIELDS).
enum Field : int64_t {
  kFieldSize,
  kFieldMagic,
  kFieldVersion,
  kFieldChecksum,
  kFieldFormat,
  kFieldDtype,
  kFieldFlags,
  kFieldEpoch,
  kFieldOffset,
  kFieldNumel,
  kFieldNnz,
  kFieldPayloadBytes,
  kFieldIndices,
};

struct Status {
  bool wrong = false;
  int64_t segment = 0;
  int64_t field = 0;
  int64_t value = 0;
};

constexpr int64_t kSparseChunk = int64_t{1} << 13;
constexpr int64_t kDenseChunk = int64_t{1} << 16;

// A run of values of one segment: elements of a dense record, entries of a sparse one.
struct Chunk {
  int64_t segment;
  bool sparse;
  const uint8_t* indices;  // of the whole record
  const uint8_t* values;   // of the whole record
  int64_t begin;
  int64_t end;
  int64_t acc_begin;  // of the segment
};

int32_t index_at(const uint8_t* indices, int64_t k) {
  int32_t index;
  std::memcpy(&index, indices + 4 * k, sizeof index);
  return index;
}

Status check_header(const Header& header, int64_t segment, int64_t numel, int64_t offset,
                    int64_t value_dtype, uint32_t epoch, int64_t available) {
  const auto wrong = [segment](Field field, uint64_t value) {
    return Status{true, segment, field, static_cast<int64_t>(value)};
  };
  if (header.magic != kMagic) return wrong(kFieldMagic, header.magic);
  if (header.version != kVersion) return wrong(kFieldVersion, header.version);
  if (header.checksum != header_checksum(header)) return wrong(kFieldChecksum, header.checksum);
  if (header.format != kDense && header.format != kCoo) return wrong(kFieldFormat, header.format);
  if (header.dtype != value_dtype) return wrong(kFieldDtype, header.dtype);
  if (header.flags != 0) return wrong(kFieldFlags, header.flags);
  if (header.epoch != epoch) return wrong(kFieldEpoch, header.epoch);
  if (header.offset != static_cast<uint64_t>(offset)) return wrong(kFieldOffset, header.offset);
  if (header.numel != static_cast<uint64_t>(numel)) return wrong(kFieldNumel, header.numel);
  if (header.nnz > header.numel) return wrong(kFieldNnz, header.nnz);
  const int64_t value_bytes = dtype_bytes(static_cast<int>(value_dtype));
  const int64_t payload = header.format == kCoo
                              ? coo_payload_bytes(static_cast<int64_t>(header.nnz), value_bytes)
                              : dense_payload_bytes(numel, value_bytes);
  if (header.payload_bytes != static_cast<uint64_t>(payload)) {
    return wrong(kFieldPayloadBytes, header.payload_bytes);
  }
  if (payload > available) return wrong(kFieldSize, available);
  return {};
}

// Walks the records; afterwards every chunk lies inside the message.
Status find_chunks(const uint8_t* message, int64_t message_bytes, const int64_t* offsets,
                   int64_t segment_count, int64_t value_dtype, uint32_t epoch, int64_t base,
                   std::vector<Chunk>& chunks) {
  int64_t at = 0;
  for (int64_t s = 0; s < segment_count; ++s) {
    const int64_t numel = offsets[s + 1] - offsets[s];
    if (message_bytes - at < kHeaderBytes) return {true, s, kFieldSize, message_bytes};
    Header header;
    std::memcpy(&header, message + at, sizeof header);
    at += kHeaderBytes;
    const Status status =
        check_header(header, s, numel, offsets[s], value_dtype, epoch, message_bytes - at);
    if (status.wrong) return status;
    const bool sparse = header.format == kCoo;
    const int64_t entries = sparse ? static_cast<int64_t>(header.nnz) : numel;
    const uint8_t* indices = message + at;
    const uint8_t* values = sparse ? indices + pad16(4 * entries) : indices;
    const int64_t step = sparse ? kSparseChunk : kDenseChunk;
    for (int64_t begin = 0; begin < entries; begin += step) {
      chunks.push_back(
          {s, sparse, indices, values, begin, std::min(begin + step, entries), offsets[s] - base});
    }
    at += static_cast<int64_t>(header.payload_bytes);
  }
  if (at != message_bytes) return {true, segment_count, kFieldSize, message_bytes};
  return {};
}

// The first entry of the chunk whose index is out of range or not above the one before; or -1.
int64_t first_bad_entry(const Chunk& chunk, int64_t numel) {
  int64_t previous = chunk.begin > 0 ? index_at(chunk.indices, chunk.begin - 1) : -1;
  for (int64_t k = chunk.begin; k < chunk.end; ++k) {
    const int64_t index = index_at(chunk.indices, k);
    if (index <= previous || index < 0 || index >= numel) return k;
    previous = index;
  }
  return -1;
}

Tensor decode_add_cpu(const Tensor& acc, const Tensor& message, const Tensor& segment_offsets,
                      int64_t value_dtype, int64_t epoch, int64_t base) {
  check_vector(acc, "decode_add_: acc", ScalarType::Float, -1);
  check_vector(message, "decode_add_: message", ScalarType::Byte, -1);
  MS_CHECK(acc.is_cpu() && message.is_cpu(), "decode_add_: a tensor is on the wrong device",
           "all on the CPU", "another");
  check_dtype_code(value_dtype, "decode_add_: value_dtype");
  const int64_t* offsets = check_offsets(segment_offsets, "decode_add_: segment_offsets");
  const int64_t segment_count = segment_offsets.numel() - 1;
  MS_CHECK(offsets[0] >= base && base >= 0 && offsets[segment_count] - base <= acc.numel(),
           "decode_add_: the segments do not lie in acc",
           "offsets from " << base << " to " << base + acc.numel(),
           offsets[0] << " to " << offsets[segment_count]);
  for (int64_t s = 0; s < segment_count; ++s) {
    MS_CHECK(offsets[s + 1] - offsets[s] <= kMaxSegmentNumel,
             "decode_add_: segment " << s << " is too long", "at most 2^31 - 1 elements",
             offsets[s + 1] - offsets[s]);
  }

  std::vector<Chunk> chunks;
  Status status =
      find_chunks(static_cast<const uint8_t*>(message.const_data_ptr()), message.numel(), offsets,
                  segment_count, value_dtype, static_cast<uint32_t>(epoch), base, chunks);
  const int64_t chunk_count = chunks.size();
  if (!status.wrong) {
    // The lowest bad chunk is reported, whichever thread saw one first.
    std::atomic<int64_t> bad{chunk_count};
    torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const Chunk& chunk = chunks[c];
        const int64_t numel = offsets[chunk.segment + 1] - offsets[chunk.segment];
        if (!chunk.sparse || first_bad_entry(chunk, numel) < 0) continue;
        int64_t lowest = bad.load();
        while (c < lowest && !bad.compare_exchange_weak(lowest, c)) {
        }
        return;
      }
    });
    if (bad < chunk_count) {
      const Chunk& chunk = chunks[bad];
      const int64_t numel = offsets[chunk.segment + 1] - offsets[chunk.segment];
      const int64_t entry = first_bad_entry(chunk, numel);
      status = {true, chunk.segment, kFieldIndices, index_at(chunk.indices, entry)};
    }
  }
  if (!status.wrong) {
    const Kernels& kernel = kernels();
    float* sums = static_cast<float*>(acc.mutable_data_ptr());
    const int64_t value_bytes = dtype_bytes(static_cast<int>(value_dtype));
    // Indices ascend, so no two chunks touch the same element.
    torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const Chunk& chunk = chunks[c];
        float* target = sums + chunk.acc_begin;
        const uint8_t* values = chunk.values + chunk.begin * value_bytes;
        const int64_t count = chunk.end - chunk.begin;
        if (chunk.sparse) {
          kernel.add_sparse[value_dtype](target, chunk.indices + 4 * chunk.begin, values, count);
        } else {
          kernel.add_dense[value_dtype](target + chunk.begin, values, count);
        }
      }
    });
  }
  Tensor result = torch::stable::new_empty(segment_offsets, {4});
  int64_t* fields = static_cast<int64_t*>(result.mutable_data_ptr());
  fields[0] = status.wrong;
  fields[1] = status.segment;
  fields[2] = status.field;
  fields[3] = status.value;
  return result;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("decode_add_", TORCH_BOX(&megatron_sparse::decode_add_cpu));
}
