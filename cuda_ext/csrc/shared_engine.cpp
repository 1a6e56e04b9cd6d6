#include "shared_engine.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "shared_sum.h"

namespace megatron_sparse {
namespace {

enum Lane : int { kPairwise = 0, kCollective = 1 };
constexpr int64_t kCollectiveTag = 0;
// A rank whose peer is about to answer looks again this often before it sleeps, and lets other
// processes run in between: there may be fewer cores than ranks.
constexpr int kYields = 8;
constexpr timespec kLongestSleep = {1, 0};

auto relaxed(const std::atomic<uint64_t>& own) {
  return own.load(std::memory_order_relaxed);
}
auto acquired(const std::atomic<uint64_t>& of_peer) {
  return of_peer.load(std::memory_order_acquire);
}
void publish(std::atomic<uint64_t>& own, uint64_t value) {
  own.store(value, std::memory_order_release);
}

// Not the private kind of futex: other processes wake it.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

Engine::Engine(void* segment, const Geometry& geometry, int rank)
    : bells_(static_cast<Bell*>(segment)),
      geometry_(geometry),
      rank_(rank),
      channels_(geometry.ranks * kLanes) {
  for (int peer = 0; peer < geometry.ranks; ++peer) {
    if (peer == rank) continue;
    for (int lane = 0; lane < kLanes; ++lane) {
      channel(peer, lane).out = RingView(segment, geometry, rank, peer, lane);
      channel(peer, lane).in = RingView(segment, geometry, peer, rank, lane);
    }
  }
  thread_ = std::thread([this] { main(); });
}

void Engine::exchange(int64_t id, int64_t tag, const Message* messages, int count) {
  Posted posted{std::make_shared<Operation>(Operation{id}), kPairwise, {}, {}};
  for (int i = 0; i < count; ++i) {
    const Message& message = messages[i];
    char* data = static_cast<char*>(message.data);
    if (message.is_receive) {
      posted.receives.push_back({posted.operation, message.peer, tag, data, message.bytes});
    } else {
      posted.sends.push_back({posted.operation, message.peer, tag, data, message.bytes});
    }
  }
  posted.operation->open = count;
  post(std::move(posted));
}

void Engine::sum(int64_t id, const SumCall& call) {
  Posted posted{std::make_shared<Operation>(Operation{id}), kCollective, {}, {}};
  const int n = geometry_.ranks;
  const int64_t size = sum_dtype_bytes(call.dtype);
  const auto begin = [&](int shard) {
    return call.numel / n * shard + std::min<int64_t>(shard, call.numel % n);
  };
  const auto bytes = [&](int shard) { return (begin(shard + 1) - begin(shard)) * size; };
  const char* values = static_cast<const char*>(call.values);
  char* out = static_cast<char*>(call.out);
  const auto& operation = posted.operation;
  if (bytes(rank_) > 0) {
    posted.sum = std::make_shared<Sum>(Sum{operation, values + begin(rank_) * size,
                                           call.scatter ? out : out + begin(rank_) * size,
                                           bytes(rank_), call.dtype, call.divisor});
    operation->open = 1;
  }
  // First the shards, then the sums: the order in which the lane carries them.
  for (const bool sums : {false, true}) {
    if (sums && call.scatter) break;
    for (int step = 1; step < n; ++step) {
      const int to = (rank_ + step) % n, from = (rank_ + n - step) % n;
      const int sent = sums ? rank_ : to, received = sums ? from : rank_;
      if (bytes(sent) > 0) {
        const char* data = sums ? posted.sum->out : values + begin(to) * size;
        posted.sends.push_back(
            {operation, to, kCollectiveTag, data, bytes(sent), sums ? posted.sum : nullptr});
      }
      if (bytes(received) > 0) {
        char* data = sums ? out + begin(from) * size : nullptr;
        posted.receives.push_back(
            {operation, from, kCollectiveTag, data, bytes(received), sums ? nullptr : posted.sum});
        operation->open += sums;
      }
    }
  }
  operation->open += static_cast<int>(posted.sends.size());
  post(std::move(posted));
}

void Engine::gather(int64_t id, const void* own, int64_t bytes, void* gathered) {
  Posted posted{std::make_shared<Operation>(Operation{id}), kCollective, {}, {}};
  char* out = static_cast<char*>(gathered);
  for (int step = 1; step < geometry_.ranks; ++step) {
    const int to = (rank_ + step) % geometry_.ranks;
    const int from = (rank_ + geometry_.ranks - step) % geometry_.ranks;
    posted.sends.push_back(
        {posted.operation, to, kCollectiveTag, static_cast<const char*>(own), bytes});
    posted.receives.push_back({posted.operation, from, kCollectiveTag, out + from * bytes, bytes});
  }
  posted.operation->open = static_cast<int>(posted.sends.size() + posted.receives.size());
  posted.copied = own;
  posted.copy = out + rank_ * bytes;
  posted.copied_bytes = bytes;
  post(std::move(posted));
}

void Engine::post(Posted posted) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (stopped_) return;
    posted_.push_back(std::move(posted));
  }
  ring(rank_);
}

