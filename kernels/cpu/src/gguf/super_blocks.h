// Weights in super-blocks of 256 values (K-quants): the scales of blocks are integers with a common factor for each
// super-block.
//
//   kSuperNibbles   (d s) q - (e t)   eight blocks of 32 with q of 4 bits; s and t of 6 bits (Q4_K)
//   kSuper6Bits     (d s) (q - 32)    sixteen blocks of 16 with q of 6 bits; s a signed byte (Q6_K)
//   kSuper5Bits     (d s) q - (e t)   as kSuperNibbles, with q of 5 bits (Q5_K)
//   kSuper3Bits     (d s) (q - 4)     sixteen blocks of 16 with q of 3 bits; s a signed byte (Q3_K)
//   kSuper2Bits     (d s) q - (e t)   sixteen blocks of 16 with q of 2 bits; s and t of 4 bits (Q2_K)
//   kSuperTable     (d s) table[q]    eight blocks of 32 with q of 4 bits; s a signed byte (IQ4_XS)
//   kSuperFloat4    (f s) table[q]    sixteen blocks of 16 with q of 4 bits; s in E4M3, f in fp32 (NVFP4)
//   kSuperGrid      (d s) table[q]    as kSuper3Bits, with q choosing one of six values (IQ2_XXS, IQ2_XS, IQ2_S)
//
// The words of a panel are like those of kNibbles and kBytes, in blocks of 32. Numbers in planes have 4 or 2 bits in as
// many words: with w words, byte j of word i has the numbers at places 4 (i + n w) + j in its bits from n w on. The top
// bits, one or two of each number, follow in as many words in the same way.
//
// The scales of a super-block are stored as words of half precision: d of 16 columns; e of 16 columns, if there are
// minima; then for each block of 32 two times 16 bytes: s and t, or s of the first 16 values and s of the others. For
// kSuper2Bits the upper halves of these bytes are t. For kSuperTable there are 16 bytes only. kSuperFloat4 has f in
// place of d and e.
#pragma once

#include <type_traits>

#include "gguf/block_tile.h"

namespace rootgraft {

constexpr int kSuperValues = 256, kSuperBlocks = kSuperValues / kBlockValues;

// Whether numbers have a minimum that is added to them, and whether the minimum has a factor of its own.
template <Format F>
constexpr bool kHasMinima = (kIsNibbles<F> && !kIsTable<F>) || (kIsPlanes<F> && kUnarranged<F> != Format::kSuperGrid);
template <Format F>
constexpr bool kHasMinimumFactor =
    kHasMinima<F> && kUnarranged<F> != Format::kSuper3Bits && kUnarranged<F> != Format::kSuper6Bits;
// Whether the halves of a block have separate scales.
template <Format F>
constexpr bool kHasHalfScales = kUnarranged<F> == Format::kSuper6Bits || kUnarranged<F> == Format::kSuper3Bits ||
                                kUnarranged<F> == Format::kSuper2Bits || kUnarranged<F> == Format::kSuperGrid;

template <Format F>
constexpr int kFactorHalves =
    kHasMinimumFactor<F> || kUnarranged<F> == Format::kSuperFloat4 ? 2 * kWidth : kWidth;  // d, or d and e, or f
template <Format F>
constexpr int kStepHalves = kUnarranged<F> == Format::kSuperTable ? kWidth / 2 : kWidth;  // 16 bytes, or two times 16
template <Format F>
constexpr int kSuperHalves = kFactorHalves<F> + kSuperBlocks * kStepHalves<F>;
template <Format F>
// number of half-precision scales, on average
constexpr int kBlockHalves = kIsSuper<F> ? kSuperHalves<F> / kSuperBlocks : kPanelScales<F>;

// Number of half-precision scales for this many blocks of a panel, which are whole super-blocks.
template <Format F>
constexpr int64_t scale_halves(int64_t blocks) {
  return kIsSuper<F> ? blocks / kSuperBlocks * kSuperHalves<F> : blocks * kPanelScales<F>;
}

// Converts sixteen bytes to numbers.
template <class Byte>
INLINE Floats load_bytes(const Byte* from) {
#if defined(__AVX512F__)
  const __m128i bytes = load_as<__m128i>(from);
  const __m512i wide = std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  return Floats{{(FloatPart)_mm512_cvtepi32_ps(wide)}};
#else
  float wide[kWidth];
  for (int i = 0; i < kWidth; i++) wide[i] = from[i];
  return load(wide);
#endif
}

// Converts the lower or the upper halves of sixteen bytes to numbers.
template <int kShift>
INLINE Floats load_half_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_srli_epi32(_mm512_cvtepu8_epi32(load_as<__m128i>(from)), kShift);
  return Floats{{(FloatPart)_mm512_cvtepi32_ps(_mm512_and_si512(wide, _mm512_set1_epi32(15)))}};
#else
  typedef uint8_t BytePart __attribute__((vector_size(kLanes)));
  return map([&](int i) {
    const WordPart wide = __builtin_convertvector(load_as<BytePart>(from + i * kLanes), WordPart);
    return __builtin_convertvector((IntPart)(wide >> kShift & 15), FloatPart);
  });
#endif
}

// Converts sixteen bytes in E4M3 to numbers. Half precision has the bits of E4M3, with one more bit between sign and
// exponent; its exponent's bias is larger by 8.
INLINE Floats load_float8(const uint8_t* from) {
  uint16_t halves[kWidth];
  for (int i = 0; i < kWidth; i++) halves[i] = (uint16_t)((from[i] & 0x80) << 8 | (from[i] & 0x7F) << 7);
  return load_half(halves) * broadcast(256.0f);
}

}  // namespace rootgraft
