// Converts a block of a panel to numbers of bf16 or fp32, for each format. widener_of is built from these functions.
#pragma once

#include "gguf/block_rows.h"
#include "gguf/widening.h"

namespace rootgraft {

// Stores a word of each column.
INLINE void store_pair(uint32_t* to, const Floats& first, const Floats& second) {
#if defined(__AVX512BF16__)
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0]);
  store_words(to, Words{{(WordPart)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both)}});
#else
  uint16_t halves[2][kWidth];
  Bf16::store(halves[0], first);
  Bf16::store(halves[1], second);
  store_words(to, Bf16::interleave(halves[0], halves[1]));
#endif
}

template <class E, int I = 0, class Block>
INLINE void widen_block(const Block& block, uint32_t* to) {
  if constexpr (I < kBlockValues) {
    if constexpr (E::kPerWord == 1) {
      store(reinterpret_cast<float*>(to), block.template number<I>());
    } else {
      store_pair(to, block.template number<I>(), block.template number<I + 1>());
    }
    widen_block<E, I + E::kPerWord>(block, to + kWidth);
  }
}

#if ROOTGRAFT_AMX
// The fields of the last column, which are in left-over bits.
template <Format F>
INLINE void store_last_fields(const uint32_t* from, uint32_t* to) {
  using Fields = RowFields<F>;
  if constexpr (Fields::kLane == 16) {
    __m512i all = _mm512_setzero_si512();
    for_constants<Fields::kRegisters>([&](auto i) {
      const __m512i spare = shifted_halves<Fields::kFirstSpare>(_mm512_loadu_si512(from + i.value * kWidth));
      all = _mm512_or_si512(all, shifted_halves<-i.value * Fields::kSpare>(spare));
    });
    _mm512_store_si512(to, _mm512_cvtepu16_epi32(_mm512_castsi512_si256(all)));
    _mm512_store_si512(to + kWidth, _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(all, 1)));
  } else {
    for (int half = 0; half < 2; half++) {
      __m512i all = _mm512_setzero_si512();
      for_constants<Fields::kRegisters>([&](auto i) {
        const __m512i spare = shifted_words<Fields::kFirstSpare>(_mm512_loadu_si512(from + (2 * i.value + half) * kWidth));
        all = _mm512_or_si512(all, shifted_words<-i.value * Fields::kSpare>(spare));
      });
      _mm512_store_si512(to + half * kWidth, all);
    }
  }
}

template <class E, Format F>
INLINE void widen_block(const FieldRowNumbers<F>& block, uint32_t* to) {
  if constexpr (E::kPerWord == Bf16::kPerWord) {
    widen_rows_to_panel(block, to);
  } else {
    alignas(64) uint32_t last[kBlockValues];
    if constexpr (RowFields<F>::kSpare > 0) store_last_fields<F>(block.from, last);
    for_constants<kBlockValues>([&](auto i) {
      store(reinterpret_cast<float*>(to + i.value * kWidth), block.template number<i.value>(last));
    });
  }
}
#endif

template <class E, Format F>
void widen_next(BlockPlace& place, int ahead, uint32_t* to) {
  prefetch_block<F>(place, ahead);
  if constexpr (kHasFields<F>) widen_block<E, F>(next_block<F>(place), to);
  else widen_block<E>(next_block<F>(place), to);
}

template <class E>
Widener widener_of(Format format) {
  Widener found = {};
  with_block_format(format, [&](auto f) { found = {&block_place<f.value>, &widen_next<E, f.value>}; });
  return found;
}

}  // namespace rootgraft
