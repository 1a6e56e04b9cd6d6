// The packed coder of moves: bit planes of tiles, and the moves that need more bits. Also the
// checksum of a record. Included once for each instruction set, like vector_lanes.h.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "moves_rans_cpu.h"

namespace megatron_sparse {
namespace MS_ISA {

inline constexpr int kPlaneWords = kMovesTile / 32;

template <int D>
using LanesOf = std::conditional_t<D == kFp32, Lanes32, Lanes16>;

template <class V>
MS_INLINE V load_lanes(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Bit b of 32 moves.
MS_INLINE uint32_t plane_word(const uint16_t* z, int b) {
#if defined(__AVX512F__)
  return _mm512_test_epi16_mask(_mm512_loadu_si512(z), _mm512_set1_epi16(1 << b));
#elif defined(__AVX2__)
  const __m128i shift = _mm_cvtsi32_si128(15 - b);
  const __m256i* from = reinterpret_cast<const __m256i*>(z);
  const __m256i low = _mm256_sll_epi16(_mm256_loadu_si256(from), shift);
  const __m256i high = _mm256_sll_epi16(_mm256_loadu_si256(from + 1), shift);
  const __m256i bytes = _mm256_packs_epi16(low, high);  // keeps the signs
  return _mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0xd8));
#else
  uint32_t word = 0;
  for (int i = 0; i < 32; ++i) word |= static_cast<uint32_t>(z[i] >> b & 1) << i;
  return word;
#endif
}

MS_INLINE uint32_t plane_word(const uint32_t* z, int b) {
  uint32_t word = 0;
  for (int i = 0; i < 32; i += MS_WIDTH) {
    word |= lanes_with(load_raw<kFp32>(z, i), uint32_t{1} << b) << i;
  }
  return word;
}

// Ones in the lanes of 32 that `word` names, from lane `first` on.
template <class L>
MS_INLINE typename L::V lanes_of_word(uint32_t word, int first) {
  using V = typename L::V;
#if defined(__AVX512F__)
  if constexpr (L::kBits == 16) {
    return reinterpret_cast<V>(_mm512_maskz_mov_epi16(word, _mm512_set1_epi16(-1)));
  } else {
    return reinterpret_cast<V>(
        _mm512_maskz_mov_epi32(static_cast<__mmask16>(word >> first), _mm512_set1_epi32(-1)));
  }
#else
  // At most 16 lanes: each has a bit of its own.
  V bit, all;
  for (int lane = 0; lane < L::kCount; ++lane) {
    bit[lane] = typename L::T{1} << lane;
    all[lane] = static_cast<typename L::T>(word >> first);
  }
  return reinterpret_cast<V>((all & bit) == bit);
#endif
}

MS_INLINE void store_bytes(uint8_t* to, VectorLanes::U u) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(u));
#else
  typedef uint8_t B __attribute__((vector_size(MS_WIDTH)));
  const B bytes = __builtin_convertvector(u, B);
#endif
  std::memcpy(to, &bytes, sizeof bytes);
}

struct TileWidth {
  int bits;
  int escapes;
  uint64_t escaped[kMovesTile / 64];  // a bit for each move of the tile
};

// The narrowest width of those with the fewest bytes; `planes` are the tile's `longest` bit planes.
MS_INLINE TileWidth choose_width(const uint32_t (*planes)[kPlaneWords], int longest,
                                 int value_bytes) {
  TileWidth best = {longest, 0, {}};
  TileWidth next = best;
  int best_bytes = longest * (kMovesTile / 8);
  for (next.bits = longest - 1; next.bits >= 0; --next.bits) {
    next.escapes = 0;
    for (int k = 0; k < kMovesTile / 64; ++k) {
      uint64_t plane;
      std::memcpy(&plane, planes[next.bits] + 2 * k, sizeof plane);
      next.escaped[k] |= plane;
      next.escapes += __builtin_popcountll(next.escaped[k]);
    }
    // Narrower widths list at least as many; all 256 would take more than full planes.
    const int listed_bytes = next.escapes * (value_bytes + 1);
    if (listed_bytes > best_bytes) break;
    const int bytes = next.bits * (kMovesTile / 8) + listed_bytes;
    if (bytes <= best_bytes) {
      best = next;
      best_bytes = bytes;
    }
  }
  return best;
}

// The bits that any lane has.
template <class V>
MS_INLINE uint32_t or_lanes(const V& v) {
  uint64_t halves[sizeof v / 8], all = 0;
  std::memcpy(halves, &v, sizeof v);
  for (const uint64_t half : halves) all |= half;
  return static_cast<uint32_t>(all | all >> 32);
}

