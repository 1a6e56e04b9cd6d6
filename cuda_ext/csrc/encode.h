// What the CPU's encoders share: a checked call, the room that its records need, and its report.
#pragma once

#include <algorithm>
#include <vector>

#include "encode_request.h"
#include "place.h"
#include "prune_pass.h"

namespace megatron_sparse {

// A request whose sizes are right, too.
struct EncodeCall : EncodeRequest {
  explicit EncodeCall(const EncodeRequest& request);

  int64_t numel(int64_t s) const { return offsets[s + 1] - offsets[s]; }
  bool is_kept(int64_t s) const { return kinds[s] == kKindDense; }
  // Elements of a chunk of stage.h; those of Rice are chunks of the records, too.
  int64_t span() const { return is_rice() ? int64_t{1} << log2_span : kStageChunk; }
  int64_t value_bytes() const { return dtype_bytes(staged_dtype(dtype())); }
  // Where other values are quantised, those of kept segments are rounded one by one: levels of a
  // group would differ between ranks that have only a part of the group's parameters in common.
  int dtype_of(int64_t s) const {
    return is_quantised(dtype()) && is_kept(s) ? int{kBf16} : dtype();
  }

  // The most bytes of a segment's record with at most `entries` entries.
  int64_t most_bytes(int64_t s, int64_t entries) const;

  // Refuses a record of segment s that is longer than its slot, if there are slots.
  void check_fits(int64_t s, int64_t record_bytes) const {
    MS_CHECK(place == nullptr || record_bytes <= place[s + 1] - place[s],
             op << ": the slot of segment " << s << " is too small", record_bytes << " bytes",
             place[s + 1] - place[s]);
  }
  // Refuses an output buffer of less than all slots or, without slots, than so many bytes.
  void check_out(int64_t bytes) const {
    const int64_t needed = place == nullptr ? bytes : place[segment_count()];
    MS_CHECK(needed <= out.numel(), op << ": the output buffer is too small", needed << " bytes",
             out.numel());
  }
  // Refuses room that may prove too small for segments of at most entries(s) entries each: before
  // the residual changes, because no record's size is known yet.
  template <class Entries>
  void check_room(Entries entries) const {
    int64_t most = 0;
    for (int64_t s = 0; s < segment_count(); ++s) {
      const int64_t bytes = most_bytes(s, entries(s));
      check_fits(s, bytes);
      most += bytes;
    }
    check_out(most);
  }

  // What the call returns, as on CUDA: a status without an error (4 words), the records' bytes, and
  // the non-zero elements of the segments. Refuses records that do not fit.
  Tensor report(const std::vector<Record>& records) const;

  const int64_t* offsets;
  const uint8_t* kinds;
  const int64_t* place;  // slots, or null
  void* scratch;         // the bitmaps, values and coded gaps of all chunks
};

// The implementations for records of format Rice.
Tensor encode_rice(const EncodeCall& call);
Tensor prune_encode_rice(const EncodeCall& call, const PrunePass& pass, const Capacity& capacity);

// Words of a chunk's coded gaps: Rice's worst case is a bitmap, and both parts are rounded up.
inline int64_t index_room_words(int64_t numel) {
  return (2 * stage_words(numel) + 2 + 1) / 2 * 2;
}

}  // namespace megatron_sparse
