// Staging on the CPU (stage.h): one pass leaves a bitmap and the packed non-zero values, of a
// gradient as it is or of a gradient and residual that are pruned on the way.
#pragma once

#include <type_traits>

#include "elementwise.h"
#include "kernels.h"
#include "lane_masks.h"
#include "prune_cpu.h"

namespace megatron_sparse {
namespace MS_ISA {

template <int D>
inline constexpr uint32_t kRawMagnitude = D == kFp32 ? 0x7fffffffu : 0x7fffu;

// Stages `numel` elements, whose raw bits of dtype D `lanes_at(i, lanes, full)` gives: from element
// i on, `lanes` of them. Returns how many are not zero.
template <int D, int VALUE, class LanesAt>
MS_INLINE int64_t stage_elements(int64_t numel, const StagedSpan& to, LanesAt lanes_at) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  int64_t written = 0, bit = to.bit;
  for (int64_t i = 0; i < numel;) {
    // One word of the bitmap; spans begin and end anywhere in it.
    const int64_t word_end = i + 64 - (bit & 63), word_at = bit / 64;
    const int64_t stop = word_end < numel ? word_end : numel;
    const bool shared = (bit & 63) != 0;
    uint64_t word = 0, sign = 0;
    while (i < stop) {
      const int64_t lanes = stop - i < W ? stop - i : W;
      L::U raw;
      uint32_t inside = kAllLanes;
      if (lanes == W) {
        raw = lanes_at(i, lanes, std::true_type());
      } else {
        raw = lanes_at(i, lanes, std::false_type());
        inside = (uint32_t{1} << lanes) - 1;
      }
      const uint32_t any = lanes_with(raw, ~0u) & inside;
      const uint32_t mask = lanes_with(raw, kRawMagnitude<D>) & inside;
      word |= static_cast<uint64_t>(mask) << (bit & 63);
      sign |= static_cast<uint64_t>(any & ~mask) << (bit & 63);
      // If packing is one instruction, it is cheaper than a branch that is hard to predict and
      // would delay the loads behind it.
      if (kPackIsCheap || mask != 0) {
        L::U packed = pack_left(raw, mask);
        if constexpr (D != VALUE) {
          packed = convert_bits<L, VALUE>(L::as_bits(widen<L, D>(packed)));
        }
        store_raw<VALUE>(to.values, written, packed);
        written += __builtin_popcount(mask);
      }
      i += lanes;
      bit += lanes;
    }
    to.words[word_at] = shared ? to.words[word_at] | word : word;
    if (to.signs != nullptr) to.signs[word_at] = shared ? to.signs[word_at] | sign : sign;
  }
  return written;
}

template <int GRAD, int VALUE>
int64_t stage(const void* grad, int64_t numel, const StagedSpan& to) {
  using L = VectorLanes;
  constexpr int W = L::kWidth;
  constexpr int64_t grad_bytes = GRAD == kFp32 ? 4 : 2, value_bytes = VALUE == kFp32 ? 4 : 2;
  const char* from = static_cast<const char*>(grad);
  char* values = static_cast<char*>(to.values);
  int64_t i = 0, written = 0;
  for (; i + 64 <= numel; i += 64) {
    L::U raw[64 / W];
    uint64_t word = 0;
    for (int part = 0; part < 64 / W; ++part) {
      raw[part] = load_raw<GRAD>(grad, i + part * W);
      word |= static_cast<uint64_t>(lanes_with(raw[part], kRawMagnitude<GRAD>)) << (part * W);
    }
    to.words[i / 64] = word;
    const int found = __builtin_popcountll(word);
    if (GRAD == VALUE && found <= kFewBits) {
      // Copied one by one without a branch for each; excess copies are overwritten.
      for (int n = 0; n < kFewBits; ++n) {
        const int at = __builtin_ctzll(word | uint64_t{1} << 63);
        std::memcpy(values + (written + n) * value_bytes, from + (i + at) * grad_bytes, grad_bytes);
        word &= word - 1;
      }
      written += found;
      continue;
    }
    for (int part = 0; part < 64 / W; ++part) {
      const uint32_t mask = static_cast<uint32_t>(word >> (part * W)) & kAllLanes;
      L::U packed = pack_left(raw[part], mask);
      if constexpr (GRAD != VALUE) {
        packed = convert_bits<L, VALUE>(L::as_bits(widen<L, GRAD>(packed)));
      }
      store_raw<VALUE>(values, written, packed);
      written += __builtin_popcount(mask);
    }
  }
  if (i < numel) {
    const StagedSpan rest = {to.words + i / 64, nullptr, 0, values + written * value_bytes};
    from += i * grad_bytes;
    written +=
        stage_elements<GRAD, VALUE>(numel - i, rest, [&](int64_t k, int64_t lanes, auto full) {
          if constexpr (full.value) return load_raw<GRAD>(from, k);
          return load_raw_some<GRAD>(from, k, lanes);
        });
  }
  return written;
}

template <int GRAD, int RESIDUAL, int VALUE, Grid G, bool STOCHASTIC>
int64_t prune_stage(const PruneCall& call, const StagedSpan& to) {
  using L = VectorLanes;
  const uint32_t high = static_cast<uint32_t>(call.index >> 32);
  const L::U first = first_lanes() + static_cast<uint32_t>(call.index);
  return stage_elements<GRAD, VALUE>(call.numel, to, [&](int64_t i, int64_t lanes, auto full) {
    const L::U low = first + static_cast<uint32_t>(i);
    const auto prune = [&](L::U grad, L::U residual) {
      return prune_element<L, GRAD, RESIDUAL, G, STOCHASTIC>(grad, residual, call.limit, call.leak,
                                                             call.seeds, high, low);
    };
    if constexpr (full.value) {
      const Pruned<L> done =
          prune(load_raw<GRAD>(call.grad, i), load_raw<RESIDUAL>(call.old_residual, i));
      store_raw<RESIDUAL>(call.residual, i, done.residual);
      return done.grad;
    } else {
      const Pruned<L> done = prune(load_raw_some<GRAD>(call.grad, i, lanes),
                                   load_raw_some<RESIDUAL>(call.old_residual, i, lanes));
      store_raw_some<RESIDUAL>(call.residual, i, lanes, done.residual);
      return done.grad;
    }
  });
}

template <int GRAD, int RESIDUAL, int WIRE>
constexpr void fill_prune(Kernels& kernels) {
  constexpr Grid grid = grid_of(GRAD, WIRE);
  kernels.prune[GRAD][RESIDUAL][WIRE][0] = prune_span<GRAD, RESIDUAL, grid, false>;
  kernels.prune[GRAD][RESIDUAL][WIRE][1] = prune_span<GRAD, RESIDUAL, grid, true>;
  kernels.prune_stage[GRAD][RESIDUAL][WIRE][0] = prune_stage<GRAD, RESIDUAL, WIRE, grid, false>;
  kernels.prune_stage[GRAD][RESIDUAL][WIRE][1] = prune_stage<GRAD, RESIDUAL, WIRE, grid, true>;
}

template <int GRAD, int VALUE>
constexpr void fill_stage(Kernels& kernels) {
  kernels.stage[GRAD][VALUE] = stage<GRAD, VALUE>;
  fill_prune<GRAD, kFp32, VALUE>(kernels);
  fill_prune<GRAD, kBf16, VALUE>(kernels);
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
