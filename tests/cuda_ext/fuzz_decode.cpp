// Fuzzes the message decoder (cuda_ext/csrc/decode_records.h) under the address and undefined
// behaviour sanitizers; scripts/fuzz.sh builds and runs it, with libFuzzer or with fuzz_loop.cpp.
//
// An input is 8 bytes of control and a message. For any message, no instruction set may read or
// write out of bounds, all must give the same answer, and a refused message must not change the
// accumulator. Inputs start as valid messages of the oracle (fuzz_corpus.py). Most are damaged and
// then repaired in part: headers with valid checksums, sections as long as they should be, prefix
// sums that fit, Rice's rows ascending. So a single remaining error is the only reason for the
// decoder to refuse the message. With the option kQuantised the message is one of few bits.
//
// With the option kInSlots the records are moved apart, each to a slot of capacity mode, with
// garbage behind it that must not be read; some slots are too short for their record.
//
// Each message is also added twice in one pass, with a dense one between: the sum must be that of
// one message after another, whether the message is taken or refused.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "decode_records.h"
#include "decode_sum.h"
#include "place.h"
#include "rice.h"

using namespace megatron_sparse;

namespace {

constexpr size_t kControl = 8;
constexpr uint32_t kStep = 7;
constexpr int64_t kFirst = 1000;        // where the segments begin in the bucket
constexpr int64_t kMaxNumel = 160'000;  // more than a chunk of tiles

enum Option : uint8_t {
  kFresh = 1,
  kRepairHeaders = 2,
  kRepairPrefix = 4,
  kInSlots = 16,
  kQuantised = 32
};

// Counts for the summary.
struct Counts {
  uint64_t messages = 0;
  uint64_t taken = 0;
  uint64_t taken_in_slots = 0;
  uint64_t quantised = 0;    // of the messages taken
  uint64_t records[6] = {};  // dense, COO, Pici, blocks, Pici in the paper's order, Rice
} counted;

struct Control {
  int dtype;
  uint8_t options;
  uint8_t slack;  // of the slots
  int64_t offsets[3];
};

Control read_control(const uint8_t* data) {
  uint16_t numel[2];
  std::memcpy(numel, data + 4, sizeof numel);
  const auto scaled = [data](int64_t n) { return (3 * n + data[2] % 3) % kMaxNumel; };
  const int64_t border = kFirst + scaled(numel[0]);
  const int dtype = data[1] & kQuantised ? kQ8 + data[0] % 4 : data[0] % 3;
  return {dtype, data[1], data[3], {kFirst, border, border + scaled(numel[1])}};
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

// Sets a Pici record's prefix sums and count to those of its words.
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

// Makes a damaged record's sub-header, length and, if asked, rows possible; leaves its words.
void repair_rice(std::vector<uint8_t>& payload, const Header& header, bool repair_rows) {
  RiceSubHeader head = {};
  payload.resize(std::max(payload.size(), sizeof head));
  std::memcpy(&head, payload.data(), sizeof head);
  const bool may_be_whole = header.dtype == kQ8 || header.dtype == kQ4;
  head.indices = may_be_whole ? head.indices % 2 : 1;
  if (head.log2_span < kLeastSpan || head.log2_span > kMostSpan) head.log2_span = kLeastSpan;
  head.zero = 0;
  const int64_t numel = static_cast<int64_t>(header.numel);
  const int64_t chunks = chunks_of(numel, head.log2_span);
  head.chunks = static_cast<uint32_t>(chunks);
  const int64_t table = rice_table_bytes(chunks, head.indices != 0);
  if (head.indices == 0) {
    head.words = whole_words(numel, header.dtype, head.log2_span);
  } else {
    head.words %= payload.size() / 4 + 8;
  }
  payload.resize(rice_payload(chunks, head.indices != 0, static_cast<int64_t>(head.words)));
  std::memcpy(payload.data(), &head, sizeof head);
  if (table == 0) return;
  RiceRow before = {0, 0};
  for (int64_t c = 0; c <= chunks; ++c) {
    uint8_t* place = payload.data() + sizeof head + c * sizeof(RiceRow);
    RiceRow row;
    std::memcpy(&row, place, sizeof row);
    if (c == 0) row = {0, 0};
    if (c == chunks) {
      row = {static_cast<uint32_t>(header.nnz), static_cast<uint32_t>(head.words)};
    } else if (repair_rows) {
      row.entries = std::min<uint32_t>(std::max(row.entries, before.entries), header.nnz);
      row.words = std::min<uint32_t>(std::max(row.words, before.words), head.words);
    }
    std::memcpy(place, &row, sizeof row);
    before = row;
  }
}

// Sets every header to the expected values, and every record to the length in its header.
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
    if (is_quantised(control.dtype)) {
      if (header.format != kKindDense) header.format = kFormatRice;
    } else if (header.format != kFormatRice) {
      header.format &= 3;
    }
    const bool kept = is_quantised(control.dtype) && header.format == kKindDense;
    header.dtype = static_cast<uint8_t>(kept ? int{kBf16} : control.dtype);
    header.flags = header.format == kFormatPici ? header.flags & kFlagLinear : 0;
    header.numel = numel;
    header.nnz %= numel + 1;
    header.offset = control.offsets[s];
    header.step = kStep;
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
    if (header.format == kFormatRice) {
      repair_rice(payload, header, (control.options & kRepairPrefix) != 0);
      header.payload_bytes = payload.size();
    } else {
      uint8_t kind = header.format;
      if (kind == kKindPici && header.flags == 0) kind = kKindPiciPaper;
      header.payload_bytes = sections_of(kind, numel, static_cast<int64_t>(header.nnz), blocks,
                                         block_size, dtype_bytes(header.dtype))
                                 .payload;
      payload.resize(header.payload_bytes);
    }
    header.checksum = checksum_of(header);
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&header);
    repaired.insert(repaired.end(), bytes, bytes + sizeof header);
    repaired.insert(repaired.end(), payload.begin(), payload.end());
  }
  return repaired;
}

