// Weight-only quantised linear: y = x W^T + b. W is in bytes that are widened to the type of x, in which each of them is
// exact: signed numbers with a scale for each column, by which its sum is multiplied; or FP8 with scales for groups of
// inputs, by which the sums of groups are multiplied, in fp32. AMX adds up all groups by itself: there the numbers of
// FP8 are scaled and rounded to bf16 before.
#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "int8/int8_dot.h"
#include "int8/weight_only_linear.h"
#include "simd/partition.h"
#include "simd/parallel.h"
#include "gemm/tile_amx.h"

namespace rootgraft {
namespace {

#if ROOTGRAFT_AMX
constexpr int kMostRows = kMostAmxRows;  // limit of rows of a product
#else
constexpr int kMostRows = kTileRows;
#endif

constexpr int64_t kSmall = 1 << 14;  // number of multiplications below which one thread is faster
constexpr int kNoMemory = 2;

// Byte i of each lane as a number, minus the 128 with which it is stored.
INLINE FloatPart number(const WordPart& bytes, int i) {
  const IntPart value = (IntPart)((bytes ^ 0x80808080u) << (24 - 8 * i)) >> 24;
  return __builtin_convertvector(value, FloatPart);
}

// Converts words of 16 columns, each with four values along K, to as many words of E. Numbers of 8 bits are exact in
// both types.
template <class E>
INLINE void widen_word(const Words& bytes, uint32_t* to) {
  for (int part = 0; part < kParts; part++) {
    const auto put = [&](int word, const WordPart& value) {
      std::memcpy(to + word * kWidth + part * kLanes, &value, sizeof(value));
    };
#pragma GCC unroll 4
    for (int i = 0; i < kWordBytes; i += E::kPerWord) {
      const WordPart first = (WordPart)number(bytes.part[part], i);
      if constexpr (E::kPerWord == 1) put(i, first);
      else put(i / 2, first >> 16 | ((WordPart)number(bytes.part[part], i + 1) & 0xFFFF0000u));
    }
  }
}

#if defined(__AVX512VBMI__)
// The bits of the bf16 numbers 0 .. 127, with separate low and high bytes.
struct Bf16Bytes {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr Bf16Bytes() {
    for (int value = 1; value < 128; value++) {
      int exponent = 0;
      while (value >> (exponent + 1)) exponent++;
      const int bits = (127 + exponent) << 7 | (value << (7 - exponent) & 0x7F);
      low[value] = bits & 0xFF;
      high[value] = bits >> 8;
    }
  }
};

constexpr Bf16Bytes kBf16Bytes;

// The same by table lookup of bytes.
template <>
INLINE void widen_word<Bf16>(const Words& bytes, uint32_t* to) {
  // In 128 bits of 4 columns: the first two values of each, then the other two.
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const __m512i sign = _mm512_set1_epi8((char)0x80);
  const __m512i value = _mm512_xor_si512(_mm512_shuffle_epi8((__m512i)bytes.part[0], order), sign);
  const __m512i magnitude = _mm512_abs_epi8(value);
  const auto look_up = [&](const uint8_t* table) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), magnitude, _mm512_load_si512(table + 64));
  };
  const __m512i low = look_up(kBf16Bytes.low);
  // The magnitude of -128 is 128, which is outside of the tables. Its lowest seven bits are those of 0, and its low
  // byte is that of 0 too; only its high byte is set here.
  const __m512i magnitudes = _mm512_mask_mov_epi8(look_up(kBf16Bytes.high), _mm512_cmpeq_epi8_mask(value, sign),
                                                  _mm512_set1_epi8(0x43));
  const __m512i high = _mm512_ternarylogic_epi32(magnitudes, value, sign, 0xF8);  // a | b & c
  _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
  _mm512_storeu_si512(to + kWidth, _mm512_unpackhi_epi8(low, high));
}
#endif

// E4M3 as numbers of fp32: bytes 2 i and 2 i + 1 of each lane, divided by kFloat8Unit, by which sums are multiplied.
struct Float8Pair {
  FloatPart first, second;
};

