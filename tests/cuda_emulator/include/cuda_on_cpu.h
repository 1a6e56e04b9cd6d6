// CUDA on the CPU: runs unmodified __global__ functions, to test them without a GPU.
//
// Every CUDA thread is a fiber (its own stack; switched with _setjmp, so no assembly and no system
// call). Warp collectives are real rendezvous of the lanes that their mask names, and barriers of
// the block's threads. A block runs on an operating-system thread of its own, so that thread_local
// serves as shared memory; several blocks are resident at once, but exactly one runs at a time and
// then passes control on, so that a schedule (order, seed) is reproducible.
//
// It detects: lanes that are not in their own mask, collectives and barriers that diverge, threads
// that exit while others wait, deadlocks, spins past a deadline, and, by trying several schedules,
// most missing barriers. Shared memory starts out poisoned. AddressSanitizer detects out-of-bounds
// accesses of global memory. Not modelled: the weak memory order of a GPU, shared-memory bounds,
// time.
//
// It counts what a thread queues: kernels, memsets, and, in a library built for it (traffic.cpp),
// the bytes that kernels move.
//
// A spin must call __nanosleep, or no other thread ever runs. Dynamic shared memory, declared in a
// kernel as `extern __shared__ T name[];`, is defined by the test with
// CUDA_EMULATOR_DYNAMIC_SHARED.
#pragma once

#include <link.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <source_location>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __grid_constant__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // in a function it is static, too
#define CUDA_EMULATOR_DYNAMIC_SHARED(type, name, count) thread_local type name[count]

// Of a launch: grids have two dimensions here, blocks one.
struct dim3 {
  unsigned x, y;
  constexpr dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace cuda_emulator {

using Where = std::source_location;

struct Error : std::runtime_error {
  using runtime_error::runtime_error;
};

enum class Schedule { kInOrder, kReversed, kRandom };

struct Options {
  Schedule schedule = Schedule::kInOrder;
  uint64_t seed = 0;
  unsigned resident_blocks = 4;
  double deadline_s = 30;
  int multiprocessors = 2;  // what cudaDeviceGetAttribute answers
};
inline Options options;

// What the calling thread has queued since `counted` was set.
struct Work {
  int64_t kernels = 0;
  int64_t blocks = 0;  // of all kernels
  int64_t memsets = 0;
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
};
inline thread_local Work work;
inline thread_local bool counted = false;

#ifdef CUDA_EMULATOR_TRAFFIC
extern "C" void traffic_begin(bool counted);
extern "C" void traffic_end(int64_t* read, int64_t* written);

// While it lives, a launch's accesses are counted, and other threads wait with theirs.
class Traffic {
 public:
  Traffic() { traffic_begin(counted); }
  ~Traffic() { traffic_end(&work.bytes_read, &work.bytes_written); }
};
#else
class Traffic {};
#endif

enum class Op {
  kNone,
  kBallot,
  kAdd,
  kMin,
  kMax,
  kShuffle,
  kShuffleUp,
  kShuffleXor,
  kSyncWarp,
  kSyncBlock
};

inline const char* name_of(Op op) {
  static const char* const names[] = {"nothing",           "__ballot_sync",     "__reduce_add_sync",
                                      "__reduce_min_sync", "__reduce_max_sync", "__shfl_sync",
                                      "__shfl_up_sync",    "__shfl_xor_sync",   "__syncwarp",
                                      "__syncthreads"};
  return names[static_cast<int>(op)];
}

// The operation that a thread waits for.
struct Wait {
  Op op = Op::kNone;
  unsigned mask = 0;
  uint64_t value = 0;
  int argument = 0;
  int width = 32;
  Where where;
};

struct Fiber {
  unsigned thread = 0;
  bool started = false;
  bool done = false;
  Wait wait;
  uint64_t result = 0;
  ucontext_t birth;
  jmp_buf resume;
};

constexpr size_t kStackBytes = size_t{64} << 10;

class Launch;

// One resident block and the operating-system thread it runs on.
struct Worker {
  Launch* launch = nullptr;
  unsigned number = 0;
  std::vector<Fiber> fibers;
  std::unique_ptr<char[]> stacks;
  std::vector<unsigned> ready;
  std::vector<unsigned> spinning;
  std::vector<unsigned> arrived;  // lanes of each warp that wait in a collective
  unsigned at_barrier = 0;
  unsigned exited = 0;
  unsigned running = 0;
  bool hand_over = false;
  std::mt19937_64 random;
  unsigned starved_warp = 0;
  std::exception_ptr failure;
  jmp_buf scheduler;
};

inline thread_local Worker* worker = nullptr;

}  // namespace cuda_emulator

// What kernels see; those of the thread and the block that run.
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_emulator {

inline Fiber& fiber() {
  return worker->fibers[worker->running];
}

class Launch {
 public:
  Launch(dim3 grid, dim3 block, std::function<void()> body)
      : grid_(grid), block_(block), body_(std::move(body)), random_(options.seed) {
    threads_ = block.x;
    const unsigned blocks = grid.x * grid.y;
    for (unsigned b = 0; b < blocks; ++b) {
      waiting_.push_back(options.schedule == Schedule::kReversed ? b : blocks - 1 - b);
    }
    if (options.schedule == Schedule::kRandom) {
      std::shuffle(waiting_.begin(), waiting_.end(), random_);
    }
    deadline_ = std::chrono::steady_clock::now() +
                std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                    std::chrono::duration<double>(options.deadline_s));
  }

  void run() {
    if (threads_ == 0 || threads_ > 1024) throw Error("a block has 1 to 1024 threads");
    const unsigned count =
        std::min<unsigned>(std::max(options.resident_blocks, 1u), unsigned(waiting_.size()));
    for (unsigned i = 0; i < count; ++i) live_.push_back(i);
    current_ = count == 0 ? 0 : next_worker(count);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < count; ++i) threads.emplace_back([this, i] { work(i); });
    for (std::thread& thread : threads) thread.join();
    if (failure_) std::rethrow_exception(failure_);
  }

