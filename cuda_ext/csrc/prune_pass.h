// The pass of prune_ and prune_encode over gradient and residual on the CPU. For prune_encode,
// whatever the format of the records, it stages what is sent (stage.h), and takes back what exceeds
// a capacity.
//
// The first elements in index order stay, for any number of threads. A removed element counts as
// not selected: its residual becomes leak * (value + residual), rounded as any residual is. Where
// values are not narrowed value + residual is x = gradient + residual, bit for bit, so the residual
// is that of an element that the threshold dropped. Infinity and NaN are not held back: if one is
// removed, the last value that stays becomes NaN, so that the step ends as it would without a
// limit, and the removed element's residual becomes 0, as if it was sent. If no value stays, the
// residual becomes NaN instead.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "prune.h"
#include "stage.h"

namespace megatron_sparse {

// The most non-zero elements of each segment of a call, or as many as there are.
struct Capacity {
  const int64_t* nnz;  // [segments], or null

  int64_t of(int64_t segment, int64_t numel) const {
    return nnz == nullptr ? numel : std::min(nnz[segment], numel);
  }
};

// How many of the chunk's values stay. The values before the chunk were counted without a limit.
inline int64_t staying(const StageChunk& chunk, const Capacity& capacity) {
  const int64_t left = capacity.of(chunk.segment, INT64_MAX) - chunk.nnz_before;
  return std::clamp(left, int64_t{0}, chunk.nnz);
}

// Unstages all but the first `stay` values; give_back(element, value) is called for the others.
template <class GiveBack>
void limit_chunk(StageChunk& chunk, int64_t stay, int64_t value_bytes, GiveBack give_back) {
  int64_t seen = 0;
  for (int64_t w = 0; w < stage_words(chunk.end - chunk.begin); ++w) {
    uint64_t left = chunk.words[w];
    for (; left != 0 && seen < stay; left &= left - 1) ++seen;
    chunk.words[w] ^= left;
    for (; left != 0; left &= left - 1, ++seen) {
      give_back(chunk.begin + 64 * w + __builtin_ctzll(left), chunk.values + seen * value_bytes);
    }
  }
  chunk.nnz = stay;
}

inline void store_nan(void* at, int dtype) {
  const uint32_t bits = dtype == kFp32 ? 0x7fc00000u : dtype == kBf16 ? 0x7fc0u : 0x7e00u;
  std::memcpy(at, &bits, dtype_bytes(dtype));  // little endian, as the wire is
}

// Overwrites a segment's last value; the segment must have one.
inline void make_last_nan(std::vector<StageChunk>& chunks, int64_t segment, int value_dtype) {
  const auto last = std::find_if(chunks.rbegin(), chunks.rend(), [&](const StageChunk& chunk) {
    return chunk.segment == segment && chunk.nnz > 0;
  });
  store_nan(last->values + (last->nnz - 1) * dtype_bytes(value_dtype), value_dtype);
}

class PrunePass {
 public:
  // The caller has checked the limits, and wire_dtype, which is that of the staged values.
  explicit PrunePass(const PruneRequest& request)
      : kernel_(kernels()),
        types_(check_prune(request)),
        staged_(static_cast<int>(request.wire_dtype)),
        stochastic_(request.key >= 0),
        leak_(static_cast<float>(request.leak)),
        seeds_(prune_seeds(request.key)),
        range_count_(request.thresholds.numel()),
        ranges_(check_ranges(request)),
        thresholds_(static_cast<const float*>(request.thresholds.const_data_ptr())),
        chances_(request.chances()),
        // The kernel that stages only reads it; the one that prunes in place also uses PruneCall.
        grad_(static_cast<char*>(const_cast<void*>(request.grad.const_data_ptr()))),
        old_residual_(static_cast<const char*>(request.old_residual.const_data_ptr())),
        residual_(static_cast<char*>(request.residual.mutable_data_ptr())) {}

  int residual_dtype() const { return types_.residual; }
  bool stochastic() const { return stochastic_; }
  // Whether the residual of what is staged is zero: fp32 values are not rounded.
  bool leaves_zero() const { return types_.grad == kFp32 && staged_ == kFp32; }
  HashSeed residual_seed() const { return seeds_.residual; }
  char* residual_at(int64_t element) const {
    return residual_ + element * dtype_bytes(types_.residual);
  }

