// The rANS coder of moves: counting, encoding and decoding of a chunk. Also the checksum of a
// record.
// Included once for each instruction set, like vector_lanes.h.
#pragma once

#include "kernels.h"
#include "moves_lanes.h"

namespace megatron_sparse {
namespace MS_ISA {

inline constexpr int kVectors = kStates / MS_WIDTH;
// Words that 32 numbers take at most: one for a symbol, one or two for raw bits.
inline constexpr int64_t kStepWords = 3 * kStates;

MS_INLINE VectorLanes::U gather(const uint32_t* table, VectorLanes::U at) {
#if defined(__AVX512F__)
  return reinterpret_cast<VectorLanes::U>(
      _mm512_i32gather_epi32(reinterpret_cast<__m512i>(at), table, 4));
#elif defined(__AVX2__)
  return reinterpret_cast<VectorLanes::U>(_mm256_i32gather_epi32(
      reinterpret_cast<const int*>(table), reinterpret_cast<__m256i>(at), 4));
#else
  VectorLanes::U found;
  for (int lane = 0; lane < MS_WIDTH; ++lane) found[lane] = table[at[lane]];
  return found;
#endif
}

MS_INLINE uint32_t lanes_at_least(VectorLanes::U a, VectorLanes::U b) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epu32_mask(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b));
#else
  return lanes_with(reinterpret_cast<VectorLanes::U>(a >= b), 1);
#endif
}

// Of the numbers from `at` on, those that lie before `numel`.
MS_INLINE uint32_t lanes_before(int64_t at, int64_t numel) {
  const int64_t left = numel - at;
  return left >= MS_WIDTH ? kAllLanes : left <= 0 ? 0 : (uint32_t{1} << left) - 1;
}

MS_INLINE bool any_lane(VectorLanes::U u) {
  return lanes_with(u, ~0u) != 0;
}

// Adds the occurrences of each (context, symbol) in every `stride`th block of a chunk to
// counts[context * kMaxSymbols + symbol].
template <int D>
void moves_count(const void* old, const void* now, const uint32_t* down, int64_t numel,
                 uint32_t base, int stride, uint64_t* counts) {
  using U = VectorLanes::U;
  constexpr int kBlock = kCountBlock, kCopies = 8;
  static_assert(kRansChunk / kCopies < 65536, "a chunk cannot overflow a copy");
  // Equal symbols follow one another; counting into several copies keeps them independent.
  alignas(64) uint16_t copies[kCopies][kContexts * kMaxSymbols] = {};
  alignas(64) uint16_t keys[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock * stride) {
    const int64_t count = numel - begin < kBlock ? numel - begin : kBlock;
    for (int64_t i = 0; i < count; i += MS_WIDTH) {
      const U mirrored = mirror<D>(down, begin + i);
      const U was = load_until<D>(old, begin + i, numel) ^ mirrored;
      const U z = zigzag<D>(was, load_until<D>(now, begin + i, numel) ^ mirrored);
      const U symbol = symbols_of_moves<D>(z).symbol;
      store_raw<kBf16>(keys, i, context_of<D>(was, base) * uint32_t{kMaxSymbols} + symbol);
    }
    int64_t i = 0;
    for (; i + kCopies <= count; i += kCopies) {
      for (int copy = 0; copy < kCopies; ++copy) ++copies[copy][keys[i + copy]];
    }
    for (; i < count; ++i) ++copies[i % kCopies][keys[i]];
  }
  for (int key = 0; key < kContexts * kMaxSymbols; ++key) {
    for (int copy = 0; copy < kCopies; ++copy) counts[key] += copies[copy][key];
  }
}

// Puts the lower halves of the lanes in `mask` in front of `words`; may write a vector below them.
MS_INLINE uint16_t* emit(VectorLanes::U state, uint32_t mask, uint16_t* words) {
  const int count = __builtin_popcount(mask);
  const uint32_t last = kAllLanes & ~((uint32_t{1} << (MS_WIDTH - count)) - 1);
  store_raw<kBf16>(words - MS_WIDTH, 0, spread_right(pack_left(state & 0xffffu, mask), last));
  return words - count;
}