  // Lets another resident block run; returns when it is this one's turn again.
  void pass(unsigned number) {
    std::unique_lock lock(mutex_);
    current_ = next_worker(number);
    if (current_ == number) return;
    changed_.notify_all();
    changed_.wait(lock, [&] { return current_ == number || failure_; });
  }

  void check_deadline() const {
    if (std::chrono::steady_clock::now() > deadline_) {
      throw Error("deadline: the kernel did not end in time, some thread spins");
    }
  }

  bool failed() const { return failure_ != nullptr; }

 private:
  unsigned next_worker(unsigned number) {
    if (options.schedule == Schedule::kRandom) return live_[random_() % live_.size()];
    // The next or, in the reversed schedule, the one before.
    const auto place = std::lower_bound(live_.begin(), live_.end(), number) - live_.begin();
    const size_t size = live_.size(), at = size_t(place);
    const bool here = at < size && live_[at] == number;
    if (options.schedule == Schedule::kReversed) return live_[(at + size - 1) % size];
    return live_[(at + (here ? 1 : 0)) % size];
  }

  void work(unsigned number);
  void run_block(Worker& self);

  dim3 grid_, block_;
  unsigned threads_ = 0;
  std::function<void()> body_;
  std::vector<unsigned> waiting_;  // blocks that did not start, the next one last
  std::vector<unsigned> live_;     // workers that have not ended, ascending
  unsigned current_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr failure_;
  std::mt19937_64 random_;
  std::chrono::steady_clock::time_point deadline_;

  friend void fiber_main();
};

// ---- fibers ----

inline void leave_fiber() {
  if (_setjmp(fiber().resume) == 0) _longjmp(worker->scheduler, 1);
}

inline void fiber_main() {
  try {
    worker->launch->body_();
  } catch (...) {
    worker->failure = std::current_exception();
  }
  fiber().done = true;
  _longjmp(worker->scheduler, 1);
}

inline void enter_fiber(unsigned thread) {
  worker->running = threadIdx.x = thread;
  Fiber& f = fiber();
  if (_setjmp(worker->scheduler) != 0) return;
  if (f.started) _longjmp(f.resume, 1);
  f.started = true;
  setcontext(&f.birth);
}

// Lets other threads of the block run, and perhaps other blocks, before this one continues.
inline void yield_thread(bool spin) {
  (spin ? worker->spinning : worker->ready).push_back(worker->running);
  leave_fiber();
}

// Blocks interact through atomics and fences, so random schedules interrupt there.
inline void meeting_point() {
  if (options.schedule != Schedule::kRandom || worker->random() % 4 != 0) return;
  worker->hand_over = true;
  yield_thread(false);
}

// ---- rendezvous ----

inline std::string describe(const Fiber& f) {
  return "thread " + std::to_string(f.thread) + " of block " + std::to_string(blockIdx.x) + " in " +
         name_of(f.wait.op) + " at line " + std::to_string(f.wait.where.line());
}

