// Fuzzes the message decoder (cuda_ext/csrc/decode_records.h) under the address and undefined
// behaviour sanitizers; scripts/fuzz.sh builds and runs it, with libFuzzer or with the loop below.
//
// An input is 8 bytes of control and a message. Whatever the message: no instruction set may read
// or write out of bounds, all must answer alike, and a refused message leaves the accumulator as it
// was. Inputs start as valid messages from our own encoder. Most are damaged and then given headers
// that fit again, checksums included, so that the damage reaches the sections.
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

enum Option : uint8_t { kRepairHeaders = 1, kFresh = 2 };

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

// Makes every header say what is expected, but for what describes its sections.
void repair_headers(uint8_t* message, int64_t bytes, const Control& control) {
  int64_t at = 0;
  for (int s = 0; s < 2 && bytes - at >= kHeaderBytes; ++s) {
    Header header;
    std::memcpy(&header, message + at, sizeof header);
    const uint64_t numel = control.offsets[s + 1] - control.offsets[s];
    header.magic = kMagic;
    header.version = kVersion;
    header.format &= 3;
    header.dtype = static_cast<uint8_t>(control.dtype);
    header.flags = header.format == kFormatPici ? header.flags & kFlagLinear : 0;
    header.numel = numel;
    header.offset = control.offsets[s];
    header.epoch = kEpoch;
    if (header.nnz > numel) header.nnz %= numel + 1;
    header.checksum = header_checksum(header);
    std::memcpy(message + at, &header, sizeof header);
    if (header.payload_bytes > static_cast<uint64_t>(bytes)) return;
    at += kHeaderBytes + static_cast<int64_t>(header.payload_bytes);
  }
}

void fail(const char* what) {
  std::fprintf(stderr, "fuzz_decode: %s\n", what);
  std::abort();
}

// The decoder of all instruction sets on one input.
void try_input(const uint8_t* data, size_t size) {
  if (size < kControl) return;
  const Control control = read_control(data);
  // Exactly as long as it is, so that a byte too far is seen.
  const int64_t bytes = static_cast<int64_t>(size - kControl);
  const std::unique_ptr<uint8_t[]> message(new uint8_t[bytes]);
  std::memcpy(message.get(), data + kControl, bytes);
  if (control.options & kRepairHeaders) repair_headers(message.get(), bytes, control);
  const Expected expected = {control.offsets, 2, control.dtype, kEpoch, kFirst};
  const int64_t numel = control.offsets[2] - kFirst;
  const auto serial = [](int64_t count, const auto& work) { work(0, count); };
  Status first;
  std::unique_ptr<float[]> first_sum;
  for (const Kernels* kernel : all_kernels()) {
    std::unique_ptr<float[]> sum(new float[numel]);
    for (int64_t i = 0; i < numel; ++i) sum[i] = 0.5f;
    const Status status = decode_records(message.get(), bytes, expected,
                                         (control.options & kFresh) != 0, sum.get(), *kernel,
                                         serial);
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
    chunk.nnz = kernel.stage[kFp32][control.dtype](grad.data() + chunk.begin,
                                                   chunk.end - chunk.begin,
                                                   {chunk.words, chunk.signs, 0, chunk.values});
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

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  std::minstd_rand random(seed + 1);
  if (size <= kControl || random() % 8 == 0) {
    const std::vector<uint8_t> fresh = make_input(random);
    if (fresh.size() > max_size) return size;
    std::memcpy(data, fresh.data(), fresh.size());
    size = fresh.size();
    if (random() % 4 == 0) return size;  // a valid one, as it is
  }
  const size_t bytes =
      LLVMFuzzerMutate(data + kControl, size - kControl, max_size - kControl);
  return kControl + bytes;
}

#ifndef MS_LIBFUZZER
int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 10;
  const auto start = std::chrono::steady_clock::now();
  std::vector<uint8_t> input(size_t{1} << 20);
  size_t size = 0, tried = 0;
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (unsigned seed = 0; elapsed() < seconds; ++seed, ++tried) {
    size = LLVMFuzzerCustomMutator(input.data(), size, input.size(), seed);
    try_input(input.data(), size);
  }
  std::printf("fuzz_decode: %zu inputs in %.0f s, nothing found\n", tried, elapsed());
  return 0;
}
#endif