MS_INLINE uint16_t* emit_raw(VectorLanes::U& state, VectorLanes::U bits, VectorLanes::U raw,
                             uint16_t* words) {
  const uint32_t full = lanes_with(state >> 16 >> (16u - bits), ~0u);
  words = emit(state, full, words);
  state = blend(full, state >> 16, state) << bits | raw;
  return words;
}

// The state with a symbol of this frequency, which is at most kScale, and start. Floats give its
// quotient with an error of at most one, because the quotient is below 2^20.
MS_INLINE VectorLanes::U push_symbol(VectorLanes::U state, VectorLanes::U start,
                                     VectorLanes::U frequency) {
  using L = VectorLanes;
  using U = L::U;
#if defined(__AVX512F__)
  // Rounded towards zero, the quotient is never too large.
  constexpr int kDown = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
  const __m512 dividend = _mm512_cvt_roundepu32_ps(reinterpret_cast<__m512i>(state), kDown);
  const __m512 divisor = _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(frequency));
  const U quotient =
      reinterpret_cast<U>(_mm512_cvttps_epi32(_mm512_div_round_ps(dividend, divisor, kDown)));
  const U rest = state - quotient * frequency;
  const U pushed = (quotient << kScaleBits) + rest + start;
  return blend(lanes_at_least(rest, frequency), pushed + (kScale - frequency), pushed);
#else
  const L::F estimate = __builtin_convertvector(state, L::F) / L::to_float(frequency);
  const U quotient = L::to_integer(estimate);
  const U rest = state - quotient * frequency;
  const U pushed = (quotient << kScaleBits) + rest + start;
  const U step = U{} + kScale - frequency;
  const L::M low = reinterpret_cast<L::M>(rest) >= reinterpret_cast<L::M>(frequency);
  const L::M high = reinterpret_cast<L::M>(rest) < 0;
  return L::select(high, pushed - step, L::select(low, pushed + step, pushed));
#endif
}

// Encodes a chunk backwards, in front of `end`; `table` is [context][kMaxSymbols] of encoder
// entries. Writes the states from which decoding begins; returns where the words begin. May write a
// vector below that.
template <int D>
uint16_t* rans_encode(const void* old, const void* now, const uint32_t* down, int64_t numel,
                      uint32_t base, const uint32_t* table, uint32_t* states, uint16_t* end) {
  using U = VectorLanes::U;
  uint16_t* words = end;
  U state[kVectors];
  for (int v = 0; v < kVectors; ++v) state[v] = U{} + kLowestState;
  const int64_t steps = (numel + kStates - 1) / kStates;
  for (int64_t step = steps - 1; step >= 0; --step) {
    const int64_t begin = step * kStates;
    U entry[kVectors], bits[kVectors], raw[kVectors];
    U any = {};
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = begin + v * MS_WIDTH;
      const U mirrored = mirror<D>(down, at);
      const U was = load_until<D>(old, at, numel) ^ mirrored;
      const U is = load_until<D>(now, at, numel) ^ mirrored;
      const MoveSymbols all = symbols_of_moves<D>(zigzag<D>(was, is));
      entry[v] = gather(table, context_of<D>(was, base) * uint32_t{kMaxSymbols} + all.symbol);
      bits[v] = all.raw_bits;
      raw[v] = all.raw;
      any |= bits[v];
      // Lanes without a number: a symbol that is certain leaves the state as it is.
      if (begin + kStates > numel) {
        entry[v] = blend(lanes_before(at, numel), entry[v], U{} + encoder_entry(0, kScale));
      }
    }
    if (any_lane(any)) {
      if constexpr (D == kFp32) {
        for (int v = kVectors - 1; v >= 0; --v) {
          const U low = VectorLanes::select(bits[v] < 16u, bits[v], U{} + 16u);
          words = emit_raw(state[v], bits[v] - low, raw[v] >> low, words);
          raw[v] &= ((U{} + 1u) << low) - 1u;
          bits[v] = low;
        }
      }
      for (int v = kVectors - 1; v >= 0; --v) {
        words = emit_raw(state[v], bits[v], raw[v], words);
      }
    }
    for (int v = kVectors - 1; v >= 0; --v) {
      const U frequency = entry[v] & 0xffffu;
      const uint32_t full = lanes_at_least(state[v] >> (32 - kScaleBits), frequency);
      words = emit(state[v], full, words);
      state[v] = push_symbol(blend(full, state[v] >> 16, state[v]), entry[v] >> 16, frequency);
    }
  }
  for (int v = 0; v < kVectors; ++v) store_raw<kFp32>(states, v * MS_WIDTH, state[v]);
  return words;
}

