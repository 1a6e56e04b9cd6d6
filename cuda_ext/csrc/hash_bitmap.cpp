// The hash bitmap on the CPU (ZEN, Algorithm 2): marks the non-zero positions of a partition.
//
// Bit r of 64-bit word w stands for position 64 w + r of the partition; its element follows from
// the permutation's inverse or, in the paper's way, from the partition's sorted index set. Bitmaps
// come from peers, so they are counted and compared before anything is written.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <vector>

#include "hash_launch.h"
#include "hash_partition_check.h"
#include "isa.h"
#include "stage.h"

namespace megatron_sparse {
namespace {

constexpr int64_t kChunkWords = 256;  // 16384 positions
constexpr int64_t kChunkPositions = 64 * kChunkWords;

uint64_t word_at(const uint8_t* words, int64_t w) {
  uint64_t word;
  std::memcpy(&word, words + 8 * w, sizeof word);
  return word;
}

const uint8_t* check_bytes(const Tensor& tensor, const char* name, int64_t bytes) {
  check_vector(tensor, name, ScalarType::Byte, bytes);
  MS_CHECK(tensor.is_cpu(), name << " is on the wrong device", "cpu", "another");
  return static_cast<const uint8_t*>(tensor.const_data_ptr());
}

// Each chunk stages its values where they would be if no value were zero; no other chunk touches
// this place. Once the counts of the chunks before are known, it moves them down.
int64_t pack(const char* values, int dtype, int64_t positions, uint8_t* words, uint8_t* packed) {
  const int64_t value_bytes = dtype_bytes(dtype);
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
  check_flat(values, "hash_bitmap_pack: values");
  MS_CHECK(values.is_cpu(), "hash_bitmap_pack: values is on the wrong device", "cpu", "another");
  const int64_t positions = values.numel();
  const int dtype = dtype_code(values, "hash_bitmap_pack: values");
  const int64_t value_bytes = dtype_bytes(dtype);
  check_bytes(words, "hash_bitmap_pack: words", 8 * ((positions + 63) / 64));
  check_bytes(packed, "hash_bitmap_pack: packed", positions * value_bytes);
  const char* from = static_cast<const char*>(values.const_data_ptr());
  uint8_t* to_words = static_cast<uint8_t*>(words.mutable_data_ptr());
  uint8_t* to_packed = static_cast<uint8_t*>(packed.mutable_data_ptr());
  const int64_t nnz = pack(from, dtype, positions, to_words, to_packed);
  Tensor result = torch::stable::new_empty(values, {1}, ScalarType::Long);
  *static_cast<int64_t*>(result.mutable_data_ptr()) = nnz;
  return result;
}

// From a partition's positions to elements of the segment.
class Elements {
 public:
  Elements(int64_t numel, int64_t partition, int64_t partitions, int64_t seed,
           const std::optional<Tensor>& index_set, const char* op)
      : numel_(numel), permutation_(make_permutation(numel, static_cast<uint64_t>(seed))) {
    check_hash(numel, partitions, op);
    check_partition(partition, partitions, op);
    first_ = partition_begin(numel, partitions, partition);
    positions_ = partition_begin(numel, partitions, partition + 1) - first_;
    if (index_set.has_value()) {
      check_vector(*index_set, "hash bitmap: index_set", ScalarType::Int, -1);
      MS_CHECK(index_set->is_cpu(), op << ": index_set is on the wrong device", "cpu", "another");
      set_ = static_cast<const int32_t*>(index_set->const_data_ptr());
      positions_ = index_set->numel();
      const int64_t bad = first_bad(positions_, [this](int64_t i) {
        return set_[i] < (i == 0 ? 0 : set_[i - 1] + 1) || set_[i] >= numel_;
      });
      MS_CHECK(bad == positions_, op << ": index_set is wrong at position " << bad,
               "ascending elements from 0 to " << numel - 1, set_[bad]);
    }
  }

  int64_t positions() const { return positions_; }

