// NCCL's functions for ranks that are threads of one process, on host memory.
//
// Like NCCL, a group blocks until its messages have come; an abort ends the wait and leaves the
// buffers as they are. Unlike NCCL, everything is done when a group's end returns, and a message of
// a wrong length is an error instead of a hang.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Result { kSuccess = 0, kInternalError = 3, kInvalidArgument = 4 };

struct UniqueId {
  char internal[128];
};

struct World {
  std::mutex mutex;
  std::condition_variable change;
  int joined = 0;
  std::map<std::pair<int, int>, std::deque<std::vector<uint8_t>>> on_their_way;  // (from, to)
};

struct Communicator {
  std::shared_ptr<World> world;
  int rank;
  int ranks;
  bool aborted = false;  // these under the world's mutex
  int asynchronous_error = kSuccess;
  int refusal = kSuccess;  // what the next send returns
};

struct Operation {
  Communicator* communicator;
  bool sends;
  void* data;
  size_t bytes;
  int peer;
};

std::mutex worlds_mutex;
std::map<uint64_t, std::shared_ptr<World>> worlds;
uint64_t next_world = 1;
thread_local int depth = 0;
thread_local std::vector<Operation> group;

int run(const std::vector<Operation>& operations) {
  for (const Operation& each : operations) {
    if (!each.sends) continue;
    Communicator& own = *each.communicator;
    const std::lock_guard lock(own.world->mutex);
    const uint8_t* data = static_cast<const uint8_t*>(each.data);
    own.world->on_their_way[{own.rank, each.peer}].emplace_back(data, data + each.bytes);
    own.world->change.notify_all();
  }
  for (const Operation& each : operations) {
    if (each.sends) continue;
    Communicator& own = *each.communicator;
    std::unique_lock lock(own.world->mutex);
    auto& queue = own.world->on_their_way[{each.peer, own.rank}];
    own.world->change.wait(lock, [&] { return own.aborted || !queue.empty(); });
    if (own.aborted) return kSuccess;  // a kernel that was told to end
    if (queue.front().size() != each.bytes) {
      own.asynchronous_error = kInvalidArgument;
      own.world->change.wait(lock, [&] { return own.aborted; });
      return kSuccess;
    }
    std::copy(queue.front().begin(), queue.front().end(), static_cast<uint8_t*>(each.data));
    queue.pop_front();
  }
  return kSuccess;
}

int post(Operation operation) {
  if (operation.peer < 0 || operation.peer >= operation.communicator->ranks) {
    return kInvalidArgument;
  }
  if (depth > 0) {
    group.push_back(operation);
    return kSuccess;
  }
  return run({operation});
}

}  // namespace

EXPORT const char* ncclGetErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kInternalError:
      return "internal error";
    case kInvalidArgument:
      return "invalid argument";
    default:
      return "remote process exited or there was a network error";
  }
}

EXPORT int ncclGetUniqueId(UniqueId* id) {
  const std::lock_guard lock(worlds_mutex);
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, &next_world, sizeof next_world);
  worlds[next_world++] = std::make_shared<World>();
  return kSuccess;
}

EXPORT int ncclCommInitRank(Communicator** made, int ranks, UniqueId id, int rank) {
  uint64_t number = 0;
  std::memcpy(&number, id.internal, sizeof number);
  std::shared_ptr<World> world;
  {
    const std::lock_guard lock(worlds_mutex);
    const auto found = worlds.find(number);
    if (found == worlds.end()) return kInvalidArgument;
    world = found->second;
  }
  std::unique_lock lock(world->mutex);
  ++world->joined;
  world->change.notify_all();
  world->change.wait(lock, [&] { return world->joined >= ranks; });
  *made = new Communicator{world, rank, ranks};
  return kSuccess;
}

EXPORT int ncclGroupStart() {
  ++depth;
  return kSuccess;
}

EXPORT int ncclGroupEnd() {
  if (--depth > 0) return kSuccess;
  std::vector<Operation> operations;
  operations.swap(group);
  return run(operations);
}

EXPORT int ncclSend(const void* from, size_t count, int type, int peer, Communicator* communicator,
                    void*) {
  if (type != 1) return kInvalidArgument;  // bytes
  const int refusal = communicator->refusal;
  if (refusal != kSuccess) return refusal;
  return post({communicator, true, const_cast<void*>(from), count, peer});
}

EXPORT int ncclRecv(void* into, size_t count, int type, int peer, Communicator* communicator,
                    void*) {
  if (type != 1) return kInvalidArgument;
  return post({communicator, false, into, count, peer});
}

EXPORT int ncclCommGetAsyncError(Communicator* communicator, int* error) {
  const std::lock_guard lock(communicator->world->mutex);
  *error = communicator->asynchronous_error;
  return kSuccess;
}

// The memory stays, because another thread may be using it.
EXPORT int ncclCommAbort(Communicator* communicator) {
  const std::lock_guard lock(communicator->world->mutex);
  communicator->aborted = true;
  communicator->world->change.notify_all();
  return kSuccess;
}

EXPORT int ncclCommDestroy(Communicator* communicator) {
  delete communicator;
  return kSuccess;
}

// ---- for tests ----

// From now on NCCL reports an error; no waiting thread is woken.
EXPORT void fake_nccl_notice(Communicator* communicator, int error) {
  const std::lock_guard lock(communicator->world->mutex);
  communicator->asynchronous_error = error;
}

// From now on sends are refused.
EXPORT void fake_nccl_refuse(Communicator* communicator, int result) {
  communicator->refusal = result;
}

EXPORT int fake_nccl_is_aborted(Communicator* communicator) {
  const std::lock_guard lock(communicator->world->mutex);
  return communicator->aborted;
}