struct SlotTable {
  int64_t at[3];
};

// Moves the records of a message apart, as far as its headers give their places; one slot in four
// is too short.
SlotTable spread(std::vector<uint8_t>& message, uint8_t slack) {
  Header header;
  size_t first = message.size();
  if (first >= sizeof header) {
    std::memcpy(&header, message.data(), sizeof header);
    if (header.payload_bytes < first - sizeof header) first = sizeof header + header.payload_bytes;
  }
  const size_t behind = (16 - first % 16) % 16 + 16 * (slack & 3);
  message.insert(message.begin() + static_cast<int64_t>(first), behind, 0xa5);
  int64_t second = static_cast<int64_t>(first + behind);
  message.insert(message.end(), (16 - message.size() % 16) % 16 + 16 * (slack >> 2 & 3), 0xa5);
  if ((slack >> 4 & 3) == 3 && second >= 16) second -= 16;
  return {{0, second, static_cast<int64_t>(message.size())}};
}

void fail(const char* what) {
  std::fprintf(stderr, "fuzz_decode: %s\n", what);
  std::abort();
}

bool same_bits(float a, float b) {
  // Which NaN survives an addition differs between machines.
  return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b);
}

const auto serial = [](int64_t count, const auto& work) { work(0, count); };

// A copy that is exactly as long as its content, so that an access beyond it is found.
std::unique_ptr<uint8_t[]> exact_copy(const std::vector<uint8_t>& content) {
  std::unique_ptr<uint8_t[]> copy(new uint8_t[content.size()]);
  if (!content.empty()) std::memcpy(copy.get(), content.data(), content.size());
  return copy;
}