int Engine::wait(Completion* ended, int most) {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [this] { return stopped_ || !completions_.empty(); });
  if (stopped_) return -1;
  const int count = static_cast<int>(std::min<size_t>(most, completions_.size()));
  std::copy_n(completions_.begin(), count, ended);
  completions_.erase(completions_.begin(), completions_.begin() + count);
  return count;
}

void Engine::stop() {
  stopping_.store(true);
  ring(rank_);
  thread_.join();
  const std::lock_guard<std::mutex> guard(mutex_);
  stopped_ = true;
  ended_.notify_all();
}

void Engine::main() {
  int idle = 0;
  while (!stopping_.load(std::memory_order_relaxed)) {
    if (pass()) {
      idle = 0;
    } else if (open_ > 0 && idle < kYields) {
      ++idle;
      sched_yield();
    } else {
      sleep();
    }
  }
}

// Whoever rings after the bell was read keeps the futex from sleeping; whoever rang before had
// published what the pass then finds.
void Engine::sleep() {
  Bell& own = bells_[rank_];
  own.asleep.store(1);
  const uint32_t rings = own.rings.load();
  if (!pass() && !stopping_.load()) futex(own.rings, FUTEX_WAIT, rings, &kLongestSleep);
  own.asleep.store(0);
}

void Engine::ring(int peer) {
  Bell& bell = bells_[peer];
  bell.rings.fetch_add(1);
  if (bell.asleep.load() != 0) futex(bell.rings, FUTEX_WAKE, 1, nullptr);
}

bool Engine::pass() {
  bool moved = route();
  for (int step = 1; step < geometry_.ranks; ++step) {
    const int to = (rank_ + step) % geometry_.ranks;
    const int from = (rank_ + geometry_.ranks - step) % geometry_.ranks;
    for (int lane = 0; lane < kLanes; ++lane) {
      moved |= grant(channel(from, lane), from);
      moved |= take_grants(channel(to, lane));
      moved |= push(channel(to, lane), to);
      moved |= drain(channel(from, lane), from);
    }
  }
  return add() || moved;
}

bool Engine::route() {
  std::vector<Posted> posted;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    posted.swap(posted_);
  }
  for (Posted& one : posted) {
    ++open_;
    for (Receive& receive : one.receives) {
      channel(receive.peer, one.lane).ungranted.push_back(std::move(receive));
    }
    for (Send& send : one.sends) {
      Channel& to = channel(send.peer, one.lane);
      const auto granted = to.grants.find(send.tag);
      if (granted == to.grants.end()) {
        to.sends[send.tag].push_back(std::move(send));
        continue;
      }
      const NumberedGrant first = granted->second.front();
      granted->second.pop_front();
      if (granted->second.empty()) to.grants.erase(granted);
      match(to, std::move(send), first);
    }
    if (one.sum) sums_.push_back(std::move(one.sum));
    if (one.copied != one.copy) std::memcpy(one.copy, one.copied, one.copied_bytes);
    if (one.operation->open == 0) {
      one.operation->open = 1;
      finish(one.operation);
    }
  }
  return !posted.empty();
}

void Engine::match(Channel& channel, Send send, NumberedGrant grant) {
  send.message = grant.message;
  if (grant.bytes != send.bytes) {
    send.misfit = true;
    fail(send.operation, send.peer, grant.bytes, send.bytes);
  }
  channel.active.push_back(std::move(send));
}

bool Engine::grant(Channel& channel, int peer) {
  if (channel.ungranted.empty()) return false;
  Ring& ring = *channel.in.ring;
  uint64_t next = relaxed(ring.granted);
  const uint64_t room = acquired(ring.taken) + kGrants;
  if (next == room) return false;
  for (; next != room && !channel.ungranted.empty(); ++next) {
    Receive& receive = channel.ungranted.front();
    ring.grants[next % kGrants] = {receive.tag, receive.bytes};
    channel.granted.emplace(next, std::move(receive));
    channel.ungranted.pop_front();
  }
  publish(ring.granted, next);
  this->ring(peer);
  return true;
}

bool Engine::take_grants(Channel& channel) {
  Ring& ring = *channel.out.ring;
  const uint64_t first = relaxed(ring.taken), granted = acquired(ring.granted);
  for (uint64_t next = first; next != granted; ++next) {
    const Grant grant = ring.grants[next % kGrants];
    const NumberedGrant numbered{next, grant.bytes};
    const auto waiting = channel.sends.find(grant.tag);
    if (waiting == channel.sends.end()) {
      channel.grants[grant.tag].push_back(numbered);
      continue;
    }
    Send send = std::move(waiting->second.front());
    waiting->second.pop_front();
    if (waiting->second.empty()) channel.sends.erase(waiting);
    match(channel, std::move(send), numbered);
  }
  if (first != granted) publish(ring.taken, granted);
  return first != granted;
}

