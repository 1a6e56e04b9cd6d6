// Argument checks of the ops of moves that both devices share.
#pragma once

#include <vector>

#include "check.h"
#include "moves.h"

namespace megatron_sparse {

// Parameters; returns their dtype code.
inline int check_parameters(const Tensor& numbers, const char* name) {
  check_flat(numbers, name);
  MS_CHECK(numbers.numel() <= kMaxMoves, name << " is too long", "at most 2^34 numbers",
           numbers.numel());
  return dtype_code(numbers, name);
}

inline int check_moves_encode(const Tensor& old, const Tensor& now, const Tensor& out) {
  const int dtype = check_parameters(now, "moves_encode: new");
  check_vector(old, "moves_encode: old", now.scalar_type(), now.numel());
  check_beside(old, now, "moves_encode: old");
  check_vector(out, "moves_encode: out", ScalarType::Byte, moves_room_bytes(now.numel(), dtype));
  check_beside(out, now, "moves_encode: out");
  return dtype;
}

// Returns the dtype code, which all records of a call share.
inline int check_moves_decode(const std::vector<Tensor>& held, const std::vector<Tensor>& records,
                              const std::vector<int64_t>& coders) {
  MS_CHECK(!held.empty() && records.size() == held.size() && coders.size() == held.size(),
           "moves_decode_: a record is missing", "one for each of the held, and its coder",
           records.size() << " for " << held.size());
  for (size_t i = 0; i < held.size(); ++i) {
    check_parameters(held[i], "moves_decode_: held");
    check_vector(held[i], "moves_decode_: held", held[0].scalar_type(), -1);
    check_beside(held[i], held[0], "moves_decode_: held");
    check_vector(records[i], "moves_decode_: record", ScalarType::Byte, -1);
    check_beside(records[i], held[i], "moves_decode_: record");
    MS_CHECK(records[i].numel() >= kMovesBodyAt && records[i].numel() % 16 == 0,
             "moves_decode_: record has the wrong length", "a multiple of 16, 48 at least",
             records[i].numel());
    MS_CHECK(coders[i] == kMovesRaw || coders[i] == kMovesRans, "moves_decode_: coder is unknown",
             "0 (raw) or 1 (rans)", coders[i]);
  }
  return dtype_code(held[0], "moves_decode_: held");
}

}  // namespace megatron_sparse
