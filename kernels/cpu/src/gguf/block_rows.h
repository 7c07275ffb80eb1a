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

// Factors of a block's columns: scales and minima; or scales, and 384 times those, less than nothing. They are stored some time before they are loaded one by one, since a load waits for a store of
// more than it takes.
struct alignas(64) RowFactors {
  float of[2][kWidth];

  INLINE void take(const NibbleRowNumbers& block) {
    store(of[0], block.scale);
    store(of[1], block.minimum);
    stays_in_memory(of);
  }
  INLINE void take(const ByteRowNumbers& block) {
    store(of[0], block.scale);
    store(of[1], block.scale * broadcast(-kByteZero));
    stays_in_memory(of);
  }
  INLINE void take(const SymmetricRowNumbers& block) {
    store(of[0], block.scale);
    stays_in_memory(of);
  }

  static constexpr float kByteZero = 384.0f;
};

// Chooses one of 32 numbers of 16 bits, those of two columns, for each place: nibbles of four columns are a word. The
// outer columns take a shift and vpermw, which occupy the first port of vectors, the inner ones shuffles of bytes and the
// second port.
class NibbleChoice {
 public:
  // The column with nibbles in the lowest bits, of the first sixteen numbers.
  INLINE __m512i first(const __m512i& places, const __m512i& of) const {
    return _mm512_permutexvar_epi16(_mm512_and_si512(places, _mm512_set1_epi16(15)), of);
  }
  // The next two, of the last sixteen.
  INLINE __m512i second(const __m512i& places, const __m512i& of) const { return by_bytes<1>(places, of); }
  INLINE __m512i third(const __m512i& places, const __m512i& of) const { return by_bytes<2>(places, of); }
  // The last one, of the first sixteen.
  INLINE __m512i fourth(const __m512i& places, const __m512i& of) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(places, 12), of);
  }

 private:
  // Both bytes of a word become twice its nibble, with the places of the last sixteen words and of their odd bytes.
  template <int kColumn>
  static INLINE __m512i by_bytes(const __m512i& places, const __m512i& of) {
    constexpr int64_t kFrom = 4 * kColumn - 1, kEach = kFrom * 0x0101010101010101, kWords = 0x3030202010100000;
    const __m512i twice = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(kWords + kEach), places);
    const __m512i at = _mm512_ternarylogic_epi32(twice, _mm512_set1_epi8(0x1E), _mm512_set1_epi16(0x2120), 0xEA);
    return _mm512_permutexvar_epi8(at, of);
  }
};

INLINE void widen_nibble_rows(const uint32_t* from, const RowFactors& factors, uint32_t* to) {
  const NibbleChoice choose;
  const auto numbers = [&](int column) {
    return _mm512_fmadd_ps(_mm512_set1_ps(factors.of[0][column]), sixteen_numbers(),
                           _mm512_set1_ps(factors.of[1][column]));
  };
  const auto both = [&](int column, int other) { return (__m512i)_mm512_cvtne2ps_pbh(numbers(other), numbers(column)); };
  const auto put = [&](int column, const __m512i& chosen) { _mm512_store_si512(to + column * kAmxWords, chosen); };
#pragma GCC unroll 4
  for (int column = 0; column < kWidth; column += 4) {
    const __m512i places = _mm512_loadu_si512(from + column / 4 * kWidth);
    const __m512i low = both(column, column + 1), high = both(column + 3, column + 2);
    put(column, choose.first(places, low));
    put(column + 1, choose.second(places, low));
    put(column + 2, choose.third(places, high));
    put(column + 3, choose.fourth(places, high));
  }
}

// Numbers d (q - 8) of two columns are made of d, 3 d, 5 d and 7 d, rounded: with other exponents and signs, which are
// added to their bits, these are all of them but 0.
constexpr int symmetric_magnitude(int i) { return i % 16 < 8 ? 8 - i % 16 : i % 16 - 8; }
constexpr int twos_in(int number) { return number % 2 || !number ? 0 : 1 + twos_in(number / 2); }

struct SymmetricBits {
  uint16_t of[32];
};

// What is added.
constexpr SymmetricBits symmetric_bits() {
  SymmetricBits result = {};
  for (int i = 0; i < 32; i++) {
    result.of[i] = (uint16_t)((i % 16 < 8 ? 0x8000 : 0) + (twos_in(symmetric_magnitude(i)) << 7));
  }
  return result;
}

