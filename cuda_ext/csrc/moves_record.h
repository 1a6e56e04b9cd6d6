// A record of moves behind its header: the encoder's frequency tables, and everything that a
// decoder checks before it decodes. Host only, without torch.
#pragma once

#include <cstdint>
#include <vector>

#include "moves.h"

namespace megatron_sparse {

// Frequencies of the symbols of all contexts, [kContexts][kMaxSymbols]; each context's sum is
// kScale or, where it does not occur, 0.
using MovesFrequencies = std::vector<uint32_t>;

// The exponent of context 0: few sampled numbers lie above context 15.
uint32_t moves_base_exponent(const void* old, int64_t numel, int dtype);

MovesFrequencies moves_quantise(const std::vector<uint64_t>& counts);

// [kContexts][kMaxSymbols] entries for the encoder; [kContexts][kScale] for the decoder.
std::vector<uint32_t> moves_encoder_table(const MovesFrequencies& frequencies);
std::vector<uint32_t> moves_decoder_table(const MovesFrequencies& frequencies);

// The table as it is in a record: a byte for each context, how many frequencies it stores; then
// these.
std::vector<uint8_t> moves_table_bytes(const MovesFrequencies& frequencies);

// The fields of a record that a decoder refuses; formats/moves.py names them.
enum MovesField : int64_t {
  kFieldFine = 0,
  kFieldChecksum = 1,
  kFieldSize = 2,
  kFieldChunks = 3,
  kFieldTable = 4,
  kFieldOffsets = 5,
  kFieldChunk = 6,
  kFieldZeros = 7,
};

// What is wrong: the field, and the number of the context, offset or chunk.
struct MovesFault {
  int64_t field = kFieldFine;
  int64_t where = 0;
};

// A checked record.
struct MovesRecord {
  int coder;
  int dtype;
  int64_t numel;
  int64_t chunks;
  uint32_t base_exponent;
  MovesFrequencies frequencies;  // of rans
  std::vector<int64_t> offsets;  // of the chunks, in bytes from `data`
  const uint8_t* data;           // of the chunks, or of the raw numbers

  int64_t count(int64_t chunk) const { return numbers_in_chunk(numel, chunk); }
  bool is_raw(int64_t chunk) const {
    return offsets[chunk + 1] - offsets[chunk] == pad16(count(chunk) * dtype_bytes(dtype));
  }
};

// Reads the sections of a record, `bytes` behind its header, that do not depend on the old numbers.
// After kFieldFine every raw chunk can be decoded; a coded one may still be damaged. `record` must
// have its coder, dtype and numel.
MovesFault moves_read_record(const uint8_t* body, int64_t bytes, MovesRecord& record);

}  // namespace megatron_sparse