inline uint64_t lane_result(Fiber* lanes, unsigned mask, unsigned lane) {
  const Wait& wait = lanes[lane].wait;
  const int width = wait.width, base = int(lane) / width * width;
  int source = int(lane);
  const auto over_lanes = [&](uint64_t result, auto combine) {
    for (unsigned j = 0; j < 32; ++j) {
      if (mask >> j & 1) result = combine(result, lanes[j].wait.value, j);
    }
    return result;
  };
  switch (wait.op) {
    case Op::kBallot:
      return over_lanes(
          0, [](auto bits, auto value, unsigned j) { return bits | uint64_t(value != 0) << j; });
    case Op::kAdd:
      return over_lanes(0, [](auto sum, auto value, unsigned) { return uint32_t(sum + value); });
    case Op::kMin:
      return over_lanes(~0u, [](auto low, auto value, unsigned) { return std::min(low, value); });
    case Op::kMax:
      return over_lanes(0, [](auto high, auto value, unsigned) { return std::max(high, value); });
    case Op::kShuffle:
      source = base + (wait.argument & (width - 1));
      break;
    case Op::kShuffleUp:
      source -= wait.argument;
      if (source < base) source = int(lane);
      break;
    case Op::kShuffleXor:
      source ^= wait.argument;
      if (source >= base + width) source = int(lane);
      break;
    default:
      return 0;
  }
  // Undefined on a GPU: poison.
  return mask >> source & 1 ? lanes[source].wait.value : 0xdeadbeefdeadbeefull;
}

inline uint64_t warp_collective(Op op, unsigned mask, uint64_t value, int argument, int width,
                                Where where) {
  Fiber& me = fiber();
  const unsigned lane = me.thread % 32, warp = me.thread / 32, first = warp * 32;
  const unsigned existing = unsigned(worker->fibers.size()) - first;
  if (existing < 32) mask &= (1u << existing) - 1;
  me.wait = {op, mask, value, argument, width, where};
  if (!(mask >> lane & 1))
    throw Error("wrong mask: it leaves out the calling lane; " + describe(me));
  Fiber* lanes = &worker->fibers[first];
  worker->arrived[warp] |= 1u << lane;
  for (unsigned j = 0; j < 32; ++j) {
    if ((mask >> j & 1) && lanes[j].done) {
      throw Error("wrong mask: it names a lane that has exited; " + describe(me));
    }
  }
  if ((worker->arrived[warp] & mask) != mask) {
    leave_fiber();
    return me.result;
  }
  uint64_t results[32];
  for (unsigned j = 0; j < 32; ++j) {
    if (!(mask >> j & 1)) continue;
    const Wait& other = lanes[j].wait;
    if (other.op != op || other.mask != mask || other.where.line() != where.line()) {
      throw Error("divergent collective: " + describe(me) + ", but " + describe(lanes[j]));
    }
    results[j] = lane_result(lanes, mask, j);
  }
  for (unsigned j = 0; j < 32; ++j) {
    if (!(mask >> j & 1)) continue;
    lanes[j].result = results[j];
    lanes[j].wait.op = Op::kNone;
    if (j != lane) worker->ready.push_back(first + j);
  }
  worker->arrived[warp] &= ~mask;
  if (options.schedule == Schedule::kRandom) yield_thread(false);
  return me.result;
}

inline void check_barrier() {
  if (worker->at_barrier == 0 || worker->exited == 0) return;
  for (const Fiber& f : worker->fibers) {
    if (!f.done && f.wait.op == Op::kSyncBlock) {
      throw Error("divergent barrier: a thread has exited while others wait; " + describe(f));
    }
  }
}

// The sum of all threads' values.
inline unsigned block_collective(unsigned value, Where where) {
  Fiber& me = fiber();
  me.wait = {Op::kSyncBlock, 0, value, 0, 32, where};
  ++worker->at_barrier;
  check_barrier();
  if (worker->at_barrier < worker->fibers.size()) {
    leave_fiber();
    return unsigned(me.result);
  }
  unsigned sum = 0;
  for (const Fiber& f : worker->fibers) {
    if (f.wait.where.line() != where.line()) {
      throw Error("divergent barrier: " + describe(me) + ", but " + describe(f));
    }
    sum += unsigned(f.wait.value);
  }
  worker->at_barrier = 0;
  for (Fiber& f : worker->fibers) {
    f.result = sum;
    f.wait.op = Op::kNone;
    if (f.thread != me.thread) worker->ready.push_back(f.thread);
  }
  if (options.schedule != Schedule::kInOrder) yield_thread(false);
  return sum;
}

// ---- scheduling ----