// Both bytes of words of d, 3 d, 5 d, 7 d of eight columns, which follow each other.
constexpr SymmetricBits symmetric_bytes(int column, int other) {
  SymmetricBits result = {};
  for (int i = 0; i < 32; i++) {
    const int magnitude = symmetric_magnitude(i), word = (magnitude >> twos_in(magnitude)) / 2 * 8 + (i < 16 ? column : other);
    result.of[i] = (uint16_t)(2 * word | (2 * word + 1) << 8);
  }
  return result;
}

template <int kColumn, int kOther>
INLINE __m512i symmetric_numbers(const __m512i& eight) {
  alignas(64) static constexpr SymmetricBits kBytes = symmetric_bytes(kColumn, kOther), kAdded = symmetric_bits();
  constexpr __mmask32 kNotZero = 0xFEFFFEFF;
  const __m512i odd = _mm512_permutexvar_epi8(_mm512_load_si512(kBytes.of), eight);
  return _mm512_maskz_add_epi16(kNotZero, odd, _mm512_load_si512(kAdded.of));
}

INLINE void widen_symmetric_rows(const uint32_t* from, const RowFactors& factors, uint32_t* to) {
  const NibbleChoice choose;
  const __m512 one = _mm512_load_ps(factors.of[0]);
  const auto times = [&](float factor) { return _mm512_mul_ps(one, _mm512_set1_ps(factor)); };
  const auto low = (__m512i)_mm512_cvtne2ps_pbh(times(3), one), high = (__m512i)_mm512_cvtne2ps_pbh(times(7), times(5));
  const auto put = [&](int column, const __m512i& chosen) { _mm512_store_si512(to + column * kAmxWords, chosen); };
  const auto four = [&](int column, const __m512i& first, const __m512i& second) {
    const __m512i places = _mm512_loadu_si512(from + column / 4 * kWidth);
    put(column, choose.first(places, first));
    put(column + 1, choose.second(places, first));
    put(column + 2, choose.third(places, second));
    put(column + 3, choose.fourth(places, second));
  };
  const auto eight = [&](int column, const __m512i& of) {
    four(column, symmetric_numbers<0, 1>(of), symmetric_numbers<3, 2>(of));
    four(column + 4, symmetric_numbers<4, 5>(of), symmetric_numbers<7, 6>(of));
  };
  eight(0, _mm512_shuffle_i32x4(low, high, 0x88));
  eight(8, _mm512_shuffle_i32x4(low, high, 0xDD));
}

INLINE void widen_byte_rows(const uint32_t* from, const RowFactors& factors, uint32_t* to) {
  // A byte becomes a number as the digits behind those of 256, of which 384 is nothing: exact, as the product is.
  const __m512i base = _mm512_castps_si512(_mm512_set1_ps(256.0f)), digits = _mm512_set1_epi32(0x7F8000);
  const auto number = [&](const __m512i& word, int column, int64_t bits) {
    const __m512i shifted = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(bits), word);
    const __m512 value = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(shifted, digits, base, 0xEA));
    return _mm512_fmadd_ps(value, _mm512_set1_ps(factors.of[0][column]), _mm512_set1_ps(factors.of[1][column]));
  };
#pragma GCC unroll 4
  for (int column = 0; column < kWidth; column += 4) {
    const __m512i first = _mm512_loadu_si512(from + column / 2 * kWidth);
    const __m512i second = _mm512_loadu_si512(from + (column / 2 + 1) * kWidth);
#pragma GCC unroll 4
    for (int64_t place = 0; place < 4; place++) {
      // Bits 8 place .. of each word as bits 15 ..
      const int64_t one = (8 * place + 57) % 64 << 8 | (8 * place + 1) << 16, both = one | (one + 0x202000) << 32;
      const __m512 low = number(first, column + place, both), high = number(second, column + place, both);
      _mm512_store_si512(to + (column + place) * kAmxWords, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

// A block's words to 16 rows of 32 numbers.
template <Format F>
INLINE void widen_rows(const uint32_t* from, const RowFactors& factors, uint32_t* to) {
  if constexpr (kIsSymmetric<F>) widen_symmetric_rows(from, factors, to);
  else if constexpr (kIsNibbles<F>) widen_nibble_rows(from, factors, to);
  else widen_byte_rows(from, factors, to);
}

}  // namespace rootgraft

#endif
