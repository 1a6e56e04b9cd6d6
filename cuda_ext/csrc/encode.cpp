// encode on the CPU: the bucket becomes one record for each segment, as COO where that is smaller.
//
// Two passes over the gradient: chunks count their non-zero elements, and once it is known where
// each chunk's part begins, write it. Chunks do not depend on threads, nor do the bytes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "check.h"
#include "header.h"
#include "isa.h"

namespace megatron_sparse {
namespace {

constexpr int64_t kChunk = int64_t{1} << 15;

struct Record {
  bool sparse;
  int64_t nnz;
  uint8_t* payload;
  uint8_t* values;
};

struct Chunk {
  int64_t segment;
  int64_t begin;  // in the bucket
  int64_t end;
  int64_t nnz;         // if the segment is sparse
  int64_t nnz_before;  // in the segment, likewise
};

Tensor encode_cpu(const Tensor& grad, const Tensor& segment_offsets, const Tensor& segment_dense,
                  const Tensor& nnz, int64_t value_dtype, int64_t epoch, const Tensor& out) {
  check_flat(grad, "encode: grad");
  MS_CHECK(grad.is_cpu() && out.is_cpu() && segment_dense.is_cpu() && nnz.is_cpu(),
           "encode: a tensor is on the wrong device", "all on the CPU", "another");
  const int grad_dtype = dtype_code(grad, "encode: grad");
  check_dtype_code(value_dtype, "encode: value_dtype");
  const int64_t segment_count = nnz.numel();
  check_vector(nnz, "encode: nnz", ScalarType::Long, -1);
  check_vector(segment_dense, "encode: segment_dense", ScalarType::Byte, segment_count);
  check_vector(segment_offsets, "encode: segment_offsets", ScalarType::Long, segment_count + 1);
  check_vector(out, "encode: out", ScalarType::Byte, -1);
  const int64_t* offsets = check_offsets(segment_offsets, "encode: segment_offsets");
  check_cut(offsets, segment_count, grad.numel(), "encode: segment_offsets");
  const uint8_t* always_dense = static_cast<const uint8_t*>(segment_dense.const_data_ptr());
  const int64_t* counts = static_cast<const int64_t*>(nnz.const_data_ptr());
  const int64_t value_bytes = dtype_bytes(static_cast<int>(value_dtype));

  Tensor record_bytes = torch::stable::new_empty(nnz, {segment_count});
  int64_t* sizes = static_cast<int64_t*>(record_bytes.mutable_data_ptr());
  std::vector<Header> headers(segment_count);
  int64_t used = 0;
  for (int64_t s = 0; s < segment_count; ++s) {
    const int64_t numel = offsets[s + 1] - offsets[s];
    MS_CHECK(numel <= kMaxSegmentNumel, "encode: segment " << s << " is too long",
             "at most 2^31 - 1 elements", numel);
    MS_CHECK(counts[s] >= 0 && counts[s] <= numel,
             "encode: nnz of segment " << s << " is impossible", "0 to " << numel, counts[s]);
    const int64_t dense = dense_payload_bytes(numel, value_bytes);
    const int64_t coo = coo_payload_bytes(counts[s], value_bytes);
    const bool sparse = !always_dense[s] && coo < dense;
    Header& header = headers[s];
    header = {kMagic,
              kVersion,
              sparse ? kCoo : kDense,
              static_cast<uint8_t>(value_dtype),
              0,
              static_cast<uint64_t>(numel),
              static_cast<uint64_t>(counts[s]),
              static_cast<uint64_t>(sparse ? coo : dense),
              static_cast<uint64_t>(offsets[s]),
              static_cast<uint32_t>(epoch),
              0};
    header.checksum = header_checksum(header);
    sizes[s] = kHeaderBytes + static_cast<int64_t>(header.payload_bytes);
    used += sizes[s];
  }
  MS_CHECK(used <= out.numel(), "encode: the output buffer is too small", used << " bytes",
           out.numel());

  std::vector<Record> records(segment_count);
  std::vector<Chunk> chunks;
  uint8_t* at = static_cast<uint8_t*>(out.mutable_data_ptr());
  for (int64_t s = 0; s < segment_count; ++s) {
    const bool sparse = headers[s].format == kCoo;
    std::memcpy(at, &headers[s], sizeof(Header));
    Record& record = records[s];
    record = {sparse, counts[s], at + kHeaderBytes, at + kHeaderBytes};
    if (sparse) record.values += pad16(4 * counts[s]);
    // Padding follows a section's last element: clear the section's last 16 bytes beforehand.
    uint8_t* end = at + sizes[s];
    if (record.values > record.payload) std::memset(record.values - 16, 0, 16);
    if (end > record.values) std::memset(end - 16, 0, 16);
    for (int64_t begin = offsets[s]; begin < offsets[s + 1]; begin += kChunk) {
      chunks.push_back({s, begin, std::min(begin + kChunk, offsets[s + 1]), 0, 0});
    }
    at = end;
  }

  const Kernels& kernel = kernels();
  const char* data = static_cast<const char*>(grad.const_data_ptr());
  const int64_t grad_bytes = dtype_bytes(grad_dtype), chunk_count = chunks.size();
  torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      Chunk& chunk = chunks[c];
      if (!records[chunk.segment].sparse) continue;
      chunk.nnz = kernel.count_nonzero[grad_dtype](data + chunk.begin * grad_bytes,
                                                   chunk.end - chunk.begin);
    }
  });
  std::vector<int64_t> found(segment_count, 0);
  for (Chunk& chunk : chunks) {
    chunk.nnz_before = found[chunk.segment];
    found[chunk.segment] += chunk.nnz;
  }
  for (int64_t s = 0; s < segment_count; ++s) {
    MS_CHECK(!records[s].sparse || found[s] == counts[s],
             "encode: nnz of segment " << s << " is not what the gradient holds", found[s],
             counts[s]);
  }

  torch::stable::parallel_for(0, chunk_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Chunk& chunk = chunks[c];
      const Record& record = records[chunk.segment];
      const int64_t numel = chunk.end - chunk.begin, first = chunk.begin - offsets[chunk.segment];
      const char* source = data + chunk.begin * grad_bytes;
      if (record.sparse) {
        kernel.compress[grad_dtype][value_dtype](source, numel, static_cast<int32_t>(first),
                                                 chunk.nnz, record.payload + 4 * chunk.nnz_before,
                                                 record.values + value_bytes * chunk.nnz_before);
      } else {
        kernel.convert[grad_dtype][value_dtype](source, numel, record.values + value_bytes * first);
      }
    }
  });
  return record_bytes;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("encode", TORCH_BOX(&megatron_sparse::encode_cpu));
}
