// Fuzzes the message decoder (cuda_ext/csrc/decode_records.h) under the address and undefined
// behaviour sanitizers; scripts/fuzz.sh builds and runs it, with libFuzzer or with the loop below.
//
// An input is 8 bytes of control and a message. Whatever the message: no instruction set may read
// or write out of bounds, all must answer alike, and a refused message leaves the accumulator as it
// was. Inputs start as valid messages from our own encoder. Most are damaged and then repaired in
// part: headers with valid checksums, sections as long as they should be, prefix sums that fit.
// What one repair leaves wrong is then all that stands between the decoder and a bad access.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "decode_records.h"
#include "place.h"

using namespace megatron_sparse;

namespace {

constexpr size_t kControl = 8;
constexpr uint32_t kEpoch = 7;
constexpr int64_t kFirst = 1000;       // where the segments begin in the bucket
constexpr int64_t kMaxNumel = 40'000;  // more than a chunk of tiles

enum Option : uint8_t { kFresh = 1, kRepairHeaders = 2, kRepairPrefix = 4 };

struct Control {
  int dtype;
  uint8_t options;
  int64_t offsets[3];
};

Control read_control(const uint8_t* data) {
  uint16_t numel[2];
  std::memcpy(numel, data + 4, sizeof numel);
  const int64_t border = kFirst + numel[0] % kMaxNumel;
  return {data[0] % 3, data[1], {kFirst, border, border + numel[1] % kMaxNumel}};
}

std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> found = {&kernels_portable()};
#ifdef MS_X86
  if (__builtin_cpu_supports("avx2")) found.push_back(&kernels_avx2());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    found.push_back(&kernels_avx512());
  }
#endif
  return found;
}

// Makes a Pici record's prefix sums and count those of its words.
void repair_prefix(std::vector<uint8_t>& payload, int64_t numel, Header& header) {
  const int64_t words = 8 * stage_words(numel), tiles = tiles_of(numel);
  payload.resize(words + 4 * (tiles + 1));
  uint32_t sum = 0;
  for (int64_t t = 0; t <= tiles; ++t) {
    std::memcpy(payload.data() + words + 4 * t, &sum, sizeof sum);
    if (t < tiles) {
      sum += static_cast<uint32_t>(
          kernels_portable().count_bits(payload.data() + t * (kPiciTile / 8), kPiciTile / 64));
    }
  }
  header.nnz = sum;
}

// Makes every header say what is expected, and every record as long as its header then demands.
std::vector<uint8_t> repair(const std::vector<uint8_t>& message, const Control& control) {
  std::vector<uint8_t> repaired;
  size_t at = 0;
  for (int s = 0; s < 2 && message.size() - at >= sizeof(Header); ++s) {
    Header header;
    std::memcpy(&header, message.data() + at, sizeof header);
    at += sizeof header;
    const size_t left = message.size() - at;
    const size_t taken = header.payload_bytes < left ? header.payload_bytes : left;
    std::vector<uint8_t> payload(message.begin() + at, message.begin() + at + taken);
    at += taken;
    const int64_t numel = control.offsets[s + 1] - control.offsets[s];
    header.magic = kMagic;
    header.version = kVersion;
    header.format &= 3;
    header.dtype = static_cast<uint8_t>(control.dtype);
    header.flags = header.format == kFormatPici ? header.flags & kFlagLinear : 0;
    header.numel = numel;
    header.nnz %= numel + 1;
    header.offset = control.offsets[s];
    header.epoch = kEpoch;
    if (header.format == kFormatPici && (control.options & kRepairPrefix)) {
      repair_prefix(payload, numel, header);
    }
    uint32_t block_size = 0, blocks = 0;
    if (header.format == kFormatBlocks) {
      payload.resize(std::max<size_t>(payload.size(), kBlocksSubheader));
      std::memcpy(&block_size, payload.data(), sizeof block_size);
      std::memcpy(&blocks, payload.data() + 4, sizeof blocks);
      block_size %= 8192;
      blocks %= numel / (block_size + 1) + 3;
      std::memcpy(payload.data(), &block_size, sizeof block_size);
      std::memcpy(payload.data() + 4, &blocks, sizeof blocks);
    }
    uint8_t kind = header.format;
    if (kind == kKindPici && header.flags == 0) kind = kKindPiciPaper;
    header.payload_bytes = sections_of(kind, numel, static_cast<int64_t>(header.nnz), blocks,
                                       block_size, dtype_bytes(control.dtype))
                               .payload;
    payload.resize(header.payload_bytes);
    header.checksum = header_checksum(header);
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&header);
    repaired.insert(repaired.end(), bytes, bytes + sizeof header);
    repaired.insert(repaired.end(), payload.begin(), payload.end());
  }
  return repaired;
}

