// The C functions through which Python drives an engine (cuda_ext/shared_memory.py). All of them
// may block briefly; `ms_shared_wait` blocks until something has ended.
#include <sys/mman.h>

#include <cerrno>
#include <exception>

#include "shared_engine.h"

using namespace megatron_sparse;

namespace {

struct Mapped {
  void* segment;
  int64_t bytes;
  Engine engine;
};

}  // namespace

#define MS_EXPORT extern "C" __attribute__((visibility("default")))

MS_EXPORT int64_t ms_shared_bytes(int ranks, int slots, int64_t slot_bytes) {
  return segment_bytes({ranks, slots, slot_bytes});
}

// Maps the memory of the descriptor, which may then be closed. Returns null, and sets `error`,
// where that fails. A forked child does not inherit the memory.
MS_EXPORT void* ms_shared_open(int descriptor, int ranks, int slots, int64_t slot_bytes, int rank,
                               int* error) {
  const Geometry geometry{ranks, slots, slot_bytes};
  const int64_t bytes = segment_bytes(geometry);
  void* segment = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (segment == MAP_FAILED) {
    *error = errno;
    return nullptr;
  }
  madvise(segment, bytes, MADV_DONTFORK);
  try {
    return new Mapped{segment, bytes, {segment, geometry, rank}};
  } catch (const std::exception&) {  // no memory, or no thread
    munmap(segment, bytes);
    *error = EAGAIN;
    return nullptr;
  }
}

MS_EXPORT void ms_shared_exchange(void* mapped, int64_t id, int64_t tag, const Message* messages,
                                  int count) {
  static_cast<Mapped*>(mapped)->engine.exchange(id, tag, messages, count);
}

MS_EXPORT void ms_shared_sum(void* mapped, int64_t id, const SumCall* call) {
  static_cast<Mapped*>(mapped)->engine.sum(id, *call);
}

MS_EXPORT void ms_shared_gather(void* mapped, int64_t id, const void* own, int64_t bytes,
                                void* gathered) {
  static_cast<Mapped*>(mapped)->engine.gather(id, own, bytes, gathered);
}

MS_EXPORT int ms_shared_wait(void* mapped, Completion* ended, int most) {
  return static_cast<Mapped*>(mapped)->engine.wait(ended, most);
}

MS_EXPORT void ms_shared_stop(void* mapped) {
  static_cast<Mapped*>(mapped)->engine.stop();
}

// After `ms_shared_stop`, when no other call is under way.
MS_EXPORT void ms_shared_free(void* mapped) {
  Mapped* made = static_cast<Mapped*>(mapped);
  munmap(made->segment, made->bytes);
  delete made;
}
