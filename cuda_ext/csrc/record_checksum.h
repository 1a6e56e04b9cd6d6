// The checksum over everything behind a record's header, and the header itself.
#pragma once

#include <atomic>

#include "hash_partition_check.h"
#include "header.h"
#include "isa.h"

namespace megatron_sparse {

// Of the words of `body` behind the checksum itself, which is the first.
inline uint32_t body_checksum(const uint8_t* body, int64_t bytes) {
  constexpr int64_t kChecksumWords = int64_t{1} << 16;  // that one task sums
  const int64_t words = bytes / 4 - 1;
  std::atomic<uint32_t> sum{0};
  for_each_chunk(words, kChecksumWords, [&](int64_t, int64_t begin, int64_t end) {
    sum += kernels().moves_checksum(body + 4 * (begin + 1), end - begin,
                                    static_cast<uint32_t>(begin + 1));
  });
  return sum;
}

// Completes a record of a whole shard: the checksum over its body, and the header.
inline void seal_record(uint8_t* record, Header header) {
  uint8_t* body = record + kHeaderBytes;
  const uint32_t checksum = body_checksum(body, header.payload_bytes);
  std::memcpy(body, &checksum, sizeof checksum);
  header.magic = kMagic;
  header.version = kVersion;
  header.checksum = header_checksum(header);
  std::memcpy(record, &header, sizeof header);
}

}  // namespace megatron_sparse