#if defined(__AVX512BW__) || (defined(__F16C__) && defined(__AVX2__) && !defined(__AVX512F__))
constexpr float kFloat8Unit = 256.0f;

// Half precision has the bits of E4M3, with one more bit between sign and exponent, and an exponent bias larger by 8.
// So this is exact, also for subnormal numbers, for which this conversion takes no longer.
INLINE Float8Pair float8_pair(const WordPart& bytes, int i) {
  const __m128i order = i ? _mm_setr_epi8(-1, 2, -1, 6, -1, 10, -1, 14, -1, 3, -1, 7, -1, 11, -1, 15)
                          : _mm_setr_epi8(-1, 0, -1, 4, -1, 8, -1, 12, -1, 1, -1, 5, -1, 9, -1, 13);
#if defined(__AVX512BW__)
  const __m512i placed = _mm512_srai_epi16(_mm512_shuffle_epi8((__m512i)bytes, _mm512_broadcast_i32x4(order)), 1);
  const __m512i halves = _mm512_and_si512(placed, _mm512_set1_epi16((short)0xBFFF));
  const __m512i sorted = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), halves);
  return {(FloatPart)_mm512_cvtph_ps(_mm512_castsi512_si256(sorted)),
          (FloatPart)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(sorted, 1))};
#else
  const __m256i placed = _mm256_srai_epi16(_mm256_shuffle_epi8((__m256i)bytes, _mm256_broadcastsi128_si256(order)), 1);
  const __m256i sorted = _mm256_permute4x64_epi64(_mm256_and_si256(placed, _mm256_set1_epi16((short)0xBFFF)), 0xD8);
  return {(FloatPart)_mm256_cvtph_ps(_mm256_castsi256_si128(sorted)),
          (FloatPart)_mm256_cvtph_ps(_mm256_extracti128_si256(sorted, 1))};
#endif
}
#else
constexpr float kFloat8Unit = 1.0f;

// Subnormal numbers are read with an exponent, whose leading digit is subtracted again, so that no operand is
// subnormal.
INLINE FloatPart float8(const WordPart& bytes, int i) {
  const WordPart placed = i < 3 ? bytes << (20 - 8 * i) : bytes >> 4;
  const WordPart magnitude = placed & 0x07F00000u, sign = bytes << (24 - 8 * i) & 0x80000000u;
  const WordPart is_small = (WordPart)(magnitude < 0x00800000u);
  const auto value = (FloatPart)(magnitude + (120u << 23) + (is_small & 1u << 23));
  const FloatPart digit = (FloatPart)(is_small & 0x3C800000u);
  return (FloatPart)((WordPart)(value - digit) | sign);
}

INLINE Float8Pair float8_pair(const WordPart& bytes, int i) { return {float8(bytes, 2 * i), float8(bytes, 2 * i + 1)}; }
#endif

// The scales of a group of words of a panel.
INLINE Floats float8_scale(const WidenedLinear& op, int64_t panel, int64_t group) {
  return load(op.scales + (panel * op.groups + group) * kWidth);
}

// What the numbers of widen_float8<E> are divided by.
#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
template <class E>
constexpr float kWidenedUnit = E::kPerWord == Bf16::kPerWord ? 1.0f : kFloat8Unit;
#else
template <class E>
constexpr float kWidenedUnit = kFloat8Unit;
#endif

// Converts words of 16 columns, each with four E4M3 values along K, to as many words of E. Both types have them exactly.
template <class E>
INLINE void widen_float8(const Words& bytes, uint32_t* to) {
#pragma GCC unroll 4
  for (int part = 0; part < kParts; part++) {
    const auto put = [&](int word, const WordPart& bits) {
      std::memcpy(to + word * kWidth + part * kLanes, &bits, sizeof(bits));
    };
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const Float8Pair pair = float8_pair(bytes.part[part], i);
      const auto first = (WordPart)pair.first, second = (WordPart)pair.second;
      if constexpr (E::kPerWord == 1) put(2 * i, first), put(2 * i + 1, second);
      else put(i, first >> 16 | (second & 0xFFFF0000u));
    }
  }
}

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
// The bits of the bf16 numbers for the E4M3 magnitudes 0 .. 127, with separate low and high bytes.
struct Float8Bytes {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr Float8Bytes() {
    for (int magnitude = 1; magnitude < 128; magnitude++) {
      int exponent = magnitude >> 3, mantissa = magnitude & 7;
      if (!exponent) {  // a multiple of 2^-9: it is converted to the form of the others
        exponent = 1;
        for (; !(mantissa & 8); mantissa <<= 1) exponent--;
      }
      const int bits = (exponent + 120) << 7 | (mantissa & 7) << 4;
      low[magnitude] = bits & 0xFF;
      high[magnitude] = bits >> 8;
    }
  }
};