  // Calls body(call, range) for consecutive spans of [begin, end), each of one range.
  template <class Body>
  void for_spans(int64_t begin, int64_t end, const Body& body) const {
    int64_t range = std::upper_bound(ranges_, ranges_ + range_count_ + 1, begin) - ranges_ - 1;
    for (int64_t at = begin; at < end;) {
      while (at == ranges_[range + 1]) ++range;
      // The upper half of an element's index is constant in a call.
      const int64_t high_stop = (at | int64_t{0xffffffff}) + 1;
      const int64_t stop = std::min({end, ranges_[range + 1], high_stop});
      const PruneCall call = {grad_ + at * dtype_bytes(types_.grad),
                              old_residual_ + at * dtype_bytes(types_.residual),
                              residual_at(at),
                              stop - at,
                              static_cast<uint64_t>(at),
                              limit_at(thresholds_, chances_, range),
                              leak_,
                              seeds_};
      body(call, range);
      at = stop;
    }
  }

  // Prunes a span in place; returns how many of its values are not zero.
  int64_t prune(const PruneCall& call) const {
    return kernel_.prune[types_.grad][types_.residual][staged_][stochastic_](call);
  }

  // Stages a chunk: its values go to `values`, and its count is set.
  void stage(StageChunk& chunk, uint8_t* values) const {
    const auto prune = kernel_.prune_stage[types_.grad][types_.residual][staged_][stochastic_];
    chunk.values = values;
    for_spans(chunk.begin, chunk.end, [&](const PruneCall& call, int64_t) {
      const int64_t bit = static_cast<int64_t>(call.index) - chunk.begin;
      const int64_t found = prune(call, {chunk.words, chunk.signs, bit, values});
      chunk.nnz += found;
      values += found * dtype_bytes(staged_);
    });
    clear_words_behind(chunk);
  }

  // Takes back what the segments have staged beyond their capacity; nothing, if that is not much.
  // Returns the counts of the segments.
  std::vector<SegmentCount> limit(std::vector<StageChunk>& chunks, int64_t segment_count,
                                  const Capacity& capacity) const {
    std::vector<SegmentCount> counts = add_up(chunks, segment_count);
    const auto overflows = [&](int64_t s) { return counts[s].nnz > capacity.of(s, INT64_MAX); };
    bool too_many = false;
    for (int64_t s = 0; s < segment_count; ++s) too_many |= overflows(s);
    if (!too_many) return counts;
    const int64_t chunk_count = chunks.size();
    std::vector<uint8_t> special(chunk_count, 0);  // chunks that held infinity or NaN back
    for_each(chunk_count, [&](int64_t c) {
      const int64_t stay = staying(chunks[c], capacity);
      if (stay == chunks[c].nnz) return;
      const bool any_stays = capacity.of(chunks[c].segment, 1) > 0;
      limit_chunk(chunks[c], stay, dtype_bytes(staged_), [&](int64_t element, uint8_t* value) {
        if (!give_back(element, value)) return;
        if (any_stays) {
          special[c] = true;
        } else {
          store_nan(residual_at(element), types_.residual);
        }
      });
    });
    counts = add_up(chunks, segment_count);
    for (int64_t c = 0; c < chunk_count; ++c) {
      if (special[c]) make_last_nan(chunks, chunks[c].segment, staged_);
    }
    return counts;
  }

 private:
  // Makes a staged value part of the residual again; true for infinity and NaN, which are not.
  bool give_back(int64_t element, uint8_t* value) const {
    char* residual = residual_at(element);
    const PruneCall call = {value,         residual, residual, 1, static_cast<uint64_t>(element),
                            drop_finite(), leak_,    seeds_};
    return kernel_.prune[staged_][types_.residual][staged_][stochastic_](call) != 0;
  }

  const Kernels& kernel_;
  PruneTypes types_;
  int staged_;
  bool stochastic_;
  float leak_;
  PruneSeeds seeds_;
  int64_t range_count_;
  const int64_t* ranges_;
  const float* thresholds_;
  const float* chances_;
  char* grad_;
  const char* old_residual_;
  char* residual_;
};

}  // namespace megatron_sparse
