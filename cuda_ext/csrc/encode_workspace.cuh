// Shared by the launches of an encoder: scratch memory on the device, and the plans of records.
#pragma once

#include "encode_launch.h"
#include "launch_grid.cuh"
#include "record.h"
#include "rice.h"
#include "scan.cuh"

namespace megatron_sparse {

// A segment's record, once its format and place are known.
struct RecordPlan {
  int64_t at;  // of its header in the message
  Sections sections;
  int64_t nnz_before;  // staged values of earlier segments
  int64_t nnz;
  int64_t blocks_before;
  int64_t blocks;
  uint8_t kind;
};

inline constexpr int kCodedWords = kPiciTile / 2;  // a tile's values in bf16; few bits take less
inline constexpr int kSignGroups = 8;              // of a tile: the part of one warp of compaction

// Tiles of 4096 elements restart in each segment and are numbered through the bucket.
struct Workspace {
  ScanState* nnz_states;       // [tiles], zeroed; after compaction, inclusive prefixes
  ScanState* block_states;     // likewise, of non-zero blocks; null if there are none
  ScanState* chunk_states;     // likewise, of words, by slots of chunks; null without Rice indices
  unsigned int* ticket;        // zeroed
  unsigned int* planners;      // zeroed: blocks that have asked to plan the records
  unsigned int* planned;       // zeroed: whether the first of them has done it
  unsigned int* chunk_ticket;  // zeroed
  int64_t* tile_begin;         // [segments + 1]: first tile of each segment
  RecordPlan* plans;           // [segments]
  uint32_t* words;             // [128 * tiles]: bit b of word w says that element 32 w + b is kept
  uint32_t* signs;             // likewise, that it is -0.0; valid only where has_signs is set
  uint8_t* has_signs;          // [tiles * kSignGroups]: whether these words of `signs` were written
  void* values;                // [value_capacity] kept values of all segments, back to back
  int64_t value_capacity;
  uint32_t* unary;    // [128 * tiles]: where, in the bits of its chunk's unary part, the 1 of the
                      // word's first entry lies; null without Rice indices
  uint32_t* coded;    // [kCodedWords * tiles] words of chunks, each from its first tile's on; null
                      // unless they are coded at once, and so are the next two
  uint32_t* spoiled;  // [segments], zeroed: whether a limit has taken infinity or NaN back
  uint32_t* last_groups;  // [128 * segments]: of the entries of the group that a limit ends, the
                          // elements behind them in their chunk
  bool rice;              // records are dense or of format Rice, no others
  int64_t zeroed_bytes;   // from nnz_states on
  int64_t bytes;
};

struct WorkspaceShape {
  int64_t numel;
  int64_t segment_count;
  int64_t value_bytes;
  int64_t most_values;  // values beyond them are not staged
  bool with_blocks;
  bool rice;
  int64_t chunk_slots;  // of Rice records with indices; 0 for others
  bool at_once;         // whether chunks are coded at once
};

inline Workspace lay_out_workspace(void* base, const WorkspaceShape& shape) {
  const int64_t numel = shape.numel, segment_count = shape.segment_count;
  const int64_t tiles = most_tiles(numel, segment_count);
  Workspace w = {};
  w.rice = shape.rice;
  w.value_capacity = numel < shape.most_values ? numel : shape.most_values;
  Carver memory(base);
  w.nnz_states = memory.take<ScanState>(tiles);
  if (shape.with_blocks) w.block_states = memory.take<ScanState>(tiles);
  if (shape.chunk_slots > 0) w.chunk_states = memory.take<ScanState>(shape.chunk_slots);
  w.ticket = memory.take<unsigned int>(4);
  w.planners = w.ticket + 1;
  w.planned = w.ticket + 2;
  w.chunk_ticket = w.ticket + 3;
  if (shape.at_once) w.spoiled = memory.take<uint32_t>(segment_count);
  w.zeroed_bytes = memory.used();
  w.tile_begin = memory.take<int64_t>(segment_count + 1);
  w.plans = memory.take<RecordPlan>(segment_count);
  w.words = memory.take<uint32_t>(tiles * kTileWords);
  w.signs = memory.take<uint32_t>(tiles * kTileWords);
  w.has_signs = memory.take<uint8_t>(tiles * kSignGroups);
  w.values = memory.take<uint8_t>(w.value_capacity * shape.value_bytes);
  if (shape.at_once) {
    w.coded = memory.take<uint32_t>(tiles * kCodedWords);
    w.last_groups = memory.take<uint32_t>(segment_count * kRiceGroup);
  } else if (shape.chunk_slots > 0) {
    w.unary = memory.take<uint32_t>(tiles * kTileWords);
  }
  w.bytes = memory.used();
  return w;
}

}  // namespace megatron_sparse
