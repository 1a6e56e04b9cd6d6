// Replaces libFuzzer for fuzz_decode.cpp if only g++ is installed: a loop guided by coverage.
//
//   fuzz INPUTS ARTIFACTS SECONDS
//
// Runs every file of the folder INPUTS first, then mutates: inputs that reach a new edge of the
// control flow (-fsanitize-coverage=trace-pc) are kept and mutated further. An input that a
// sanitizer reports, or that takes longer than kTimeout_s, is written to the folder ARTIFACTS
// before the process ends. Deterministic except for the number of inputs. This file must not itself
// be compiled for coverage.
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed);

namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;
constexpr size_t kKept = 4096;  // inputs
constexpr size_t kEdges = size_t{1} << 16;
constexpr unsigned kTimeout_s = 20;

uint8_t seen[kEdges];
bool found_edge = false;
uintptr_t previous = 0;

std::vector<uint8_t> input;
std::string artifacts;

void keep_input() {
  uint64_t name = 0xcbf29ce484222325u;
  for (const uint8_t byte : input) name = (name ^ byte) * 0x100000001b3u;
  char path[4096];
  std::snprintf(path, sizeof path, "%s/crash-%016llx", artifacts.c_str(),
                static_cast<unsigned long long>(name));
  if (std::FILE* file = std::fopen(path, "wb")) {
    std::fwrite(input.data(), 1, input.size(), file);
    std::fclose(file);
  }
  std::fprintf(stderr, "fuzz: 1 crash; its input is %s\n", path);
}

void on_signal(int number) {
  std::fprintf(stderr, number == SIGALRM ? "fuzz: an input takes too long\n" : "fuzz: aborted\n");
  keep_input();
  _exit(1);
}

void run(const std::vector<uint8_t>& bytes) {
  input = bytes;
  previous = 0;
  found_edge = false;
  alarm(kTimeout_s);
  LLVMFuzzerTestOneInput(input.data(), input.size());
  alarm(0);
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const uintptr_t here = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& edge = seen[((here ^ previous) * 0x9e3779b97f4a7c15u) >> 48];
  found_edge |= edge == 0;
  edge = 1;
  previous = here >> 1;
}

// A few damaged bytes or a cut.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t) {
  static std::minstd_rand random(99);
  const size_t times = 1 + random() % 4;
  for (size_t i = 0; i < times && size > 0; ++i) {
    // The headers and the first sections are where most decisions are taken.
    const size_t at = random() % (random() % 2 ? size : std::min<size_t>(size, 160));
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

int main(int count, char** arguments) {
  using Clock = std::chrono::steady_clock;
  namespace fs = std::filesystem;
  if (count != 4) return 2;
  artifacts = arguments[2];
  const double seconds = std::atof(arguments[3]);
  __sanitizer_set_death_callback(keep_input);
  signal(SIGALRM, on_signal);
  signal(SIGABRT, on_signal);
  LLVMFuzzerInitialize(&count, &arguments);

  std::vector<std::vector<uint8_t>> kept;
  const fs::directory_iterator folder(arguments[1]);
  const std::set<fs::path> files(begin(folder), end(folder));
  for (const fs::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    kept.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    run(kept.back());
  }
  const size_t replayed = kept.size();
  std::minstd_rand random(1);
  std::vector<uint8_t> room(kMaxBytes);
  const auto start = Clock::now();
  const auto elapsed_s = [&] {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  for (unsigned seed = 0; elapsed_s() < seconds; ++seed) {
    const std::vector<uint8_t>& from = kept[random() % kept.size()];
    std::copy(from.begin(), from.end(), room.begin());
    const size_t size = LLVMFuzzerCustomMutator(room.data(), from.size(), room.size(), seed);
    run({room.begin(), room.begin() + static_cast<int64_t>(size)});
    if (!found_edge) continue;
    if (kept.size() < kKept) {
      kept.push_back(input);
    } else {
      kept[random() % kKept] = input;
    }
  }
  std::printf("fuzz: %zu inputs given, %zu kept for %zu edges, %.0f s\n", replayed, kept.size(),
              static_cast<size_t>(std::count(seen, seen + kEdges, 1)), elapsed_s());
  return 0;
}
