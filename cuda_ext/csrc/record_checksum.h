// Checksums over what lies behind a record's header, on the CPU.
#pragma once

#include <atomic>

#include "header.h"
#include "isa.h"
#include "parallel.h"

namespace megatron_sparse {

// The sum of the mixed words, the first of which has the number `first`.
inline uint32_t mixed_sum(const uint8_t* words, int64_t count, uint32_t first) {
  constexpr int64_t kTaskWords = int64_t{1} << 16;  // that one task sums
  std::atomic<uint32_t> sum{0};
  for_each_chunk(count, kTaskWords, [&](int64_t, int64_t begin, int64_t end) {
    sum +=
        kernels().mixed_sum(words + 4 * begin, end - begin, first + static_cast<uint32_t>(begin));
  });
  return sum;
}

// Of the words of `body` behind the checksum itself, which is the first.
inline uint32_t body_checksum(const uint8_t* body, int64_t bytes) {
  return mixed_sum(body + 4, bytes / 4 - 1, 1);
}

// Completes a record of a whole shard: the checksum over its body, and the header.
inline void seal_record(uint8_t* record, Header header) {
  uint8_t* body = record + kHeaderBytes;
  const uint32_t checksum = body_checksum(body, header.payload_bytes);
  std::memcpy(body, &checksum, sizeof checksum);
  header.magic = kMagic;
  header.version = kVersion;
  header.checksum = checksum_of(header);
  std::memcpy(record, &header, sizeof header);
}

}  // namespace megatron_sparse
