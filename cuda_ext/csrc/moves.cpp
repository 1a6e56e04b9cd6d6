// Records of how far parameters moved, on the CPU; docs/parameters.md specifies them. Python
// (formats/moves.py) checks the tensors, and the headers before it calls the decoder.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <memory>
#include <mutex>

#include "moves_record.h"
#include "record_checksum.h"

namespace megatron_sparse {
namespace {

// Copies in all threads, and fills up to a multiple of 16 bytes with zeros.
void copy_padded(uint8_t* to, const uint8_t* from, int64_t bytes) {
  constexpr int64_t kPiece = int64_t{1} << 18;
  for_each_chunk(bytes, kPiece, [&](int64_t, int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, end - begin);
  });
  std::memset(to + bytes, 0, pad16(bytes) - bytes);
}

struct Numbers {
  const uint8_t* old;
  const uint8_t* now;
  const uint32_t* down;
  int64_t numel;
  int dtype;

  const uint8_t* old_at(int64_t i) const { return old + i * dtype_bytes(dtype); }
  const uint8_t* now_at(int64_t i) const { return now + i * dtype_bytes(dtype); }
  const uint32_t* down_at(int64_t chunk_begin) const { return down + chunk_begin / 32; }
};

std::vector<uint64_t> count_symbols(const Numbers& numbers, uint32_t base) {
  const int stride = numbers.numel > kCountAll ? kCountStride : 1;
  std::vector<uint64_t> counts(kContexts * kMaxSymbols);
  for (int key = 0; stride > 1 && key < kContexts * kMaxSymbols; ++key) {
    counts[key] = key % kMaxSymbols < symbols_of(numbers.dtype);
  }
  std::mutex lock;
  for_each_chunk(numbers.numel, kRansChunk, [&](int64_t, int64_t begin, int64_t end) {
    std::vector<uint64_t> here(counts.size());
    kernels().moves_count[numbers.dtype](numbers.old_at(begin), numbers.now_at(begin),
                                         numbers.down_at(begin), end - begin, base, stride,
                                         here.data());
    const std::lock_guard<std::mutex> held(lock);
    for (size_t k = 0; k < counts.size(); ++k) counts[k] += here[k];
  });
  return counts;
}

// Encodes a chunk into `slot`, raw where coding does not pay; returns its bytes, padding included.
int64_t encode_chunk(const Numbers& numbers, uint32_t base, const uint32_t* table, int64_t begin,
                     int64_t end, uint8_t* slot) {
  const int64_t count = end - begin, value_bytes = dtype_bytes(numbers.dtype);
  const int64_t raw_bytes = pad16(count * value_bytes);
  const uint8_t* old = numbers.old_at(begin);
  const uint8_t* now = numbers.now_at(begin);
  // A number takes at most 3 words; 64 more for vectors that reach below.
  const int64_t room = 3 * (count + kStates) + 64;
  const std::unique_ptr<uint16_t[]> words(new uint16_t[room]);
  uint32_t states[kStates];
  const uint16_t* first = kernels().rans_encode[numbers.dtype](
      old, now, numbers.down_at(begin), count, base, table, states, words.get() + room);
  const int64_t word_bytes = 2 * (words.get() + room - first);
  const int64_t bytes = static_cast<int64_t>(sizeof states) + word_bytes;
  if (pad16(bytes) < raw_bytes) {
    std::memcpy(slot, states, sizeof states);
    std::memcpy(slot + sizeof states, first, word_bytes);
    std::memset(slot + bytes, 0, pad16(bytes) - bytes);
    return pad16(bytes);
  }
  std::memcpy(slot, now, count * value_bytes);
  std::memset(slot + count * value_bytes, 0, raw_bytes - count * value_bytes);
  return raw_bytes;
}

// Writes the sections of a coded record; returns their bytes, or 0 where raw is as small.
int64_t encode_sections(const Numbers& numbers, uint8_t* sections, MovesSubHeader& head) {
  const int64_t chunks = chunk_count(numbers.numel);
  const int64_t slot_bytes = kRansChunk * dtype_bytes(numbers.dtype);
  const int64_t offset_bytes = pad16(4 * (chunks + 1));
  const uint32_t base = moves_base_exponent(numbers.old, numbers.numel, numbers.dtype);
  const MovesFrequencies frequencies = moves_quantise(count_symbols(numbers, base));
  const std::vector<uint32_t> table = moves_encoder_table(frequencies);
  const std::vector<uint8_t> stored = moves_table_bytes(frequencies);
  copy_padded(sections + offset_bytes, stored.data(), stored.size());
  uint8_t* data = sections + offset_bytes + pad16(stored.size());
  // Each task packs its chunks one behind the other, from its first one's slot on.
  std::vector<int64_t> starts(chunks), sizes(chunks);
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    int64_t at = first * slot_bytes;
    for (int64_t c = first; c < last; ++c) {
      starts[c] = at;
      sizes[c] = encode_chunk(numbers, base, table.data(), c * kRansChunk,
                              std::min((c + 1) * kRansChunk, numbers.numel), data + at);
      at += sizes[c];
    }
  });
  int64_t written = 0;
  for (int64_t c = 0; c <= chunks; ++c) {
    const uint32_t offset = static_cast<uint32_t>(written / 16);
    std::memcpy(sections + 4 * c, &offset, sizeof offset);
    if (c == chunks) break;
    if (written != starts[c]) std::memmove(data + written, data + starts[c], sizes[c]);
    written += sizes[c];
  }
  std::memset(sections + 4 * (chunks + 1), 0, offset_bytes - 4 * (chunks + 1));
  const int64_t bytes = data - sections + written;
  if (bytes >= pad16(numbers.numel * dtype_bytes(numbers.dtype))) return 0;
  head.base_exponent = static_cast<uint8_t>(base);
  head.chunks = static_cast<uint32_t>(chunks);
  head.table_bytes = static_cast<uint32_t>(stored.size());
  return bytes;
}