// A message of two dense records, of any bits; a quantised message has those in bf16.
std::vector<uint8_t> dense_message(const Control& control, std::minstd_rand& random) {
  const int dtype = is_quantised(control.dtype) ? int{kBf16} : control.dtype;
  std::vector<Record> records;
  int64_t bytes = 0;
  for (int s = 0; s < 2; ++s) {
    const int64_t numel = control.offsets[s + 1] - control.offsets[s];
    records.push_back(
        plan_record(kKindDense, control.offsets[s], numel, {}, 0, dtype_bytes(dtype)));
    bytes += records.back().bytes();
  }
  std::vector<uint8_t> message(bytes);
  start_records(records, dtype, kStep, message.data());
  for (int s = 0; s < 2; ++s) {
    const int64_t numel = control.offsets[s + 1] - control.offsets[s];
    std::generate_n(records[s].payload, numel * dtype_bytes(dtype),
                    [&] { return static_cast<uint8_t>(random() >> 8); });
  }
  return message;
}

// The sum of a message, a dense one and the message again, in one pass and one after another.
void try_sum(const Control& control, const uint8_t* message, int64_t bytes,
             const Expected& expected) {
  std::minstd_rand random(control.slack + 256u * static_cast<uint32_t>(bytes));
  const int64_t numel = control.offsets[2] - kFirst;
  const std::vector<uint8_t> valid = dense_message(control, random);
  // Slots of the message do not fit the valid one, so both are the message then.
  const bool in_slots = expected.slots != nullptr;
  const std::unique_ptr<uint8_t[]> other = exact_copy(valid);
  const MessageBytes one = {message, bytes};
  const MessageBytes two = {other.get(), static_cast<int64_t>(valid.size())};
  const std::vector<MessageBytes> messages = {one, in_slots ? one : two, one};
  const bool fresh = (control.options & kFresh) != 0;
  const int64_t large = random() % 2 == 0 ? 0 : kLargeSum;
  for (const Kernels* kernel : all_kernels()) {
    std::unique_ptr<float[]> sum(new float[numel]), wanted(new float[numel]);
    std::fill(sum.get(), sum.get() + numel, 0.5f);
    std::fill(wanted.get(), wanted.get() + numel, fresh ? 0.0f : 0.5f);
    const std::vector<Status> statuses =
        sum_records(messages, expected, fresh, sum.get(), *kernel, serial, large);
    for (size_t i = 0; i < messages.size(); ++i) {
      const Status status = decode_records(messages[i].bytes, messages[i].size, expected, false,
                                           wanted.get(), *kernel, serial);
      if (status.wrong != statuses[i].wrong || status.field != statuses[i].field) {
        fail("a message of a sum is judged differently");
      }
    }
    for (int64_t i = 0; i < numel; ++i) {
      if (!same_bits(sum[i], wanted[i])) fail("a sum in one pass has other bits");
    }
  }
}

// The decoder of all instruction sets on one message.
void try_message(const Control& control, std::vector<uint8_t> content) {
  if (control.options & kRepairHeaders) content = repair(content, control);
  const bool in_slots = (control.options & kInSlots) != 0;
  SlotTable slots = {};
  if (in_slots) slots = spread(content, control.slack);
  const int64_t bytes = static_cast<int64_t>(content.size());
  const std::unique_ptr<uint8_t[]> message = exact_copy(content);
  const Expected expected = {control.offsets, 2,      control.dtype,
                             kStep,           kFirst, in_slots ? slots.at : nullptr};
  const int64_t numel = control.offsets[2] - kFirst;
  Status first;
  std::unique_ptr<float[]> first_sum;
  for (const Kernels* kernel : all_kernels()) {
    std::unique_ptr<float[]> sum(new float[numel]);
    std::fill(sum.get(), sum.get() + numel, 0.5f);
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
      if (!same_bits(sum[i], first_sum[i])) fail("two instruction sets add differently");
    }
  }
  try_sum(control, message.get(), bytes, expected);
  ++counted.messages;
  counted.taken += !first.wrong;
  counted.taken_in_slots += !first.wrong && in_slots;
  counted.quantised += !first.wrong && is_quantised(control.dtype);
  std::vector<DecodeChunk> records;
  if (first.wrong || find_records(message.get(), bytes, expected, records).wrong) return;
  for (const DecodeChunk& record : records) {
    const int kind = record.kind == kKindPiciPaper ? 4 : record.kind == kKindRice ? 5 : record.kind;
    ++counted.records[kind];
  }
}

