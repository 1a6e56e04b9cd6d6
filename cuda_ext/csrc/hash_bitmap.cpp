// The hash bitmap on the CPU (ZEN, Algorithm 2): marks the non-zero positions of a partition.
//
// Bit r of 64-bit word w stands for position 64 w + r of the partition; its element follows from
// the permutation's inverse, or is the position where partitions are summed by position. Bitmaps
// come from peers, so they are counted and compared before anything is written.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <vector>

#include "hash_bitmap_check.h"
#include "isa.h"
#include "stage.h"

namespace megatron_sparse {
namespace {

constexpr int64_t kChunkWords = 256;  // 16384 positions
constexpr int64_t kChunkPositions = 64 * kChunkWords;

// Each chunk stages its values where they would be if no value were zero; no other chunk touches
// this place. Once the counts of the chunks before are known, it moves them down.
int64_t pack(const BitmapPackArguments& call) {
  const int dtype = call.value_dtype;
  const int64_t positions = call.positions, value_bytes = dtype_bytes(dtype);
  const char* values = static_cast<const char*>(call.values);
  uint8_t* words = reinterpret_cast<uint8_t*>(call.words);
  uint8_t* packed = static_cast<uint8_t*>(call.packed);
  const int64_t chunks = (positions + kChunkPositions - 1) / kChunkPositions;
  std::vector<int64_t> nnz(chunks);
  const auto stage = kernels().stage[dtype][dtype];
  for_each_chunk(positions, kChunkPositions, [&](int64_t chunk, int64_t begin, int64_t end) {
    uint64_t bits[kChunkWords];
    alignas(64) uint8_t staged[kChunkPositions * 4 + kStageSlack];
    const int64_t word_bytes = 8 * ((end - begin + 63) / 64);
    nnz[chunk] = stage(values + begin * value_bytes, end - begin, {bits, nullptr, 0, staged});
    std::memcpy(words + begin / 8, bits, word_bytes);
    std::memcpy(packed + begin * value_bytes, staged, nnz[chunk] * value_bytes);
  });
  int64_t before = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    std::memmove(packed + before * value_bytes, packed + chunk * kChunkPositions * value_bytes,
                 nnz[chunk] * value_bytes);
    before += nnz[chunk];
  }
  return before;
}

Tensor hash_bitmap_pack_cpu(const Tensor& values, const Tensor& words, const Tensor& packed) {
  return result_of(values, {pack(check_bitmap_pack(values, words, packed))});
}

// The elements of the set bits of words [begin, end), in position order, into `out` (room for
// kChunkPositions); returns their number.
int64_t elements_of_words(const BitmapArguments& call, const Permutation& permutation,
                          const uint8_t* words, int64_t begin, int64_t end, uint32_t* out) {
  int64_t count = 0;
  for (int64_t w = begin; w < end; ++w) {
    for (uint64_t word = read_at<uint64_t>(words, w); word != 0; word &= word - 1) {
      out[count++] = static_cast<uint32_t>(call.first + 64 * w + __builtin_ctzll(word));
    }
  }
  if (call.permuted) kernels().unpermute(permutation, out, count);
  return count;
}

// A bitmap whose bits were counted and checked: no bit is beyond the positions.
struct Counted {
  BitmapField field = kFits;
  int64_t found = 0;
  std::vector<int64_t> before;  // bits before each chunk of words
};

Counted count_bits(const uint8_t* words, int64_t positions, int64_t nnz) {
  const int64_t word_count = (positions + 63) / 64;
  Counted result;
  result.before.assign((word_count + kChunkWords - 1) / kChunkWords + 1, 0);
  const int64_t in_last = positions % 64;
  if (in_last != 0 && read_at<uint64_t>(words, word_count - 1) >> in_last != 0) {
    result.field = kFieldBitmap;
    result.found = positions;
    return result;
  }
  std::vector<int64_t>& before = result.before;
  for_each_chunk(word_count, kChunkWords, [&](int64_t chunk, int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      before[chunk + 1] += __builtin_popcountll(read_at<uint64_t>(words, w));
    }
  });
  for (size_t chunk = 1; chunk < before.size(); ++chunk) before[chunk] += before[chunk - 1];
  result.found = before.back();
  if (result.found != nnz) result.field = kFieldNnz;
  return result;
}

Tensor hash_bitmap_add_cpu(const Tensor& acc, const Tensor& words, const Tensor& values,
                           int64_t value_dtype, int64_t nnz, int64_t partition, int64_t partitions,
                           int64_t seed, bool permuted) {
  const BitmapArguments call =
      check_bitmap_add(acc, words, values, value_dtype, nnz, partition, partitions, seed, permuted);
  const Permutation permutation = make_permutation(call.numel, static_cast<uint64_t>(seed));
  const uint8_t* bits = reinterpret_cast<const uint8_t*>(call.words);  // of any alignment
  const Counted counted = count_bits(bits, call.positions, nnz);
  if (counted.field == kFits) {
    const auto add_sparse = kernels().add_sparse[call.value_dtype];
    const int64_t value_bytes = dtype_bytes(call.value_dtype);
    // Positions have different elements, so no two chunks touch the same one.
    for_each_chunk(
        (call.positions + 63) / 64, kChunkWords, [&](int64_t chunk, int64_t begin, int64_t end) {
          uint32_t room[kChunkPositions];
          const int64_t count = elements_of_words(call, permutation, bits, begin, end, room);
          add_sparse(call.acc, room, call.values + counted.before[chunk] * value_bytes, count);
        });
  }
  return result_of(words, {counted.field, counted.found});
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def("hash_bitmap_pack(Tensor values, Tensor(a!) words, Tensor(b!) packed) -> Tensor");
  m.def(
      "hash_bitmap_add_(Tensor(a!) acc, Tensor words, Tensor values, int value_dtype, int nnz, "
      "int partition, int partitions, int seed, bool permuted) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("hash_bitmap_pack", TORCH_BOX(&megatron_sparse::hash_bitmap_pack_cpu));
  m.impl("hash_bitmap_add_", TORCH_BOX(&megatron_sparse::hash_bitmap_add_cpu));
}