// The bytes that moves_encode needs of `out`: more than the record, for chunks lie apart at first,
// and coding may not pay.
int64_t moves_room(int64_t numel, int64_t dtype) {
  check_dtype_code(dtype, "moves_room: dtype");
  MS_CHECK(numel >= 0 && numel <= kMaxMoves, "moves_room: numel is out of range", "0 to 2^34",
           numel);
  return kMovesSectionsAt + pad16(numel * dtype_bytes(static_cast<int>(dtype))) +
         pad16(4 * (chunk_count(numel) + 1)) + pad16(kContexts * (1 + 2 * kMaxSymbols));
}

// Returns the record's bytes, one int64.
Tensor moves_encode_cpu(const Tensor& old, const Tensor& now, const Tensor& down, int64_t step,
                        const Tensor& out) {
  const int dtype = dtype_code(now, "moves_encode: new");
  const int64_t numel = now.numel();
  const Numbers numbers = {static_cast<const uint8_t*>(old.const_data_ptr()),
                           static_cast<const uint8_t*>(now.const_data_ptr()),
                           static_cast<const uint32_t*>(down.const_data_ptr()), numel, dtype};
  uint8_t* record = static_cast<uint8_t*>(out.mutable_data_ptr());
  MovesSubHeader head = {};
  int64_t bytes = numel > 0 ? encode_sections(numbers, record + kMovesSectionsAt, head) : 0;
  const bool coded = bytes > 0;
  if (!coded) {
    copy_padded(record + kMovesSectionsAt, numbers.now, numel * dtype_bytes(dtype));
    bytes = pad16(numel * dtype_bytes(dtype));
  }
  std::memcpy(record + kMovesBodyAt, &head, sizeof head);
  bytes += sizeof head;
  Header header = {};
  header.format = kFormatMoves;
  header.dtype = static_cast<uint8_t>(dtype);
  header.flags = static_cast<uint8_t>(coded ? kMovesRans : kMovesRaw);
  header.numel = numel;
  header.payload_bytes = bytes;
  header.step = static_cast<uint32_t>(step);
  seal_record(record, header);
  return result_of(out, {kMovesBodyAt + bytes});
}

// Decodes all rans chunks into `out`; returns the lowest chunk that is damaged, or their number.
int64_t decode_rans(const MovesRecord& record, const uint8_t* held, const uint32_t* down,
                    uint8_t* out) {
  const std::vector<uint32_t> table = moves_decoder_table(record.frequencies);
  const int64_t value_bytes = dtype_bytes(record.dtype);
  return first_bad(record.chunks, 1, [&](int64_t c) {
    const uint8_t* chunk = record.data + record.offsets[c];
    const int64_t bytes = record.offsets[c + 1] - record.offsets[c], count = record.count(c);
    const int64_t at = c * kRansChunk * value_bytes;
    if (record.is_raw(c)) {
      std::memcpy(out + at, chunk, count * value_bytes);
      return false;
    }
    uint32_t states[kStates];
    std::memcpy(states, chunk, sizeof states);
    const int64_t words = (bytes - static_cast<int64_t>(sizeof states)) / 2;
    const uint16_t* first = reinterpret_cast<const uint16_t*>(chunk + sizeof states);
    const int64_t read = kernels().rans_decode[record.dtype](
        held + at, down + c * kRansChunk / 32, count, record.base_exponent, table.data(), states,
        first, words, out + at);
    // Less than 16 bytes of padding are left, and every state is back where encoding began.
    bool fine = read >= 0 && words - read < 8;
    for (int64_t w = read; fine && w < words; ++w)
      fine = chunk[sizeof states + 2 * w] == 0 && chunk[sizeof states + 2 * w + 1] == 0;
    for (const uint32_t state : states) fine = fine && state == kLowestState;
    return !fine;
  });
}

