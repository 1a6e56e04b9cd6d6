// The sums over the payloads of a message's records, which a sealed record (docs/wire-format.md)
// adds to the checksum of its header; for host and device.
#pragma once

#include <cstddef>

#include "record.h"

namespace megatron_sparse {

struct PayloadSums {
  uint8_t* message;  // on CUDA 16-byte aligned
  int64_t bytes;
  // Null for records back to back; else [records + 1] ascending multiples of 16 from 0 on: where
  // records begin, and where the last slot ends.
  const int64_t* slots;
  int64_t records;
  int64_t* sums;  // [records]; null seals the records

  // To what a record's sum is added, modulo 2^32: a word of `sums`, or the header's checksum.
  MS_INLINE_MEMBER uint8_t* target(int64_t record, int64_t payload_at) const {
    if (sums != nullptr) return reinterpret_cast<uint8_t*>(sums + record);
    return message + payload_at - static_cast<int64_t>(sizeof Header::checksum);
  }
};

struct PayloadPlace {
  int64_t at;
  int64_t bytes;
};

// A record's payload; empty at the end of the record's place if its size is impossible. Back to
// back, the record begins at `begin`, where the payload before ends. Reads only the size.
MS_INLINE PayloadPlace find_payload(const PayloadSums& call, int64_t record, int64_t begin) {
  int64_t end = call.bytes;
  if (call.slots != nullptr) {
    begin = call.slots[record];
    if (call.slots[record + 1] < end) end = call.slots[record + 1];
  }
  if (end - begin < kHeaderBytes) return {end, 0};
  const int64_t at = begin + kHeaderBytes;
  uint64_t bytes;
  memcpy(&bytes, call.message + begin + offsetof(Header, payload_bytes), sizeof bytes);
  if (bytes > static_cast<uint64_t>(end - at) || bytes % 16 != 0) return {end, 0};
  return {at, static_cast<int64_t>(bytes)};
}

// On CUDA; as the launchers of decode_launch.h.
void launch_payload_sums(const PayloadSums& call, void* stream);

}  // namespace megatron_sparse
