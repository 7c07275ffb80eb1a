// Blocks arranged by columns, so that AMX takes a panel's 16 columns as rows of its first operand, and rows of x as the
// columns of its second: the same sums, term by term.
//
//   nibbles  register i of 4 has 32 halves of 16 bits, for 32 places along K: in each, columns 4 i .. 4 i + 3 from below
//   bytes    registers 2 i and 2 i + 1 have a word for each of the first 16 places, and of the others: the same columns
//
// To round nibbles to bf16 there are only sixteen numbers to round for a column of a block; nibbles then choose.
#pragma once

#include "gguf/block_numbers.h"

#if ROOTGRAFT_AMX

namespace rootgraft {

constexpr int kRowWords = kWidth * kAmxWords;  // of a block that is widened: 16 rows of 32 numbers

// Keeps a compiler from replacing loads of single lanes by permutations of registers, which take longer.
template <class T>
INLINE void stays_in_memory(T& value) {
  asm volatile("" : "+m"(value));
}

// Factors of a block's columns: scales and minima, or scales of the first sixteen places and of the others. They are
// stored some time before they are loaded one by one, since a load waits for a store of more than it takes.
struct alignas(64) RowFactors {
  float of[2][kWidth];

  INLINE void take(const NibbleRowNumbers& block) { take(block.scale, block.minimum); }
  INLINE void take(const ByteRowNumbers& block) { take(block.scales[0], block.scales[1]); }

 private:
  INLINE void take(const Floats& first, const Floats& second) {
    store(of[0], first);
    store(of[1], second);
    stays_in_memory(of);
  }
};

INLINE void widen_rows(const NibbleRowNumbers& block, const RowFactors& factors, uint32_t* to) {
  const __m512i nibble = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
  const auto numbers = [&](int column) {
    return _mm512_fmadd_ps(_mm512_set1_ps(factors.of[0][column]), sixteen_numbers(),
                           _mm512_set1_ps(factors.of[1][column]));
  };
  // Numbers of two columns, and those that are chosen of them by indices of five bits.
  const auto both = [&](int column, int other) { return (__m512i)_mm512_cvtne2ps_pbh(numbers(other), numbers(column)); };
  const auto put = [&](int column, const __m512i& at, const __m512i& of) {
    _mm512_store_si512(to + column * kAmxWords, _mm512_permutexvar_epi16(at, of));
  };
  const auto of_second = [&](const __m512i& at) { return _mm512_ternarylogic_epi32(at, nibble, second, 0xEA); };
#pragma GCC unroll 4
  for (int column = 0; column < kWidth; column += 4) {
    const __m512i places = _mm512_loadu_si512(block.from + column / 4 * kWidth);
    const __m512i low = both(column, column + 1), high = both(column + 3, column + 2);
    put(column, _mm512_and_si512(places, nibble), low);
    put(column + 1, of_second(_mm512_srli_epi16(places, 4)), low);
    put(column + 2, of_second(_mm512_srli_epi16(places, 8)), high);
    put(column + 3, _mm512_srli_epi16(places, 12), high);
  }
}

INLINE void widen_rows(const ByteRowNumbers& block, const RowFactors& factors, uint32_t* to) {
  // A byte becomes a number as the digits behind those of 2^15, which is subtracted.
  const __m512i base = _mm512_castps_si512(_mm512_set1_ps(32768.0f)), digits = _mm512_set1_epi32(0xFF00);
  const __m512 zero = _mm512_set1_ps(32768.0f + 128.0f);
  const auto number = [&](const __m512i& word, int half, int column) {
    const __m512 value = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(word, digits, base, 0xEA));
    return _mm512_mul_ps(_mm512_sub_ps(value, zero), _mm512_set1_ps(factors.of[half][column]));
  };
#pragma GCC unroll 4
  for (int column = 0; column < kWidth; column += 4) {
    const __m512i first = _mm512_loadu_si512(block.from + column / 2 * kWidth);
    const __m512i second = _mm512_loadu_si512(block.from + (column / 2 + 1) * kWidth);
    const auto put = [&](int place, auto shift) {
      const __m512 low = number(shift(first), 0, column + place), high = number(shift(second), 1, column + place);
      _mm512_store_si512(to + (column + place) * kAmxWords, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    };
    put(0, [](const __m512i& words) { return _mm512_slli_epi32(words, 8); });
    put(1, [](const __m512i& words) { return words; });
    put(2, [](const __m512i& words) { return _mm512_srli_epi32(words, 8); });
    put(3, [](const __m512i& words) { return _mm512_srli_epi32(words, 16); });
  }
}

}  // namespace rootgraft

#endif