void fail(const char* what) {
  std::fprintf(stderr, "fuzz_decode: %s\n", what);
  std::abort();
}

// The decoder of all instruction sets on one input; whether it was taken for a message.
bool try_input(const uint8_t* data, size_t size) {
  if (size < kControl) return false;
  const Control control = read_control(data);
  // Exactly as long as it is, so that a byte too far is seen.
  std::vector<uint8_t> content(data + kControl, data + size);
  if (control.options & kRepairHeaders) content = repair(content, control);
  const int64_t bytes = static_cast<int64_t>(content.size());
  const std::unique_ptr<uint8_t[]> message(new uint8_t[bytes]);
  if (bytes > 0) std::memcpy(message.get(), content.data(), bytes);
  const Expected expected = {control.offsets, 2, control.dtype, kEpoch, kFirst};
  const int64_t numel = control.offsets[2] - kFirst;
  const auto serial = [](int64_t count, const auto& work) { work(0, count); };
  Status first;
  std::unique_ptr<float[]> first_sum;
  for (const Kernels* kernel : all_kernels()) {
    std::unique_ptr<float[]> sum(new float[numel]);
    for (int64_t i = 0; i < numel; ++i) sum[i] = 0.5f;
    const Status status =
        decode_records(message.get(), bytes, expected, (control.options & kFresh) != 0, sum.get(),
                       *kernel, serial);
    for (int64_t i = 0; status.wrong && i < numel; ++i) {
      if (sum[i] != 0.5f) fail("a refused message changed the accumulator");
    }
    if (first_sum == nullptr) {
      first = status;
      first_sum = std::move(sum);
      continue;
    }
    if (status.wrong != first.wrong || status.field != first.field) {
      fail("two instruction sets answer differently");
    }
    for (int64_t i = 0; i < numel; ++i) {
      // Which NaN survives an addition differs between machines.
      if (std::memcmp(&sum[i], &first_sum[i], sizeof(float)) != 0 &&
          !(sum[i] != sum[i] && first_sum[i] != first_sum[i])) {
        fail("two instruction sets add differently");
      }
    }
  }
  return !first.wrong;
}

// A valid input, from the encoder, which is thereby under the sanitizers too.
std::vector<uint8_t> make_input(std::minstd_rand& random) {
  std::vector<uint8_t> input(kControl);
  for (uint8_t& byte : input) byte = static_cast<uint8_t>(random() >> 8);
  if (random() % 4 != 0) input[5] = input[7] = 0;  // mostly short segments: 255 elements
  const Control control = read_control(input.data());
  const int64_t numel = control.offsets[2] - kFirst, value_bytes = dtype_bytes(control.dtype);
  std::vector<float> grad(numel);
  const unsigned gap = 1 + random() % 64;
  for (float& value : grad) value = random() % gap == 0 ? static_cast<float>(random() % 9) - 4 : 0;
  const int64_t offsets[3] = {0, control.offsets[1] - kFirst, numel};
  std::vector<uint64_t> scratch((scratch_bytes(offsets, 2, value_bytes) + 7) / 8);
  std::vector<StageChunk> chunks = cut_chunks(offsets, 2, value_bytes, scratch.data());
  const std::vector<const Kernels*> sets = all_kernels();
  const Kernels& kernel = *sets[random() % sets.size()];
  const int64_t kinds[] = {kAdaptive, kKindCoo, kKindPici, kKindPiciPaper, kKindBlocks};
  const int64_t kind = kinds[random() % 5], block_size = 64ll << random() % 3;
  for (StageChunk& chunk : chunks) {
    chunk.values = chunk.slot;
    chunk.nnz =
        kernel.stage[kFp32][control.dtype](grad.data() + chunk.begin, chunk.end - chunk.begin,
                                           {chunk.words, nullptr, 0, chunk.values});
    clear_words_behind(chunk);
    chunk.blocks = count_blocks(chunk, block_size);
  }
  const std::vector<SegmentCount> counts = add_up(chunks, 2);
  std::vector<Record> records;
  int64_t bytes = 0;
  for (int s = 0; s < 2; ++s) {
    records.push_back(plan_record(kind, false, kFirst + offsets[s], offsets[s + 1] - offsets[s],
                                  counts[s], block_size, value_bytes));
    bytes += records.back().bytes();
  }
  input.resize(kControl + bytes);
  start_records(records, control.dtype, kEpoch, input.data() + kControl);
  for (StageChunk& chunk : chunks) {
    chunk.begin += kFirst;
    chunk.end += kFirst;
    place_chunk(chunk, records[chunk.segment], control.dtype, kernel);
  }
  return input;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try_input(data, size);
  return 0;
}

