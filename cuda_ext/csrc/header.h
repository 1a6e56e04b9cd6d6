// The 48-byte header of a record; megatron_sparse/formats/header.py and wire.py are the
// same in Python.
#pragma once

#include <cstdint>
#include <cstring>

#include "portability.h"

namespace megatron_sparse {

struct Header {
  uint32_t magic;
  uint8_t version;
  uint8_t format;
  uint8_t dtype;
  uint8_t flags;
  uint64_t numel;
  uint64_t nnz;
  uint64_t payload_bytes;
  uint64_t offset;
  uint32_t step;
  uint32_t checksum;  // CRC-32 of the bytes before it
};
static_assert(sizeof(Header) == 48, "the wire format has no compiler padding");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

inline constexpr uint32_t kMagic = 0x4750534du;  // the bytes "MSPG"
inline constexpr uint8_t kVersion = 2;
inline constexpr int64_t kHeaderBytes = sizeof(Header);
inline constexpr int64_t kMaxSegmentNumel = (int64_t{1} << 31) - 1;

// Entry k of an array of T that may lie at any address.
template <class T>
MS_INLINE T read_at(const void* from, int64_t k = 0) {
  T value;
  memcpy(&value, static_cast<const char*>(from) + k * static_cast<int64_t>(sizeof value),
         sizeof value);
  return value;
}

MS_INLINE int64_t pad16(int64_t bytes) {
  return (bytes + 15) & ~int64_t{15};
}

// CRC-32 of IEEE 802.3 (zlib's) of the 44 bytes before the checksum, bit by bit, because for so few
// a table does not pay.
MS_INLINE uint32_t checksum_of(const Header& header) {
  uint32_t words[sizeof(Header) / 4];
  memcpy(words, &header, sizeof words);
  uint32_t crc = 0xffffffffu;
  for (int i = 0; i < 11; ++i) {
    crc ^= words[i];
    for (int bit = 0; bit < 32; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

}  // namespace megatron_sparse