// Changes a number of one of the rows a little; of one in between, if there is one.
void nudge_row(uint8_t* payload, const uint8_t* end, uint32_t step, std::minstd_rand& random) {
  RiceSubHeader head;
  if (end - payload < static_cast<int64_t>(sizeof head)) return;
  std::memcpy(&head, payload, sizeof head);
  const uint64_t row = head.chunks > 1 ? 1 + random() % (head.chunks - 1) : random() % 2;
  const uint64_t at = sizeof head + sizeof(RiceRow) * row + 4 * (random() % 2);
  if (at + 4 > static_cast<uint64_t>(end - payload)) return;
  uint32_t number;
  std::memcpy(&number, payload + at, sizeof number);
  number += random() % 2 != 0 ? step : -step;
  std::memcpy(payload + at, &number, sizeof number);
}

void print_summary() {
  const auto number = [](uint64_t n) { return static_cast<unsigned long long>(n); };
  std::printf(
      "fuzz_decode: %llu executions, 0 crashes: messages, %llu of them valid, %llu of these in "
      "slots, %llu of few bits\n"
      "fuzz_decode: records decoded: %llu dense, %llu COO, %llu Pici, %llu Pici in the paper's "
      "order, %llu blocks, %llu Rice; on %zu instruction sets\n",
      number(counted.messages), number(counted.taken), number(counted.taken_in_slots),
      number(counted.quantised), number(counted.records[0]), number(counted.records[1]),
      number(counted.records[2]), number(counted.records[4]), number(counted.records[3]),
      number(counted.records[5]), all_kernels().size());
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  std::atexit(print_summary);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kControl) return 0;
  try_message(read_control(data), {data + kControl, data + size});
  return 0;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Changes the count in one of the headers a little, so that its sections have the wrong lengths; or
// a row of a Rice record, so that a chunk has.
static void nudge_count(uint8_t* message, size_t size, std::minstd_rand& random) {
  Header header;
  const uint8_t* message_end = message + size;
  if (size < sizeof header) return;
  std::memcpy(&header, message, sizeof header);
  if (random() % 2 != 0 && header.payload_bytes <= size &&
      header.payload_bytes + 2 * sizeof header <= size) {
    message += sizeof header + header.payload_bytes;
    std::memcpy(&header, message, sizeof header);
  }
  const uint64_t step = 1 + random() % 40;
  if (header.format == kFormatRice && random() % 4 != 0) {
    nudge_row(message + sizeof header, message_end, step, random);
    return;
  }
  header.nnz = random() % 2 != 0 || header.nnz < step ? header.nnz + step : header.nnz - step;
  std::memcpy(message, &header, sizeof header);
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  std::minstd_rand random(seed + 1);
  if (max_size < kControl) return size;
  for (; size < kControl; ++size) data[size] = 0;
  const auto options = static_cast<uint8_t>(random() >> 8);
  data[1] = static_cast<uint8_t>((options & ~kQuantised) | (data[1] & kQuantised));
  if (random() % 16 == 0) return size;  // a valid one, as it is
  if (random() % 4 == 0) {
    nudge_count(data + kControl, size - kControl, random);
    if (random() % 2 == 0) return size;
  }
  const size_t bytes = LLVMFuzzerMutate(data + kControl, size - kControl, max_size - kControl);
  return kControl + bytes;
}