  // The elements of the set bits of words [begin, end), in position order, into `out` (room for
  // kChunkPositions); returns their number.
  int64_t of_words(const uint8_t* words, int64_t begin, int64_t end, uint32_t* out) const {
    const int64_t base = set_ == nullptr ? first_ : 0;
    int64_t count = 0;
    for (int64_t w = begin; w < end; ++w) {
      for (uint64_t word = word_at(words, w); word != 0; word &= word - 1) {
        out[count++] = static_cast<uint32_t>(base + 64 * w + __builtin_ctzll(word));
      }
    }
    if (set_ != nullptr) {
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint32_t>(set_[out[i]]);
    } else {
      kernels().unpermute(permutation_, out, count);
    }
    return count;
  }

 private:
  int64_t numel_;
  Permutation permutation_;
  int64_t first_ = 0;
  int64_t positions_ = 0;
  const int32_t* set_ = nullptr;
};

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
  if (in_last != 0 && word_at(words, word_count - 1) >> in_last != 0) {
    result.field = kFieldBitmap;
    result.found = positions;
    return result;
  }
  std::vector<int64_t>& before = result.before;
  for_each_chunk(word_count, kChunkWords, [&](int64_t chunk, int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      before[chunk + 1] += __builtin_popcountll(word_at(words, w));
    }
  });
  for (size_t chunk = 1; chunk < before.size(); ++chunk) before[chunk] += before[chunk - 1];
  result.found = before.back();
  if (result.found != nnz) result.field = kFieldNnz;
  return result;
}

Tensor status_of(const Counted& counted, const Tensor& like) {
  Tensor status = torch::stable::new_empty(like, {2}, ScalarType::Long);
  int64_t* fields = static_cast<int64_t*>(status.mutable_data_ptr());
  fields[0] = counted.field;
  fields[1] = counted.found;
  return status;
}

Tensor hash_bitmap_add_cpu(const Tensor& acc, const Tensor& words, const Tensor& values,
                           int64_t value_dtype, int64_t nnz, int64_t partition, int64_t partitions,
                           int64_t seed, std::optional<Tensor> index_set) {
  check_vector(acc, "hash_bitmap_add_: acc", ScalarType::Float, -1);
  MS_CHECK(acc.is_cpu(), "hash_bitmap_add_: acc is on the wrong device", "cpu", "another");
  const Elements elements(acc.numel(), partition, partitions, seed, index_set, "hash_bitmap_add_");
  const int64_t positions = elements.positions(), word_count = (positions + 63) / 64;
  check_dtype_code(value_dtype, "hash_bitmap_add_: value_dtype");
  MS_CHECK(nnz >= 0 && nnz <= positions, "hash_bitmap_add_: nnz is out of range",
           "0 to " << positions, nnz);
  const int64_t value_bytes = dtype_bytes(static_cast<int>(value_dtype));
  const uint8_t* bits = check_bytes(words, "hash_bitmap_add_: words", 8 * word_count);
  const uint8_t* from = check_bytes(values, "hash_bitmap_add_: values", nnz * value_bytes);
  const Counted counted = count_bits(bits, positions, nnz);
  if (counted.field == kFits) {
    const Kernels& kernel = kernels();
    float* sums = static_cast<float*>(acc.mutable_data_ptr());
    // Positions have different elements, so no two chunks touch the same one.
    for_each_chunk(word_count, kChunkWords, [&](int64_t chunk, int64_t begin, int64_t end) {
      uint32_t room[kChunkPositions];
      const int64_t count = elements.of_words(bits, begin, end, room);
      kernel.add_sparse[value_dtype](sums, room, from + counted.before[chunk] * value_bytes, count);
    });
  }
  return status_of(counted, words);
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def("hash_bitmap_pack(Tensor values, Tensor(a!) words, Tensor(b!) packed) -> Tensor");
  m.def(
      "hash_bitmap_add_(Tensor(a!) acc, Tensor words, Tensor values, int value_dtype, int nnz, "
      "int partition, int partitions, int seed, Tensor? index_set) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("hash_bitmap_pack", TORCH_BOX(&megatron_sparse::hash_bitmap_pack_cpu));
  m.impl("hash_bitmap_add_", TORCH_BOX(&megatron_sparse::hash_bitmap_add_cpu));
}