constexpr Float8Bytes kFloat8Bytes;

// The two words of bf16 for each word of 16 columns, by table lookup of bytes.
INLINE void look_up_float8(const Words& bytes, __m512i (&to)[2]) {
  // In 128 bits of 4 columns: the first two values of each, then the other two.
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const __m512i sign = _mm512_set1_epi8((char)0x80);
  const __m512i value = _mm512_shuffle_epi8((__m512i)bytes.part[0], order);
  const auto look_up = [&](const uint8_t* table) {  // the index is the lowest seven bits
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), value, _mm512_load_si512(table + 64));
  };
  const __m512i low = look_up(kFloat8Bytes.low);
  const __m512i high = _mm512_ternarylogic_epi32(look_up(kFloat8Bytes.high), value, sign, 0xF8);  // a | b & c
  to[0] = _mm512_unpacklo_epi8(low, high);
  to[1] = _mm512_unpackhi_epi8(low, high);
}

template <>
INLINE void widen_float8<Bf16>(const Words& bytes, uint32_t* to) {
  __m512i words[2];
  look_up_float8(bytes, words);
  _mm512_storeu_si512(to, words[0]);
  _mm512_storeu_si512(to + kWidth, words[1]);
}

#if ROOTGRAFT_AMX
// The same, times the columns' scales, in fp32 and rounded again.
INLINE void scale_float8(const Words& bytes, const Floats& scale, uint32_t* to) {
  __m512i unscaled[2];
  look_up_float8(bytes, unscaled);
  const __m512 factor = (__m512)scale.part[0];
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i turns = _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16));
  const auto put = [&](const __m512i& pairs, uint32_t* words) {
    const __m512 first = _mm512_mul_ps((__m512)_mm512_slli_epi32(pairs, 16), factor);
    const __m512 second = _mm512_mul_ps((__m512)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000u)), factor);
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(second, first);  // all first numbers, then all second ones
    _mm512_storeu_si512(words, _mm512_permutexvar_epi16(turns, rounded));
  };
  put(unscaled[0], to);
  put(unscaled[1], to + kWidth);
}
#endif
#endif

// Whether AMX makes a product: then for every number of rows, because it rounds sums differently.
template <class E>
bool uses_amx(const WidenedLinear& op) {
#if ROOTGRAFT_AMX
  return E::kPerWord == Bf16::kPerWord && takes_amx((op.width + E::kPerWord - 1) / E::kPerWord);
#else
  return false;
#endif
}

// Widens panels of FP8 to panels of E, which are `words` apart in memory; for AMX times their scales.
template <class E>
void widen_float8_panels(const WidenedLinear& op, int64_t panel, int panels, int64_t words, uint32_t* to) {
  const int64_t count = op.panel_words() / kWidth;
  for (int64_t p = panel; p < panel + panels; p++, to += words) {
    const uint32_t* from = op.panels + p * op.panel_words();
    for (int64_t word = 0; word < count; word++) {
      const Words bytes = load_words(from + word * kWidth);
      uint32_t* wide = to + word * kWidth * (kWordBytes / E::kPerWord);
#if ROOTGRAFT_AMX
      if (uses_amx<E>(op)) {
        scale_float8(bytes, float8_scale(op, p, word / op.group_words()), wide);
        continue;
      }
#endif
      widen_float8<E>(bytes, wide);
    }
  }
}

