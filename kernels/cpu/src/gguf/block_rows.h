// Blocks arranged by columns. AMX then takes a panel's 16 columns as rows of its first operand, and rows of x as the
// columns of its second. The sums are the same, term by term.
//
//   nibbles  register i of 4 has 32 lanes of 16 bits, for 32 places along K: each holds columns 4 i .. 4 i + 3, lowest
// first   bytes    registers 2 i and 2 i + 1 have a word for each of the first 16 places, and of the others: the same
// columns   fields   like nibbles, with 2, 3, 4 or 5 bits and as many columns as fit in 16 bits; with 6 bits like
// bytes, with five            columns in a word. The 1 or 2 bits left over at the top of the lanes hold the number of
// the last column, spread            over the registers
//
// Numbers of a few bits have only 4 to 32 different values for a column of a block, or twice as many if its halves have
// separate scales. So only these values are rounded to bf16, and the fields choose among them.
#pragma once

#include <cstring>

#include "gemm/tile_amx.h"
#include "gguf/block_numbers.h"

#if ROOTGRAFT_AMX

namespace rootgraft {

constexpr int kRowWords = kWidth * kAmxWords;  // words of a block that is widened: 16 rows of 32 numbers

// Prevents a compiler from replacing loads of single lanes by permutations of registers, which take longer.
template <class T>
INLINE void stays_in_memory(T& value) {
  asm volatile("" : "+m"(value));
}

// Whether the halves of a block have separate scales.
template <Format F>
constexpr bool kHasTwoScales = kHasHalfScales<F> || kUnarranged<F> == Format::kSuperFloat4;

// Factors of a block's columns. They are: scales and minima; or the scales of both halves, side by side, and the minima
// likewise; or scales, and minus 384 or 288 times the scales. They are stored some time before they are loaded one by
// one, because a load waits for a store that is wider than itself.
struct alignas(64) RowFactors {
  float of[4][kWidth];

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

  template <Format F>
  INLINE void take(const FieldRowNumbers<F>& block) {
    if constexpr (kUnarranged<F> == Format::kSuper6Bits) {
      for (int half = 0; half < 2; half++) {
        store(of[half], block.scales[half]);
        store(of[2 + half], block.scales[half] * broadcast(-kSixZero));
      }
    } else if constexpr (kHasTwoScales<F>) {
      store_pairs(&of[0][0], block.scales);
      if constexpr (kHasMinimumFactor<F>) store_pairs(&of[0][0] + 2 * kWidth, block.minima);
    } else {
      store(of[0], block.scales[0]);
      if constexpr (kHasMinima<F>) store(of[1], block.minima[0]);
    }
    stays_in_memory(of);
  }

  // The factor of one column, of both halves of a column, or of two columns, repeated in all lanes.
  INLINE __m512 one(int i, int column) const { return _mm512_set1_ps(of[i][column]); }
  INLINE __m512 pair(int i, int column) const {
    return _mm512_castpd_ps(_mm512_set1_pd(load_as<double>(&of[0][0] + i * kWidth + 2 * column)));
  }
  INLINE __m512 two_pairs(int i, int column) const {
    return _mm512_broadcast_f32x4(_mm_load_ps(&of[0][0] + i * kWidth + 2 * column));
  }

  static constexpr float kByteZero = 384.0f, kSixZero = 288.0f;