// Packs a chunk into `out`, which has room for every number in full and a table of escapes; returns
// the bytes written, without padding. `values` and `positions` have room for all escapes and a
// vector behind them.
template <int D>
int64_t moves_pack(const void* old, const void* now, int64_t numel, void* values,
                   uint8_t* positions, uint8_t* out) {
  using L = LanesOf<D>;
  using T = typename L::T;
  using V = typename L::V;
  const int64_t tiles = (numel + kMovesTile - 1) / kMovesTile;
  uint8_t* planes_out = out + (2 * tiles + 15) / 16 * 16;
  std::memset(out, 0, planes_out - out);
  T* value = static_cast<T*>(values);
  uint8_t* position = positions;
  alignas(64) T z[kMovesTile];
  alignas(64) T some[2][kMovesTile];
  alignas(64) uint32_t planes[L::kBits][kPlaneWords];
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = t * kMovesTile;
    const T* was = static_cast<const T*>(old) + begin;
    const T* is = static_cast<const T*>(now) + begin;
    if (numel - begin < kMovesTile) {
      std::memset(some, 0, sizeof some);
      std::memcpy(some[0], was, (numel - begin) * sizeof(T));
      std::memcpy(some[1], is, (numel - begin) * sizeof(T));
      was = some[0];
      is = some[1];
    }
    V any = {};
    for (int i = 0; i < kMovesTile; i += L::kCount) {
      const V move = zigzag<L>(load_lanes<V>(was + i), load_lanes<V>(is + i));
      std::memcpy(z + i, &move, sizeof move);
      any |= move;
    }
    uint32_t used = or_lanes(any);
    if constexpr (L::kBits == 16) used = (used | used >> 16) & 0xffffu;
    const int longest = used == 0 ? 0 : 32 - __builtin_clz(used);
    for (int b = 0; b < longest; ++b) {
      for (int k = 0; k < kPlaneWords; ++k) planes[b][k] = plane_word(z + 32 * k, b);
    }
    const TileWidth width = choose_width(planes, longest, sizeof(T));
    out[t] = static_cast<uint8_t>(width.bits);
    out[tiles + t] = static_cast<uint8_t>(width.escapes);
    std::memcpy(planes_out, planes, width.bits * sizeof planes[0]);
    planes_out += width.bits * sizeof planes[0];
    if (width.escapes == 0) continue;
    for (int i = 0; i < kMovesTile; i += MS_WIDTH) {
      const uint32_t above = static_cast<uint32_t>(width.escaped[i / 64] >> i % 64) & kAllLanes;
      const VectorLanes::U high = load_raw<D>(z, i) >> static_cast<uint32_t>(width.bits);
      store_raw<D>(value, 0, pack_left(high, above));
      const VectorLanes::U at = pack_left(first_lanes() + static_cast<uint32_t>(i), above);
      store_bytes(position, at);
      value += __builtin_popcount(above);
      position += __builtin_popcount(above);
    }
  }
  const int64_t escapes = position - positions;
  std::memcpy(planes_out, values, escapes * sizeof(T));
  std::memcpy(planes_out + escapes * sizeof(T), positions, escapes);
  return planes_out + escapes * (sizeof(T) + 1) - out;
}

// Turns `held` into the new numbers. The chunk's sections were checked against its size.
template <int D>
void moves_unpack(const uint8_t* chunk, int64_t numel, void* held) {
  using L = LanesOf<D>;
  using T = typename L::T;
  using V = typename L::V;
  const int64_t tiles = (numel + kMovesTile - 1) / kMovesTile;
  const uint8_t* plane = chunk + (2 * tiles + 15) / 16 * 16;
  int64_t planes = 0, escapes = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    planes += chunk[t];
    escapes += chunk[tiles + t];
  }
  const uint8_t* value = plane + planes * (kMovesTile / 8);
  const uint8_t* position = value + escapes * sizeof(T);
  alignas(64) T z[kMovesTile];
  alignas(64) T some[kMovesTile];
  alignas(64) uint32_t words[L::kBits][kPlaneWords];
  for (int64_t t = 0; t < tiles; ++t) {
    const int width = chunk[t], listed = chunk[tiles + t];
    std::memcpy(words, plane, width * sizeof words[0]);
    plane += width * sizeof words[0];
    for (int i = 0; i < kMovesTile; i += L::kCount) {
      V move = {};
      T bit = 1;
      for (int b = 0; b < width; ++b, bit = static_cast<T>(bit + bit)) {
        move |= lanes_of_word<L>(words[b][i / 32], i % 32) & bit;
      }
      std::memcpy(z + i, &move, sizeof move);
    }
    for (int n = 0; n < listed; ++n, value += sizeof(T)) {
      T high;
      std::memcpy(&high, value, sizeof high);
      // A full width leaves nothing above it; the shift must stay below the type's bits.
      if (width < L::kBits) z[*position] |= static_cast<T>(high << width);
      ++position;
    }
    T* was = static_cast<T*>(held) + t * kMovesTile;
    const int64_t left = numel - t * kMovesTile;
    if (left < kMovesTile) std::memcpy(some, was, left * sizeof(T));
    T* target = left < kMovesTile ? some : was;
    for (int i = 0; i < kMovesTile; i += L::kCount) {
      const V moved = apply_move<L>(load_lanes<V>(target + i), load_lanes<V>(z + i));
      std::memcpy(target + i, &moved, sizeof moved);
    }
    if (left < kMovesTile) std::memcpy(was, some, left * sizeof(T));
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
    uint32_t word;
    std::memcpy(&word, static_cast<const char*>(words) + 4 * i, sizeof word);
    total += mix_word(word, first + static_cast<uint32_t>(i));
  }
  return total;
}

template <int D>
constexpr void fill_moves(Kernels& kernels) {
  kernels.moves_count[D] = moves_count<D>;
  kernels.rans_encode[D] = rans_encode<D>;
  kernels.rans_decode[D] = rans_decode<D>;
  kernels.moves_pack[D] = moves_pack<D>;
  kernels.moves_unpack[D] = moves_unpack<D>;
}

}  // namespace MS_ISA
}  // namespace megatron_sparse