// Fills one slot, so that all peers get their first pieces early.
bool Engine::push(Channel& channel, int peer) {
  if (channel.active.empty()) return false;
  Send& send = channel.active.front();
  Ring& ring = *channel.out.ring;
  const uint64_t next = relaxed(ring.filled);
  if (next - acquired(ring.drained) == static_cast<uint64_t>(geometry_.slots)) return false;
  Slot& slot = channel.out.slot(next);
  if (send.misfit) {
    slot = {send.message, send.bytes, kMisfit};
  } else if (send.operation->failed) {
    channel.active.pop_front();  // its buffer may be gone
    return true;
  } else {
    const int64_t bytes = std::min(geometry_.slot_bytes, send.bytes - send.sent);
    if (send.after && send.after->done - send.sent < bytes) return false;
    std::memcpy(channel.out.slot_data(next), send.data + send.sent, bytes);
    slot = {send.message, send.sent, bytes};
    send.sent += bytes;
  }
  publish(ring.filled, next + 1);
  this->ring(peer);
  if (send.misfit || send.sent == send.bytes) {
    finish(send.operation);
    channel.active.pop_front();
  }
  return true;
}

bool Engine::drain(Channel& channel, int peer) {
  Ring& ring = *channel.in.ring;
  bool moved = false;
  while (relaxed(ring.drained) != acquired(ring.filled)) {
    const uint64_t next = relaxed(ring.drained);
    const Slot slot = channel.in.slot(next);
    const auto found = channel.granted.find(slot.message);
    if (found != channel.granted.end()) {
      Receive& receive = found->second;
      if (slot.bytes == kMisfit) {
        fail(receive.operation, peer, receive.bytes, slot.offset);
        channel.granted.erase(found);
      } else if (!receive.operation->failed) {
        if (receive.sum) return moved;  // `add` takes it
        std::memcpy(receive.data + slot.offset, channel.in.slot_data(next), slot.bytes);
        receive.come += slot.bytes;
        if (receive.come == receive.bytes) {
          finish(receive.operation);
          channel.granted.erase(found);
        }
      }
    }
    release(channel, peer);
    moved = true;
  }
  return moved;
}

void Engine::release(Channel& channel, int peer) {
  Ring& ring = *channel.in.ring;
  publish(ring.drained, relaxed(ring.drained) + 1);
  this->ring(peer);
}

// Adds the next piece of the oldest sum, if it has come from all ranks.
bool Engine::add() {
  while (!sums_.empty() && sums_.front()->operation->failed) sums_.pop_front();
  if (sums_.empty()) return false;
  const SumPtr sum = sums_.front();
  const int64_t bytes = std::min(geometry_.slot_bytes, sum->bytes - sum->done);
  std::vector<const void*> parts(geometry_.ranks);
  parts[rank_] = sum->own + sum->done;
  for (int peer = 0; peer < geometry_.ranks; ++peer) {
    if (peer == rank_) continue;
    const Channel& from = channel(peer, kCollective);
    const uint64_t next = relaxed(from.in.ring->drained);
    if (next == acquired(from.in.ring->filled)) return false;
    const auto found = from.granted.find(from.in.slot(next).message);
    if (found == from.granted.end() || found->second.sum != sum) return false;
    parts[peer] = from.in.slot_data(next);
  }
  add_in_order(parts.data(), geometry_.ranks, bytes, sum->dtype, sum->divisor,
               sum->out + sum->done);
  sum->done += bytes;
  for (int peer = 0; peer < geometry_.ranks; ++peer) {
    if (peer == rank_) continue;
    Channel& from = channel(peer, kCollective);
    if (sum->done == sum->bytes) {
      from.granted.erase(from.in.slot(relaxed(from.in.ring->drained)).message);
    }
    release(from, peer);
  }
  if (sum->done == sum->bytes) {
    finish(sum->operation);
    sums_.pop_front();
  }
  return true;
}

void Engine::finish(const OperationPtr& operation) {
  if (operation->failed || --operation->open > 0) return;
  --open_;
  report({operation->id, 0, 0, -1});
}

void Engine::fail(const OperationPtr& operation, int peer, int64_t expected, int64_t got) {
  if (operation->failed) return;
  operation->failed = true;
  --open_;
  report({operation->id, expected, got, peer});
}

void Engine::report(const Completion& completion) {
  const std::lock_guard<std::mutex> guard(mutex_);
  completions_.push_back(completion);
  ended_.notify_one();
}

}  // namespace megatron_sparse
