// Argument checks of the ops of moves that both devices share.
#pragma once

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

inline int check_moves_decode(const Tensor& held, const Tensor& record, int64_t coder) {
  const int dtype = check_parameters(held, "moves_decode_: held");
  check_vector(record, "moves_decode_: record", ScalarType::Byte, -1);
  check_beside(record, held, "moves_decode_: record");
  MS_CHECK(record.numel() >= kMovesBodyAt && record.numel() % 16 == 0,
           "moves_decode_: record has the wrong length", "a multiple of 16, 48 at least",
           record.numel());
  MS_CHECK(coder == kMovesRaw || coder == kMovesRans, "moves_decode_: coder is unknown",
           "0 (raw) or 1 (rans)", coder);
  return dtype;
}

}  // namespace megatron_sparse