// `held` becomes `now`, in all threads.
void keep(uint8_t* held, const uint8_t* now, int64_t numel, int dtype, uint32_t* down) {
  const int64_t value_bytes = dtype_bytes(dtype);
  for_each_chunk(numel, kRansChunk, [&](int64_t, int64_t begin, int64_t end) {
    kernels().moves_keep[dtype](held + begin * value_bytes, now + begin * value_bytes, end - begin,
                                down + begin / 32);
  });
}

MovesFault decode(const Tensor& held, const Tensor& down, const uint8_t* body, int64_t bytes,
                  int dtype, int coder) {
  MovesRecord record = {};
  record.coder = coder;
  record.dtype = dtype;
  record.numel = held.numel();
  const MovesFault fault = moves_read_record(body, bytes, record);
  if (fault.field != kFieldFine) return fault;
  if (read_at<uint32_t>(body) != body_checksum(body, bytes)) return {kFieldChecksum, 0};
  uint8_t* numbers = static_cast<uint8_t*>(held.mutable_data_ptr());
  uint32_t* signs = static_cast<uint32_t*>(down.mutable_data_ptr());
  if (coder == kMovesRaw) {
    keep(numbers, record.data, record.numel, dtype, signs);
    return {};
  }
  // Whether a chunk is whole shows only at its end, and what is held may not change before.
  const Tensor scratch = torch::stable::new_empty(held, {held.numel()});
  uint8_t* decoded = static_cast<uint8_t*>(scratch.mutable_data_ptr());
  const int64_t damaged = decode_rans(record, numbers, signs, decoded);
  if (damaged < record.chunks) return {kFieldChunk, damaged};
  keep(numbers, decoded, record.numel, dtype, signs);
  return {};
}

// Of each record the field that is wrong and where, or zeros; what is held has changed only then.
Tensor moves_decode_cpu(const std::vector<Tensor>& held, const std::vector<Tensor>& down,
                        const std::vector<Tensor>& records, const std::vector<int64_t>& coders) {
  const int dtype = dtype_code(held[0], "moves_decode_: held");
  Tensor result =
      torch::stable::new_empty(held[0], {2 * static_cast<int64_t>(held.size())}, ScalarType::Long);
  int64_t* statuses = static_cast<int64_t*>(result.mutable_data_ptr());
  // All before the first record is decoded: a refused call changes nothing.
  for (const Tensor& numbers : held) {
    check_vector(numbers, "moves_decode_: held", held[0].scalar_type(), -1);
  }
  for (size_t i = 0; i < held.size(); ++i) {
    const uint8_t* record = static_cast<const uint8_t*>(records[i].const_data_ptr());
    const MovesFault fault =
        decode(held[i], down[i], record + kMovesBodyAt, records[i].numel() - kMovesBodyAt, dtype,
               static_cast<int>(coders[i]));
    *statuses++ = fault.field;
    *statuses++ = fault.where;
  }
  return result;
}

void moves_keep_cpu(const Tensor& held, const Tensor& now, const Tensor& down) {
  keep(static_cast<uint8_t*>(held.mutable_data_ptr()),
       static_cast<const uint8_t*>(now.const_data_ptr()), now.numel(),
       dtype_code(now, "moves_keep_: new"), static_cast<uint32_t*>(down.mutable_data_ptr()));
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def("moves_room(int numel, int dtype) -> int");
  m.def("moves_encode(Tensor old, Tensor new, Tensor down, int step, Tensor(a!) out) -> Tensor");
  m.def(
      "moves_decode_(Tensor(a!)[] held, Tensor(b!)[] down, Tensor[] records, int[] coders) "
      "-> Tensor");
  m.def("moves_keep_(Tensor(a!) held, Tensor new, Tensor(b!) down) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CompositeExplicitAutograd, m) {
  m.impl("moves_room", TORCH_BOX(&megatron_sparse::moves_room));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("moves_encode", TORCH_BOX(&megatron_sparse::moves_encode_cpu));
  m.impl("moves_decode_", TORCH_BOX(&megatron_sparse::moves_decode_cpu));
  m.impl("moves_keep_", TORCH_BOX(&megatron_sparse::moves_keep_cpu));
}
