// Groups of numbers to codes and back, one loop for each step so that compilers vectorise them.
// Included once for each instruction set, like vector_lanes.h.
#pragma once

#include "header.h"
#include "kernels.h"
#include "quantise.h"

namespace megatron_sparse {
namespace MS_ISA {

// One whole group; the numbers may be any. Returns its scale.
template <int Bits>
MS_INLINE uint16_t quantise_group(const float* values, uint8_t* codes) {
  constexpr int32_t limit = code_limit(Bits);
  uint32_t magnitudes[kGroup], largest = 0;
  std::memcpy(magnitudes, values, sizeof magnitudes);
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t magnitude = magnitudes[i] & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const uint16_t scale = group_scale(largest, Bits);
  if (scale == kNanScale) {
    std::memset(codes, 0, group_code_bytes(Bits));
    return scale;
  }
  const float divisor = divisor_of(scale);
  int32_t code[kGroup];
  for (int i = 0; i < kGroup; ++i) code[i] = code_of(values[i] / divisor, limit);
  if constexpr (Bits == 8) {
    for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<uint8_t>(code[i]);
  } else {
    static_assert(Bits == 4, "codes of 4 or 8 bits");
    constexpr int kHalf = kGroup / 2;
    for (int i = 0; i < kHalf; ++i) {
      codes[i] = static_cast<uint8_t>((code[i] & 15) | (code[i + kHalf] & 15) << 4);
    }
  }
  return scale;
}

// The numbers that the codes of one whole group say.
template <int Bits>
MS_INLINE void dequantise_group(uint16_t scale, const uint8_t* codes, float* values) {
  const float factor = scale_value(scale);
  if constexpr (Bits == 8) {
    for (int i = 0; i < kGroup; ++i) values[i] = static_cast<int8_t>(codes[i]) * factor;
  } else {
    static_assert(Bits == 4, "codes of 4 or 8 bits");
    constexpr int kHalf = kGroup / 2;
    for (int i = 0; i < kHalf; ++i) {
      const int32_t both = codes[i];
      values[i] = static_cast<float>(((both & 15) ^ 8) - 8) * factor;
      values[i + kHalf] = static_cast<float>(((both >> 4) ^ 8) - 8) * factor;
    }
  }
}

// Quantises now - old; zeros fill the last group.
template <int Bits>
void quantise_difference(const float* now, const float* old, int64_t numel, uint16_t* scales,
                         uint8_t* codes) {
  for (int64_t begin = 0; begin < numel; begin += kGroup) {
    const int64_t count = numel - begin < kGroup ? numel - begin : kGroup;
    float values[kGroup] = {};
    for (int64_t i = 0; i < count; ++i) values[i] = now[begin + i] - old[begin + i];
    *scales++ = quantise_group<Bits>(values, codes);
    codes += group_code_bytes(Bits);
  }
}

// held += what the codes say.
template <int Bits>
void add_quantised(const uint8_t* scales, const uint8_t* codes, int64_t numel, float* held) {
  for (int64_t begin = 0; begin < numel; begin += kGroup) {
    const int64_t count = numel - begin < kGroup ? numel - begin : kGroup;
    float values[kGroup];
    dequantise_group<Bits>(read_at<uint16_t>(scales), codes, values);
    for (int64_t i = 0; i < count; ++i) held[begin + i] += values[i];
    scales += sizeof(uint16_t);
    codes += group_code_bytes(Bits);
  }
}

template <int Bits>
constexpr void fill_quantise(Kernels& kernels) {
  kernels.quantise_difference[Bits == 8] = quantise_difference<Bits>;
  kernels.add_quantised[Bits == 8] = add_quantised<Bits>;
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
