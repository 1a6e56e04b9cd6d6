// The 48-byte header of a record; megatron_sparse/formats/header.py and wire.py are the
// same in Python.
#pragma once

#include <cstdint>
#include <cstring>

namespace megatron_sparse {

enum Format : uint8_t { kDense = 0, kCoo = 1 };

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

inline int64_t pad16(int64_t bytes) {
  return (bytes + 15) / 16 * 16;
}

inline int64_t dense_payload_bytes(int64_t numel, int64_t value_bytes) {
  return pad16(numel * value_bytes);
}

inline int64_t coo_payload_bytes(int64_t nnz, int64_t value_bytes) {
  return pad16(nnz * 4) + pad16(nnz * value_bytes);
}

// CRC-32 of IEEE 802.3 (zlib's), bit by bit, because for the 44 bytes of a header a table does not
// pay.
inline uint32_t header_checksum(const Header& header) {
  unsigned char bytes[sizeof(Header)];
  std::memcpy(bytes, &header, sizeof bytes);
  uint32_t crc = 0xffffffffu;
  for (size_t i = 0; i < sizeof bytes - sizeof header.checksum; ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

}  // namespace megatron_sparse