// Poisons this library's thread-local variables: shared memory, and what the caller sets anew.
inline void poison_shared_memory() {
  Worker* const kept = worker;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void*) {
        bool ours = false;
        const auto here = reinterpret_cast<uintptr_t>(&poison_shared_memory);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
          ours |= header.p_type == PT_LOAD && here >= begin && here < begin + header.p_memsz;
        }
        for (int i = 0; ours && i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type == PT_TLS && info->dlpi_tls_data != nullptr) {
            std::memset(info->dlpi_tls_data, 0xcd, header.p_memsz);
          }
        }
        return 0;
      },
      nullptr);
  worker = kept;
}

inline unsigned take_ready(Worker& self) {
  auto& ready = self.ready;
  size_t at = 0;
  if (options.schedule == Schedule::kReversed) {
    at = ready.size() - 1;
  } else if (options.schedule == Schedule::kRandom) {
    // One warp lags behind the others, which run in any order.
    at = self.random() % ready.size();
    if (ready[at] / 32 == self.starved_warp) at = self.random() % ready.size();
    std::swap(ready[at], ready.back());
    at = ready.size() - 1;
  }
  const unsigned thread = ready[at];
  ready.erase(ready.begin() + std::ptrdiff_t(at));
  return thread;
}

inline std::string describe_waiting() {
  std::string text;
  unsigned listed = 0;
  for (const Fiber& f : worker->fibers) {
    if (!f.done && listed++ < 4) text += "; " + describe(f);
  }
  return text;
}

inline void Launch::run_block(Worker& self) {
  for (unsigned t = 0; t < threads_; ++t) {
    Fiber& f = self.fibers[t];
    f.thread = t;
    f.started = f.done = false;
    f.wait = {};
    getcontext(&f.birth);
    f.birth.uc_stack.ss_sp = &self.stacks[t * kStackBytes];
    f.birth.uc_stack.ss_size = kStackBytes;
    f.birth.uc_link = nullptr;
    makecontext(&f.birth, fiber_main, 0);
    self.ready.push_back(t);
  }
  std::fill(self.arrived.begin(), self.arrived.end(), 0u);
  self.at_barrier = self.exited = 0;
  self.starved_warp = unsigned(self.random() % ((threads_ + 31) / 32));
  while (self.exited < threads_) {
    if (failed()) return;
    if (self.ready.empty()) {
      if (self.spinning.empty()) throw Error("deadlock" + describe_waiting());
      self.ready.swap(self.spinning);
      check_deadline();
      pass(self.number);
      continue;
    }
    const unsigned thread = take_ready(self);
    enter_fiber(thread);
    if (self.failure) std::rethrow_exception(self.failure);
    if (self.fibers[thread].done) {
      ++self.exited;
      check_barrier();
    }
    if (self.hand_over) {
      self.hand_over = false;
      check_deadline();
      pass(self.number);
    }
  }
}