// Products of a few rows with weights that are widened in registers: the sums of multiply_tile<E>, term by term. Few
// rows use two panels, so that there are at least as many sums as products in flight at a time.
#if defined(__AVX512F__)
constexpr int kDirectRows = 12, kDirectPairRows = 6;
#else
constexpr int kDirectRows = 4, kDirectPairRows = 2;
#endif
constexpr int64_t kMostDirectRows = 2 * kDirectRows;  // for more rows, weights are widened once, in memory
constexpr int direct_panels(int rows) { return rows <= kDirectPairRows ? 2 : 1; }
// Number of panels from the sums of a row to those of the next one.
constexpr int kSumPanels = std::max(kTilePanels, direct_panels(1));

// Whether bf16 is multiplied as fp32. Then E4M3 is not widened to words of E, as the products take fp32 anyway.
#if defined(__AVX512BF16__)
template <class E>
constexpr bool kSkipsWords = false;
#else
template <class E>
constexpr bool kSkipsWords = E::kPerWord == Bf16::kPerWord;
#endif

// Adds products of two columns of x with numbers 2 i and 2 i + 1 of each lane, term by term like Bf16::dot.
template <int MR, int NV>
INLINE void add_float8_pair(const Words& bytes, int i, const uint32_t* x, ptrdiff_t stride, int v,
                            Floats (&sums)[MR][NV]) {
#pragma GCC unroll 4
  for (int part = 0; part < kParts; part++) {
    const Float8Pair pair = float8_pair(bytes.part[part], i);
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      const WordPart both = WordPart{} + x[m * stride];
      const FloatPart sum = fma((FloatPart)(both << 16), pair.first, sums[m][v].part[part]);
      sums[m][v].part[part] = fma((FloatPart)(both & 0xFFFF0000u), pair.second, sum);
    }
  }
}

// Adds a group's sum of a row, times the group's scales, to what earlier groups gave. It is the first for group 0.
template <class E>
INLINE void add_group(const WidenedLinear& op, int64_t panel, int64_t group, const Floats& sum, float* to) {
  const Floats scale = float8_scale(op, panel, group) * broadcast(kWidenedUnit<E>);
  store(to, group ? fma(sum, scale, load(to)) : sum * scale);
}

template <class E, int MR, int NV, bool kFloat8>
void run_direct(const WidenedLinear& op, int64_t at, int64_t panel, float* sums_to) {
  constexpr int kParts8 = kWordBytes / E::kPerWord;  // number of words of E to which a word of bytes is widened
  constexpr ptrdiff_t kAhead = 16 * kWidth;
  const int64_t steps = (op.width + E::kPerWord - 1) / E::kPerWord, words = op.panel_words();
  const int64_t group = op.group_words();
  const uint32_t* from = op.panels + panel * words;
  Floats sums[MR][NV];
  const auto clear = [&] {
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) sums[m][v] = broadcast(0.0f);
    }
  };
  clear();
  const auto add = [&](int64_t word, int count) {  // count: number of words of E
    if constexpr (kFloat8 && kSkipsWords<E>) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) {
        const uint32_t* bytes = from + v * words + word * kWidth;
        __builtin_prefetch(bytes + kAhead, 0, 3);
#pragma GCC unroll 2
        for (int i = 0; i < kParts8 && i < count; i++) {
          add_float8_pair(load_words(bytes), i, op.x + at * steps + word * kParts8 + i, steps, v, sums);
        }
      }
      return;
    }
    alignas(64) uint32_t wide[NV][kParts8 * kWidth];
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
      const uint32_t* bytes = from + v * words + word * kWidth;
      __builtin_prefetch(bytes + kAhead, 0, 3);
      if constexpr (kFloat8) widen_float8<E>(load_words(bytes), wide[v]);
      else widen_word<E>(load_words(bytes), wide[v]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kParts8; i++) {
      if (i >= count) break;
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const Words row = broadcast_word(load_as<uint32_t>(op.x + (at + m) * steps + word * kParts8 + i));
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++) sums[m][v] = E::dot(row, load_words(wide[v] + i * kWidth), sums[m][v]);
      }
    }
  };
  const int64_t whole = steps / kParts8;
  for (int64_t first = 0; first * kWidth < words; first += group) {
    const int64_t end = std::min(whole, first + group);
    for (int64_t word = first; word < end; word++) add(word, kParts8);
    if (whole < first + group && steps % kParts8) add(whole, (int)(steps % kParts8));
    if constexpr (kFloat8) {
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++) {
          add_group<E>(op, panel + v, first / group, sums[m][v], sums_to + (m * kSumPanels + v) * kWidth);
        }
      }
      clear();
    }
  }
  if constexpr (kFloat8) return;
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) store(sums_to + (m * kSumPanels + v) * kWidth, sums[m][v]);
  }
}

