// Moves messages between the ranks of a node through the memory they share (shared_ring.h).
//
// A thread of each rank copies its messages, slot by slot, into the rings to the other ranks, and
// copies what they sent out of the rings from them. A message travels once its receive is posted:
// the receiver grants it, and the sender takes the oldest message of the grant's tag. So a message
// whose receive is not posted never lies in the way of another one.
//
// Sums: every rank sends each other rank that one's shard; the shard's owner waits until the same
// piece has come from all, and adds them in rank order, out of the slots. An all-reduce then sends
// the sums' pieces to all, as they become complete.
//
// Collectives have a lane of their own, whose messages are strictly in order: a piece of a sum is
// held in its slot until the slowest rank's has come, and pairwise messages must not wait for that.
// As all ranks post the same collectives in the same order, one waits only for earlier ones.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "shared_ring.h"

namespace megatron_sparse {

// A pairwise message, of the interface to Python (shared_memory.cpp).
struct Message {
  void* data;
  int64_t bytes;
  int32_t peer;
  int32_t is_receive;
};

// The end of an operation, likewise.
struct Completion {
  int64_t id;
  int64_t expected;  // bytes of the receive that a message did not fit
  int64_t got;       // bytes of that message
  int64_t peer;      // the other rank; -1: all is well
};

// A sum over all ranks of the node, likewise: of a whole tensor (`scatter` is 0), or of this rank's
// shard of it, of which there are as many as ranks, all of the same size.
struct SumCall {
  const void* values;
  void* out;  // `values` itself for a whole tensor; else the shard, which may be a view of `values`
  int64_t numel;
  int32_t dtype;  // shared_sum.h
  int32_t scatter;
  int32_t divisor;  // 0: none
};

class Engine {
 public:
  // `segment` is the mapped memory, `segment_bytes` long; the engine does not unmap it.
  Engine(void* segment, const Geometry& geometry, int rank);

  // Each posts an operation; its end comes from `wait`. Buffers must live until then, or until
  // `stop` has returned.
  void exchange(int64_t id, int64_t tag, const Message* messages, int count);
  void sum(int64_t id, const SumCall& call);
  void gather(int64_t id, const void* own, int64_t bytes, void* gathered);

  // Blocks until operations have ended; returns how many, at most `most`; -1 after `stop`.
  int wait(Completion* ended, int most);

  // Ends the thread: afterwards no buffer is touched.
  void stop();

 private:
  struct Operation {
    int64_t id;
    int open = 0;  // parts that are not done
    bool failed = false;
  };
  using OperationPtr = std::shared_ptr<Operation>;

  struct Sum {
    OperationPtr operation;
    const char* own;
    char* out;
    int64_t bytes;
    int dtype, divisor;
    int64_t done = 0;
  };
  using SumPtr = std::shared_ptr<Sum>;

  struct Send {
    OperationPtr operation;
    int peer;
    int64_t tag;
    const char* data;
    int64_t bytes;
    SumPtr after = nullptr;  // only what is complete of this sum can be sent
    int64_t sent = 0;
    uint64_t message = 0;
    bool misfit = false;
  };

  struct Receive {
    OperationPtr operation;
    int peer;
    int64_t tag;
    char* data;
    int64_t bytes;
    SumPtr sum = nullptr;  // the pieces are parts of it
    int64_t come = 0;
  };

  struct NumberedGrant {
    uint64_t message;
    int64_t bytes;
  };

  // One lane to and from another rank.
  struct Channel {
    RingView out, in;
    std::unordered_map<int64_t, std::deque<Send>> sends;            // not granted, by tag
    std::unordered_map<int64_t, std::deque<NumberedGrant>> grants;  // no send yet, by tag
    std::deque<Send> active;
    std::deque<Receive> ungranted;
    std::unordered_map<uint64_t, Receive> granted;  // by message
  };

  // An operation on its way to the thread.
  struct Posted {
    OperationPtr operation;
    int lane;
    std::vector<Send> sends;
    std::vector<Receive> receives;
    SumPtr sum = nullptr;
    const void* copied = nullptr;  // `copied_bytes` from here to `copy`
    void* copy = nullptr;
    int64_t copied_bytes = 0;
  };

  void post(Posted posted);
  void main();
  bool pass();
  bool route();
  bool take_grants(Channel& channel);
  bool push(Channel& channel, int peer);
  bool grant(Channel& channel, int peer);
  bool drain(Channel& channel, int peer);
  bool add();
  void sleep();
  void match(Channel& channel, Send send, NumberedGrant grant);
  void release(Channel& channel, int peer);
  void ring(int peer);
  void finish(const OperationPtr& operation);
  void fail(const OperationPtr& operation, int peer, int64_t expected, int64_t got);
  void report(const Completion& completion);
  Channel& channel(int peer, int lane) { return channels_[peer * kLanes + lane]; }

  Bell* const bells_;
  const Geometry geometry_;
  const int rank_;
  std::vector<Channel> channels_;
  std::deque<SumPtr> sums_;
  int64_t open_ = 0;  // operations under way

  std::mutex mutex_;  // guards what follows
  std::condition_variable ended_;
  std::vector<Posted> posted_;
  std::deque<Completion> completions_;
  bool stopped_ = false;

  std::atomic<bool> stopping_{false};
  std::thread thread_;  // the last member: it begins when the others are made
};

}  // namespace megatron_sparse
