// Error texts of the bindings of hashing and row-sparse gradients: "what | expected | got".
//
// Free of torch, so that the emulator's tests check the same texts that users of a GPU see.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

namespace megatron_sparse {

// An entry outside [0, limit).
inline std::string entry_error_text(const char* name, int64_t position, int64_t limit,
                                    int64_t got) {
  std::ostringstream text;
  text << name << " is out of range at position " << position << " | 0 to " << limit - 1 << " | "
       << got;
  return text.str();
}

// A set of rows that does not ascend strictly.
inline std::string ascend_error_text(const char* name, int64_t position, int64_t before,
                                     int64_t got) {
  std::ostringstream text;
  text << name << " is not strictly ascending from 0 | more than " << before << " at position "
       << position << " | " << got;
  return text.str();
}

// A local row that the match does not find.
inline std::string missing_error_text(int64_t row) {
  std::ostringstream text;
  text << "row_sparse_match: a local row is not in the union | every local index | " << row;
  return text.str();
}

// Local rows that are not in the compacted buffer.
inline std::string absent_error_text(int64_t wanted, int64_t found) {
  std::ostringstream text;
  text << "row_sparse_expand: a local row is not in the union | " << wanted
       << " local rows in it | " << found;
  return text.str();
}

// Offsets of groups that are empty, or do not cut the order.
inline std::string cut_error_text(int64_t position, int64_t count, int64_t got) {
  std::ostringstream text;
  text << "row_sparse_sum: offsets does not cut the order into groups | strictly ascending from 0 "
       << "to " << count << " | " << got << " at position " << position;
  return text.str();
}

}  // namespace megatron_sparse