template <class E, class To>
void store_tile(const WidenedLinear& op, const float* sums, int64_t row, int rows, int64_t column, int columns) {
  for (int m = 0; m < rows; m++, sums += kSumPanels * kWidth) {
    auto* out = static_cast<typename To::Value*>(op.out) + (row + m) * op.columns + column;
    const float *scales = op.scales + column, *bias = op.bias + column;
    int i = 0;
    for (; i + kWidth <= columns; i += kWidth) {
      const Floats sum = op.groups ? load(sums + i) : load(sums + i) * load(scales + i);
      To::store(out + i, op.bias ? sum + load(bias + i) : sum);
    }
    for (; i < columns; i++) {
      const float sum = op.groups ? sums[i] : sums[i] * scales[i];
      out[i] = To::narrow(op.bias ? sum + bias[i] : sum);
    }
  }
}

// Multiplies all rows with some panels that are widened to E.
template <class E, class To>
void multiply_wide(const WidenedLinear& op, const uint32_t* wide, int64_t words, int64_t panel, int panels) {
  const int64_t steps = (op.width + E::kPerWord - 1) / E::kPerWord;
  alignas(64) float sums[kMostRows * kSumPanels * kWidth];
  const auto product = [&](int row, int p) {
    return Product{op.x + row * steps, steps, wide + p * words, words, steps, {sums, kSumPanels * kWidth}, nullptr};
  };
  const auto put = [&](int row, int rows, int p, int count) {
    const int64_t column = (panel + p) * kWidth;
    store_tile<E, To>(op, sums, row, rows, column, (int)std::min<int64_t>(count * kWidth, op.columns - column));
  };
#if ROOTGRAFT_AMX
  if (uses_amx<E>(op)) {
    const AmxScope scope(amx_shapes(amx_rows((int)op.rows), kAmxWords));
    return for_amx_tiles((int)op.rows, panels, [&](int row, const AmxRows& rows, int p, int count) {
      multiply_amx<AmxWords::kBf16>(product(row, p), rows, count);
      put(row, rows.all(), p, count);
    });
  }
#endif
  for_tiles((int)op.rows, panels, [&](int row, int rows, int p, int count) {
    if (op.groups) {
      const GroupFactors factors = {op.scales + (panel + p) * op.groups * kWidth, op.groups * kWidth,
                                    op.group_words() * (kWordBytes / E::kPerWord), kWidenedUnit<E>};
      multiply_groups<E>(product(row, p), factors, rows, count);
    } else {
      multiply_tile<E>(product(row, p), rows, count);
    }
    put(row, rows, p, count);
  });
}

// Multiplies all rows with panels [panel, panel_end), a few at a time: they are widened once, then used by all rows.
template <class E, class To>
void multiply_block(const WidenedLinear& op, int64_t panel, int64_t panel_end) {
  const int64_t words = op.panel_words() * (kWordBytes / E::kPerWord);
  constexpr int most = kTilePanels;
  static thread_local std::vector<Words> wide;  // whose elements are whole cache lines
  wide.resize(most * words / kWidth);
  auto* to = reinterpret_cast<uint32_t*>(wide.data());
  for (; panel < panel_end; panel += most) {
    const int panels = (int)std::min<int64_t>(most, panel_end - panel);
    const uint32_t* from = op.panels + panel * op.panel_words();
    if (op.groups) widen_float8_panels<E>(op, panel, panels, words, to);
    for (int64_t i = 0; !op.groups && i < panels * op.panel_words(); i += kWidth) {
      widen_word<E>(load_words(from + i), to + i * (kWordBytes / E::kPerWord));
    }
    multiply_wide<E, To>(op, to, words, panel, panels);
  }
}

