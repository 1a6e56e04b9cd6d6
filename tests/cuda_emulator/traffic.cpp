// Counts the memory sectors that emulated kernels read and write.
//
// The emulator's library is compiled with -fsanitize=thread, which makes the compiler announce
// every load and store by a call of `__tsan_*`. It is linked without the sanitizer: these functions
// are here. This file itself is compiled without the option.
//
// A sector is 32 bytes, the least that a GPU moves from or to its memory. A launch counts each
// sector of a watched buffer once as read and once as written, however often it is accessed: what
// moves if nothing stays in a cache between launches, and everything within one.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr uintptr_t kSector = 32;

struct Watched {
  uintptr_t begin = 0, end = 0;
  std::vector<uint8_t> touched;  // of each sector: bit 0 read, bit 1 written
};

constexpr int kMostBuffers = 64;
Watched watched[kMostBuffers];
volatile int watched_count = 0;
volatile bool counts = false;
std::mutex launching;  // ranks are threads: one kernel at a time, so that only one is counted

void touch(const void* address, size_t bytes, uint8_t how) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(address);
  for (int i = 0; i < watched_count; ++i) {
    Watched& w = watched[i];
    if (from < w.begin || from >= w.end) continue;
    const uintptr_t first = w.begin / kSector;
    for (uintptr_t s = from / kSector; s <= (from + bytes - 1) / kSector; ++s) {
      if (s - first < w.touched.size()) w.touched[s - first] |= how;
    }
    return;
  }
}

void touched(const void* address, size_t bytes, uint8_t how) {
  if (counts) touch(address, bytes, how);
}

}  // namespace

// A buffer of device memory that the next launches of this thread use.
EXPORT void emulator_watch(const void* begin, size_t bytes) {
  if (watched_count == kMostBuffers) abort();
  if (bytes == 0) return;
  Watched& w = watched[watched_count];
  w.begin = reinterpret_cast<uintptr_t>(begin);
  w.end = w.begin + bytes;
  w.touched.assign((w.end - 1) / kSector - w.begin / kSector + 1, 0);
  watched_count = watched_count + 1;
}

EXPORT void emulator_unwatch() {
  watched_count = 0;
}

// Called by the emulator around every launch.
EXPORT void traffic_begin(bool counted) {
  launching.lock();
  counts = counted;
}

EXPORT void traffic_end(int64_t* read, int64_t* written) {
  for (int i = 0; counts && i < watched_count; ++i) {
    for (uint8_t& how : watched[i].touched) {
      *read += (how & 1) * kSector;
      *written += (how >> 1) * kSector;
      how = 0;
    }
  }
  counts = false;
  launching.unlock();
}

#define ACCESS(bytes)                                            \
  extern "C" void __tsan_read##bytes(void* address) {            \
    touched(address, bytes, 1);                                  \
  }                                                              \
  extern "C" void __tsan_write##bytes(void* address) {           \
    touched(address, bytes, 2);                                  \
  }                                                              \
  extern "C" void __tsan_unaligned_read##bytes(void* address) {  \
    touched(address, bytes, 1);                                  \
  }                                                              \
  extern "C" void __tsan_unaligned_write##bytes(void* address) { \
    touched(address, bytes, 2);                                  \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
extern "C" void __tsan_read_range(void* address, size_t bytes) {
  touched(address, bytes, 1);
}
extern "C" void __tsan_write_range(void* address, size_t bytes) {
  touched(address, bytes, 2);
}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void __tsan_init() {}