 private:
  // Stores both halves' factors of each column side by side.
  static INLINE void store_pairs(float* to, const Floats (&halves)[2]) {
    alignas(64) static constexpr int32_t kOrder[2][kWidth] = {
        {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23},
        {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}};
    for (int i = 0; i < 2; i++) {
      const __m512i order = _mm512_load_si512(kOrder[i]);
      _mm512_store_ps(to + i * kWidth, _mm512_permutex2var_ps((__m512)halves[0].part[0], order, (__m512)halves[1].part[0]));
    }
  }
};

// Chooses one of 32 numbers of 16 bits, those of two columns, for each place. The nibbles of four columns are in a
// word. The outer columns take a shift and vpermw, which use the first vector port; the inner ones take shuffles of
// bytes, which use the second port.
class NibbleChoice {
 public:
  // The column whose nibbles are in the lowest bits, for the first sixteen numbers.
  INLINE __m512i first(const __m512i& places, const __m512i& of) const {
    return _mm512_permutexvar_epi16(_mm512_and_si512(places, _mm512_set1_epi16(15)), of);
  }
  // The next column, for the last sixteen numbers.
  INLINE __m512i second(const __m512i& places, const __m512i& of) const { return by_bytes<1>(places, of); }
  INLINE __m512i third(const __m512i& places, const __m512i& of) const { return by_bytes<2>(places, of); }
  // The last column, for the first sixteen numbers.
  INLINE __m512i fourth(const __m512i& places, const __m512i& of) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(places, 12), of);
  }

 private:
  // Sets both bytes of a word to twice its nibble, plus the offset of the last sixteen words and of their odd bytes.
  template <int kColumn>
  static INLINE __m512i by_bytes(const __m512i& places, const __m512i& of) {
    constexpr int64_t kFrom = 4 * kColumn - 1, kEach = kFrom * 0x0101010101010101, kWords = 0x3030202010100000;
    const __m512i twice = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(kWords + kEach), places);
    const __m512i at = _mm512_ternarylogic_epi32(twice, _mm512_set1_epi8(0x1E), _mm512_set1_epi16(0x2120), 0xEA);
    return _mm512_permutexvar_epi8(at, of);
  }
};