#ifdef MS_LIBFUZZER
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
#else
// A few damaged bytes or a cut; what libFuzzer's own mutations do, without their feedback.
static size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t) {
  static std::minstd_rand random(99);
  const size_t times = 1 + random() % 4;
  for (size_t i = 0; i < times && size > 0; ++i) {
    // The headers and the first sections are where most decisions are taken.
    const size_t at = random() % (random() % 2 ? size : size < 160 ? size : 160);
    switch (random() % 5) {
      case 0:
        data[at] = static_cast<uint8_t>(random() >> 8);
        break;
      case 1:
        data[at] ^= static_cast<uint8_t>(1u << random() % 8);
        break;
      case 2:
        data[at] = random() % 2 ? 0xff : 0;
        break;
      case 3:
        ++data[at];
        break;
      default:
        if (random() % 8 == 0) size = at;
    }
  }
  return size;
}
#endif

// Changes the count in one of the headers a little: sections of the right length, but for others.
static void nudge_count(uint8_t* message, size_t size, std::minstd_rand& random) {
  Header header;
  if (size < sizeof header) return;
  std::memcpy(&header, message, sizeof header);
  if (random() % 2 != 0 && header.payload_bytes <= size &&
      header.payload_bytes + 2 * sizeof header <= size) {
    message += sizeof header + header.payload_bytes;
    std::memcpy(&header, message, sizeof header);
  }
  const uint64_t step = 1 + random() % 40;
  header.nnz = random() % 2 != 0 || header.nnz < step ? header.nnz + step : header.nnz - step;
  std::memcpy(message, &header, sizeof header);
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  std::minstd_rand random(seed + 1);
  data[1] = static_cast<uint8_t>(random() >> 8);
  if (size <= kControl || random() % 4 == 0) {
    const std::vector<uint8_t> fresh = make_input(random);
    if (fresh.size() > max_size) return size;
    std::memcpy(data, fresh.data(), fresh.size());
    size = fresh.size();
    if (random() % 4 == 0) return size;  // a valid one, as it is
  }
  if (random() % 4 == 0) {
    nudge_count(data + kControl, size - kControl, random);
    if (random() % 2 == 0) return size;
  }
  const size_t bytes = LLVMFuzzerMutate(data + kControl, size - kControl, max_size - kControl);
  return kControl + bytes;
}

#ifndef MS_LIBFUZZER
int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 10;
  const auto start = std::chrono::steady_clock::now();
  std::vector<uint8_t> input(size_t{1} << 20);
  size_t size = 0, tried = 0, taken = 0;
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (unsigned seed = 0; elapsed() < seconds; ++seed, ++tried) {
    size = LLVMFuzzerCustomMutator(input.data(), size, input.size(), seed);
    taken += try_input(input.data(), size);
  }
  std::printf("fuzz_decode: %zu inputs, %zu of them valid, in %.0f s, nothing found\n", tried,
              taken, elapsed());
  return 0;
}
#endif