// Lanes below kLowestState take their next word.
MS_INLINE VectorLanes::U refill(VectorLanes::U state, const uint16_t*& words) {
  const uint32_t empty = ~lanes_with(state, 0xffff0000u) & kAllLanes;
  const VectorLanes::U next = spread_right(load_raw<kBf16>(words, 0), empty);
  words += __builtin_popcount(empty);
  return blend(empty, state << 16 | next, state);
}

// 32 numbers from `begin` on; reads up to kStepWords + MS_WIDTH words.
template <int D, bool WHOLE>
MS_INLINE const uint16_t* decode_step(const void* old, const uint32_t* down, int64_t begin,
                                      int64_t numel, uint32_t base, const uint32_t* table,
                                      VectorLanes::U (&state)[kVectors], const uint16_t* words,
                                      void* out) {
  using L = VectorLanes;
  using U = L::U;
  U mirrored[kVectors], was[kVectors], z[kVectors], bits[kVectors];
  U any = {};
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = begin + v * MS_WIDTH;
    mirrored[v] = mirror<D>(down, at);
    was[v] = (WHOLE ? load_raw<D>(old, at) : load_until<D>(old, at, numel)) ^ mirrored[v];
    const U slot = state[v] & (kScale - 1);
    U entry = gather(table, (context_of<D>(was[v], base) << kScaleBits) + slot);
    if constexpr (!WHOLE) {
      const U still = slot << 19 | (kScale - 1) << 7;  // leaves the state as it is
      entry = blend(lanes_before(at, numel), entry, still);
    }
    z[v] = entry & 127u;
    const U frequency = (entry >> 7 & (kScale - 1)) + 1u;
    state[v] = frequency * (state[v] >> kScaleBits) + (entry >> 19);
    bits[v] = L::select(reinterpret_cast<L::M>(z[v]) < static_cast<int32_t>(kDirect), U{},
                        (z[v] >> 1) - 5u);
    any |= bits[v];
  }
  for (int v = 0; v < kVectors; ++v) state[v] = refill(state[v], words);
  if (any_lane(any)) {
    const U one = U{} + 1u;
    U raw[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const U low = D == kFp32 ? L::select(bits[v] < 16u, bits[v], U{} + 16u) : bits[v];
      raw[v] = state[v] & ((one << low) - 1u);
      state[v] = refill(state[v] >> low, words);
    }
    if constexpr (D == kFp32) {
      for (int v = 0; v < kVectors; ++v) {
        const U low = L::select(bits[v] < 16u, bits[v], U{} + 16u), high = bits[v] - low;
        raw[v] |= (state[v] & ((one << high) - 1u)) << low;
        state[v] = refill(state[v] >> high, words);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const L::M direct = reinterpret_cast<L::M>(bits[v]) == 0;
      const U magnitude = (one << bits[v]) | raw[v];
      z[v] = L::select(direct, z[v], magnitude << 1 | (z[v] & 1u));
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = begin + v * MS_WIDTH;
    const U moved = apply_move<D>(was[v], z[v]) ^ mirrored[v];
    if constexpr (WHOLE) {
      store_raw<D>(out, at, moved);
    } else {
      store_until<D>(out, at, numel, moved);
    }
  }
  return words;
}

// Decodes a chunk; `table` is [context][kScale] of decoder entries. The states become the last
// ones. Returns how many words were read, or -1 where the chunk needs more than there are.
template <int D>
int64_t rans_decode(const void* old, const uint32_t* down, int64_t numel, uint32_t base,
                    const uint32_t* table, uint32_t* states, const uint16_t* words,
                    int64_t word_count, void* out) {
  using U = VectorLanes::U;
  U state[kVectors];
  for (int v = 0; v < kVectors; ++v) state[v] = load_raw<kFp32>(states, v * MS_WIDTH);
  const uint16_t* at = words;
  const int64_t whole = numel - numel % kStates;
  int64_t i = 0;
  if (word_count >= kStepWords + MS_WIDTH) {
    const uint16_t* fast_end = words + word_count - (kStepWords + MS_WIDTH);
    for (; i < whole && at <= fast_end; i += kStates) {
      at = decode_step<D, true>(old, down, i, numel, base, table, state, at, out);
    }
  }
  // The last words, with zeros behind them, so that a damaged chunk reads no other memory.
  uint16_t room[2 * kStepWords + 2 * MS_WIDTH] = {};
  const int64_t read = at - words, all_left = word_count - read;
  const int64_t left = all_left < kStepWords + MS_WIDTH ? all_left : kStepWords + MS_WIDTH;
  std::memcpy(room, at, 2 * left);
  const uint16_t* last = room;
  for (; i < numel; i += kStates) {
    last = i < whole ? decode_step<D, true>(old, down, i, numel, base, table, state, last, out)
                     : decode_step<D, false>(old, down, i, numel, base, table, state, last, out);
    if (last - room > left) return -1;
  }
  for (int v = 0; v < kVectors; ++v) store_raw<kFp32>(states, v * MS_WIDTH, state[v]);
  return read + (last - room);
}

// `held` becomes `now`. A number's bit of `down` is set if it falls, cleared if it rises.
template <int D>
void moves_keep(void* held, const void* now, int64_t numel, uint32_t* down) {
  using U = VectorLanes::U;
  for (int64_t begin = 0; begin < numel; begin += kStates) {
    uint32_t rose = 0, fell = 0;
    for (int part = 0; part < kStates; part += MS_WIDTH) {
      const int64_t at = begin + part;
      const U is = load_until<D>(now, at, numel);
      const U was_order = order<D>(load_until<D>(held, at, numel)), is_order = order<D>(is);
      rose |= (~lanes_at_least(was_order, is_order) & kAllLanes) << part;
      fell |= (~lanes_at_least(is_order, was_order) & kAllLanes) << part;
      store_until<D>(held, at, numel, is);
    }
    uint32_t& word = down[begin / 32];
    word = (word & ~rose) | fell;
  }
}

// The sum of the mixed words, the first of which has the number `first`.
inline uint32_t mixed_sum(const void* words, int64_t count, uint32_t first) {
  using U = VectorLanes::U;
  U sum = {}, position = first_lanes() + first;
  int64_t i = 0;
  for (; i + MS_WIDTH <= count; i += MS_WIDTH, position += MS_WIDTH) {
    const U mixed = (load_raw<kFp32>(words, i) ^ position * 0x9e3779b9u) * 0x85ebca6bu;
    sum += (mixed ^ mixed >> 15) * 0xc2b2ae35u;
  }
  uint32_t total = 0;
  for (int lane = 0; lane < MS_WIDTH; ++lane) total += sum[lane];
  for (; i < count; ++i) {
    total += mix_word(read_at<uint32_t>(words, i), first + static_cast<uint32_t>(i));
  }
  return total;
}

template <int D>
constexpr void fill_moves(Kernels& kernels) {
  kernels.moves_count[D] = moves_count<D>;
  kernels.rans_encode[D] = rans_encode<D>;
  kernels.rans_decode[D] = rans_decode<D>;
  kernels.moves_keep[D] = moves_keep<D>;
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