// numbers(column) returns the numbers that the column's nibbles choose from.
template <class Numbers>
INLINE void widen_nibble_rows(const uint32_t* from, Numbers numbers, uint32_t* to) {
  const NibbleChoice choose;
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

// The numbers d (q - 8) of two columns are made from d, 3 d, 5 d and 7 d, rounded. With other exponents and signs,
// which are added to their bits, these are all of the numbers except 0.
constexpr int symmetric_magnitude(int i) { return i % 16 < 8 ? 8 - i % 16 : i % 16 - 8; }
constexpr int twos_in(int number) { return number % 2 || !number ? 0 : 1 + twos_in(number / 2); }

struct SymmetricBits {
  uint16_t of[32];
};

// The bits that are added.
constexpr SymmetricBits symmetric_bits() {
  SymmetricBits result = {};
  for (int i = 0; i < 32; i++) {
    result.of[i] = (uint16_t)((i % 16 < 8 ? 0x8000 : 0) + (twos_in(symmetric_magnitude(i)) << 7));
  }
  return result;
}

// Both bytes of the words of d, 3 d, 5 d, 7 d of eight columns, one after another.
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
  // A byte becomes a number by setting the digits below those of 256; 384 then stands for 0. This is exact, as the
  // product.
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
      // Bits 8 place .. of each word become bits 15 ..
      const int64_t one = (8 * place + 57) % 64 << 8 | (8 * place + 1) << 16, both = one | (one + 0x202000) << 32;
      const __m512 low = number(first, column + place, both), high = number(second, column + place, both);
      _mm512_store_si512(to + (column + place) * kAmxWords, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

// A table of 32 numbers of 16 bits holds those of 1, 2 or 4 columns. The index of a number has, from the lowest bit:
// the half of the block, if halves have separate scales; with four columns, which of two; the field; and which of two
// columns, or of two pairs.
template <Format F>
struct FieldTables {
  using Fields = RowFields<F>;
  static constexpr int kEntries = (1 << Fields::kBits) * (kHasTwoScales<F> ? 2 : 1), kColumns = 32 / kEntries;
  static constexpr int kFieldBit = kColumns == 4 ? 2 : kHasTwoScales<F> ? 1 : 0;

  // Bits of an index that follow from column and half.
  static constexpr int16_t known_bits(int column, int half) {
    const int among = column % kColumns;
    const int bits = kColumns == 4 ? (among % 2) << 1 | (among / 2) << 4 : among << 4;
    return (int16_t)(bits | (kHasTwoScales<F> ? half : 0));
  }

  // Sixteen numbers of the table that begins with a column.
  static INLINE __m512 sixteen(const RowFactors& factors, int column, int i) {
    alignas(64) static constexpr auto kNumbers = [] {
      struct { float of[2][kWidth]; } found = {};
      for (int place = 0; place < 2 * kWidth; place++) {
        const int field = (kColumns == 1 ? place : place % kWidth) >> kFieldBit;
        float number = (float)field;
        if (kIsTable<F>) number = kFourBits<kUnarranged<F>>.of[field];
        if (kUnarranged<F> == Format::kSuperGrid) number = kGridValues[field];
        if (kUnarranged<F> == Format::kSuper3Bits) number -= 4;
        found.of[place / kWidth][place % kWidth] = number;
      }
      return found;
    }();
    const __m512 numbers = _mm512_load_ps(kNumbers.of[i]);
    if constexpr (!kHasTwoScales<F>) {
      return _mm512_fmadd_ps(factors.one(0, column), numbers, factors.one(1, column));
    } else if constexpr (kColumns == 4) {
      const int pair = column + 2 * i;
      return _mm512_fmadd_ps(factors.two_pairs(0, pair), numbers, factors.two_pairs(2, pair));
    } else {
      return _mm512_mul_ps(factors.pair(0, kColumns == 2 ? column + i : column), numbers);
    }
  }
};

// Shifts lanes to the right, or to the left.
template <int kBy>
INLINE __m512i shifted_halves(const __m512i& lanes) {
  if constexpr (kBy > 0) return _mm512_srli_epi16(lanes, kBy);
  else if constexpr (kBy < 0) return _mm512_slli_epi16(lanes, -kBy);
  else return lanes;
}
template <int kBy>
INLINE __m512i shifted_words(const __m512i& lanes) {
  if constexpr (kBy > 0) return _mm512_srli_epi32(lanes, kBy);
  else if constexpr (kBy < 0) return _mm512_slli_epi32(lanes, -kBy);
  else return lanes;
}

// Not inlined: the code of each format is long, and is called from products of 16, 32, 48 and 64 rows and from panels.
template <Format F>
__attribute__((noinline)) void widen_field_rows(const uint32_t* from, const RowFactors& factors, uint32_t* to) {
  using Fields = RowFields<F>;
  using Tables = FieldTables<F>;
  constexpr int kBit = Tables::kFieldBit;
  const __m512i mask = _mm512_set1_epi16((int16_t)(Fields::kMask << kBit));
  const auto lanes = [&](int i) { return _mm512_loadu_si512(from + i * kWidth); };
  for_constants<kWidth / Tables::kColumns>([&](auto group) {
    constexpr int kFirst = group.value * Tables::kColumns;
    const auto table =
        (__m512i)_mm512_cvtne2ps_pbh(Tables::sixteen(factors, kFirst, 1), Tables::sixteen(factors, kFirst, 0));
    for_constants<Tables::kColumns>([&](auto i) {
      constexpr int kColumn = kFirst + i.value;
      const __m256i low = _mm256_set1_epi16(Tables::known_bits(kColumn, 0));
      const __m256i high = _mm256_set1_epi16(Tables::known_bits(kColumn, 1));
      const __m512i known = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      __m512i index;
      if constexpr (kColumn < Fields::kCount * Fields::kRegisters) {
        index = shifted_halves<kColumn % Fields::kCount * Fields::kBits - kBit>(lanes(kColumn / Fields::kCount));
        if constexpr (kBit > 0) index = _mm512_ternarylogic_epi32(index, mask, known, 0xEA);
      } else {
        index = known;
        for_constants<Fields::kRegisters>([&](auto part) {
          constexpr int kTo = kBit + part.value * Fields::kSpare;
          const __m512i bits = _mm512_set1_epi16((int16_t)(((1 << Fields::kSpare) - 1) << kTo));
          const __m512i moved = shifted_halves<Fields::kFirstSpare - kTo>(lanes(part.value));
          index = _mm512_ternarylogic_epi32(index, moved, bits, 0xF8);
        });
      }
      _mm512_store_si512(to + kColumn * kAmxWords, _mm512_permutexvar_epi16(index, table));
    });
  });
}

// Six bits become a number by setting the digits below those of 256; 288 then stands for 0. This is exact, as the
// product.
template <Format F>
__attribute__((noinline)) void widen_six_bit_rows(const uint32_t* from, const RowFactors& factors, uint32_t* to) {
  using Fields = RowFields<F>;
  constexpr int kDigit = 15;
  const __m512i base = _mm512_castps_si512(_mm512_set1_ps(256.0f)), digits = _mm512_set1_epi32(Fields::kMask << kDigit);
  const auto lanes = [&](int i, int half) { return _mm512_loadu_si512(from + (2 * i + half) * kWidth); };
  for_constants<kWidth>([&](auto each) {
    constexpr int kColumn = each.value;
    const auto number = [&](int half) {
      __m512i value;
      if constexpr (kColumn < Fields::kCount * Fields::kRegisters) {
        constexpr int kAt = kColumn % Fields::kCount * Fields::kBits;
        const __m512i words = lanes(kColumn / Fields::kCount, half);
        value = _mm512_ternarylogic_epi32(shifted_words<kAt - kDigit>(words), digits, base, 0xEA);
      } else {
        value = base;
        for_constants<Fields::kRegisters>([&](auto part) {
          constexpr int kTo = kDigit + part.value * Fields::kSpare;
          const __m512i bits = _mm512_set1_epi32(((1 << Fields::kSpare) - 1) << kTo);
          const __m512i words = shifted_words<Fields::kFirstSpare - kTo>(lanes(part.value, half));
          value = _mm512_ternarylogic_epi32(value, words, bits, 0xF8);
        });
      }
      return _mm512_fmadd_ps(_mm512_castsi512_ps(value), factors.one(half, kColumn), factors.one(2 + half, kColumn));
    };
    const __m512 low = number(0), high = number(1);
    _mm512_store_si512(to + kColumn * kAmxWords, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  });
}

// Converts a block's words to 16 rows of 32 numbers.
template <Format F>
INLINE void widen_rows(const uint32_t* from, const RowFactors& factors, uint32_t* to) {
  if constexpr (kUnarranged<F> == Format::kSuper6Bits) {
    widen_six_bit_rows<F>(from, factors, to);
  } else if constexpr (kHasFields<F> && (!kIsTable<F> || kHasTwoScales<F>)) {
    widen_field_rows<F>(from, factors, to);
  } else if constexpr (kIsSymmetric<F>) {
    widen_symmetric_rows(from, factors, to);
  } else if constexpr (kIsTable<F>) {
    const __m512 table = _mm512_loadu_ps(values_of<F>());
    widen_nibble_rows(from, [&](int column) { return _mm512_mul_ps(factors.one(0, column), table); }, to);
  } else if constexpr (kIsNibbles<F>) {
    widen_nibble_rows(from, [&](int column) {
      return _mm512_fmadd_ps(factors.one(0, column), sixteen_numbers(), factors.one(1, column));
    }, to);
  } else {
    widen_byte_rows(from, factors, to);
  }
}

// Converts a block's words to a panel's words, K downwards.
template <Format F>
INLINE void widen_rows_to_panel(const FieldRowNumbers<F>& block, uint32_t* to) {
  alignas(64) RowFactors factors;
  alignas(64) uint32_t rows[kRowWords];
  factors.take(block);
  widen_rows<F>(block.from, factors, rows);
  const uint32_t* each[kWidth];
  for (int i = 0; i < kWidth; i++) each[i] = rows + i * kAmxWords;
  transpose_rows(each, kAmxWords, to);
}

}  // namespace rootgraft

#endif