inline void Launch::work(unsigned number) {
  Worker self;
  worker = &self;
  poison_shared_memory();
  blockDim = block_;
  gridDim = grid_;
  self.launch = this;
  self.number = number;
  self.fibers.resize(threads_);
  self.stacks.reset(new char[threads_ * kStackBytes]);
  self.arrived.resize((threads_ + 31) / 32);
  self.random.seed(options.seed * 1000003 + number);
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return current_ == number || failure_; });
  }
  std::exception_ptr failure;
  try {
    while (!failed() && !waiting_.empty()) {
      const unsigned block = waiting_.back();
      waiting_.pop_back();
      blockIdx = dim3(block % grid_.x, block / grid_.x);
      run_block(self);
      if (options.schedule == Schedule::kRandom) pass(number);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  std::unique_lock lock(mutex_);
  if (failure && !failure_) failure_ = failure;
  live_.erase(std::find(live_.begin(), live_.end(), number));
  if (!live_.empty()) current_ = next_worker(number);
  changed_.notify_all();
}

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace cuda_emulator

// ---- what kernels see ----

inline void __syncthreads(cuda_emulator::Where where = cuda_emulator::Where::current()) {
  cuda_emulator::block_collective(0, where);
}
inline int __syncthreads_or(int predicate,
                            cuda_emulator::Where where = cuda_emulator::Where::current()) {
  return cuda_emulator::block_collective(predicate != 0, where) != 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       cuda_emulator::Where where = cuda_emulator::Where::current()) {
  cuda_emulator::warp_collective(cuda_emulator::Op::kSyncWarp, mask, 0, 0, 32, where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate,
                              cuda_emulator::Where where = cuda_emulator::Where::current()) {
  return unsigned(cuda_emulator::warp_collective(cuda_emulator::Op::kBallot, mask, predicate != 0,
                                                 0, 32, where));
}
inline int __any_sync(unsigned mask, int predicate,
                      cuda_emulator::Where where = cuda_emulator::Where::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      cuda_emulator::Where where = cuda_emulator::Where::current()) {
  return __ballot_sync(mask, !predicate, where) == 0;
}
#define CUDA_EMULATOR_SHUFFLE(name, op, type)                                                      \
  template <class T>                                                                               \
  T name(unsigned mask, T value, type argument, int width = 32,                                    \
         cuda_emulator::Where where = cuda_emulator::Where::current()) {                           \
    return cuda_emulator::from_bits<T>(cuda_emulator::warp_collective(                             \
        cuda_emulator::Op::op, mask, cuda_emulator::to_bits(value), int(argument), width, where)); \
  }
CUDA_EMULATOR_SHUFFLE(__shfl_sync, kShuffle, int)
CUDA_EMULATOR_SHUFFLE(__shfl_up_sync, kShuffleUp, unsigned)
CUDA_EMULATOR_SHUFFLE(__shfl_xor_sync, kShuffleXor, int)
#undef CUDA_EMULATOR_SHUFFLE

#define CUDA_EMULATOR_REDUCE(name, op)                                                     \
  inline unsigned name(unsigned mask, unsigned value,                                      \
                       cuda_emulator::Where where = cuda_emulator::Where::current()) {     \
    return unsigned(                                                                       \
        cuda_emulator::warp_collective(cuda_emulator::Op::op, mask, value, 0, 32, where)); \
  }
CUDA_EMULATOR_REDUCE(__reduce_add_sync, kAdd)
CUDA_EMULATOR_REDUCE(__reduce_min_sync, kMin)
CUDA_EMULATOR_REDUCE(__reduce_max_sync, kMax)
#undef CUDA_EMULATOR_REDUCE

#define CUDA_EMULATOR_ATOMIC(name, expression)        \
  template <class T>                                  \
  T name(T* address, std::type_identity_t<T> value) { \
    cuda_emulator::meeting_point();                   \
    const T old = *address;                           \
    *address = (expression);                          \
    return old;                                       \
  }
CUDA_EMULATOR_ATOMIC(atomicAdd, old + value)
CUDA_EMULATOR_ATOMIC(atomicMin, std::min(old, value))
CUDA_EMULATOR_ATOMIC(atomicMax, std::max(old, value))
CUDA_EMULATOR_ATOMIC(atomicOr, old | value)
CUDA_EMULATOR_ATOMIC(atomicExch, value)
#undef CUDA_EMULATOR_ATOMIC
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  cuda_emulator::meeting_point();
  const T old = *address;
  if (old == expected) *address = value;
  cuda_emulator::meeting_point();  // others see the claim before what the claimant writes next
  return old;
}

inline void __threadfence() {
  cuda_emulator::meeting_point();
}
inline void __nanosleep(unsigned) {
  cuda_emulator::yield_thread(true);
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = uint64_t{high} << 32 | low;
  return unsigned(both << (shift & 31) >> 32);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned(uint64_t{a} * b >> 32);
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
  return std::popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
template <class T>
void __stwb(T* to, T value) {
  *to = value;
}
// Byte i is byte `selector >> 4 i & 7` of y:x; the selector has no sign bits.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}
inline int __clz(int x) {
  return std::countl_zero(unsigned(x));
}
inline unsigned __vadd2(unsigned a, unsigned b) {
  return ((a & 0xffff0000u) + (b & 0xffff0000u)) | ((a + b) & 0xffffu);
}
inline unsigned __vsub2(unsigned a, unsigned b) {
  return ((a & 0xffff0000u) - (b & 0xffff0000u)) | ((a - b) & 0xffffu);
}
template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

// ---- what launchers see ----

using cudaStream_t = void*;
using cudaEvent_t = void*;  // where its time is written
enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}

// Runs the kernel to its end; throws cuda_emulator::Error.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> copies(std::forward<Arguments>(arguments)...);
  cuda_emulator::Launch launch(config->gridDim, config->blockDim,
                               [&] { std::apply(kernel, copies); });
  ++cuda_emulator::work.kernels;
  cuda_emulator::work.blocks += config->gridDim.x * config->gridDim.y;
  [[maybe_unused]] const cuda_emulator::Traffic traffic;
  launch.run();
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
  ++cuda_emulator::work.memsets;
  cuda_emulator::work.bytes_written += static_cast<int64_t>(bytes);
  std::memset(pointer, value, bytes);
  return cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyDeviceToHost = 2 };
inline cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
// Everything queued before has been done.
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  *static_cast<int64_t*>(event) = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = cuda_emulator::options.multiprocessors;
  return cudaSuccess;
}