// Likewise for few rows, for which storing the widened weights does not pay off.
template <class E, class To>
void multiply_direct(const WidenedLinear& op, int64_t panel, int64_t panel_end) {
  constexpr int kMostPanels = direct_panels(1);
  alignas(64) float sums[kDirectRows * kSumPanels * kWidth];
  for (int64_t count; panel < panel_end; panel += count) {
    count = std::min<int64_t>(op.rows <= kDirectPairRows ? kMostPanels : 1, panel_end - panel);
    const int64_t column = panel * kWidth;
    const int columns = (int)std::min(count * kWidth, op.columns - column);
    for_tiles<kDirectRows, kMostPanels>((int)op.rows, (int)count, [&](int row, int rows, int, int) {
      with_constant<kDirectRows>(rows, [&](auto mr) {
        with_constant<direct_panels(mr.value)>((int)count, [&](auto nv) {
          if (op.groups) run_direct<E, mr.value, nv.value, true>(op, row, panel, sums);
          else run_direct<E, mr.value, nv.value, false>(op, row, panel, sums);
        });
      });
      store_tile<E, To>(op, sums, row, rows, column, columns);
    });
  }
}

template <class E>
bool is_direct(const WidenedLinear& op) {
  if (uses_amx<E>(op)) return false;
  // As fp32, widening weights twice takes longer than storing them once.
  return op.rows <= (kSkipsWords<E> ? kDirectRows : kMostDirectRows);
}

// Calls multiply_some(op, panel, panel_end) for all panels, on all threads.
template <class E, class To>
int run_panels(const WidenedLinear& op, void (*multiply_some)(const WidenedLinear&, int64_t, int64_t)) {
  const int64_t panels = (op.columns + kWidth - 1) / kWidth;
  const int threads = threads_for(op.rows * op.width * op.columns, kSmall, op.threads);
  const int64_t slices = slice_count(threads, op.rows, panels, kTileRows);
  std::atomic<bool> has_memory{true};
  parallel_items(threads, slices, [&](int64_t slice) {
    try {
      multiply_some(op, panels * slice / slices, panels * (slice + 1) / slices);
    } catch (const std::bad_alloc&) {
      has_memory = false;
    }
  });
  return has_memory ? 0 : kNoMemory;
}

template <class E, class To>
int run(const WidenedLinear& op) {
  if (!op.rows) return 0;
#if defined(__AVX2__) && !ROOTGRAFT_DOT_BF16
  // bf16 is multiplied as fp32, so rows and weights are widened once for all tiles. The products are exact in both types.
  if constexpr (E::kPerWord == Bf16::kPerWord) {
    if (!is_direct<E>(op)) {
      const int64_t count = op.rows * op.width;
      const std::unique_ptr<float[]> rows(new (std::nothrow) float[count]);
      if (!rows) return kNoMemory;
      const auto* from = reinterpret_cast<const uint16_t*>(op.x);
      parallel_ranges(threads_for(count, kSmall, op.threads), count, [&](int64_t i, int64_t end) {
        for (; i + kWidth <= end; i += kWidth) store(rows.get() + i, Bf16::load(from + i));
        for (; i < end; i++) rows[i] = Bf16::widen(from[i]);
      });
      WidenedLinear wide = op;
      wide.x = reinterpret_cast<const uint32_t*>(rows.get()), wide.is_bf16 = false;
      return run_panels<Fp32, To>(wide, &multiply_block<Fp32, To>);
    }
  }
#endif
  return run_panels<E, To>(op, is_direct<E>(op) ? &multiply_direct<E, To> : &multiply_block<E, To>);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int widened_linear(const WidenedLinear* op) {
  int failed = 0;
  with_types([&](auto element, auto out_element) { failed = run<decltype(element), decltype(out_element)>(*op); },
             op->is_bf16, op->out_is_bf16);
  return failed;
}

extern "C" int64_t widened_linear_size() { return sizeof(WidenedLinear); }
