// Quantisation of rows to integers with a scale for each block, in one or two planes of signed bytes:
//
//   one plane    value = scale * byte                    bytes within 127
//   two planes   value = scale * (128 * high + low)      integers within 127 * 128, low within -64 .. 63
//
// The scale of a block is its largest magnitude / the largest integer, in fp32. Integers are rounded to the nearest,
// ties to even. A block with an infinity or NaN gets a scale that is not finite, and so is everything that is computed
// with it. Two planes are more precise than bf16, except for values below a 64th of the largest of the block.
#pragma once

#include <cmath>
#include <type_traits>

#include "int8/int8_dot.h"

namespace rootgraft {

constexpr int kHalves = 2 * kWidth;  // number of 16-bit values in a register of AVX-512

// Loads up to 16 values, followed by zeros.
template <class E>
INLINE Floats load_some(const typename E::Value* from, int64_t count) {
  if (count >= kWidth) return E::load(from);
  typename E::Value padded[kWidth] = {};
  std::memcpy(padded, from, count * sizeof(padded[0]));
  return E::load(padded);
}

// The bits of the largest magnitude. Bits have the order of magnitudes; a NaN is larger than all.
template <class E>
INLINE uint32_t magnitude_bits(const typename E::Value* from, int64_t count) {
#if defined(__AVX512BW__)
  if constexpr (std::is_same_v<E, Bf16>) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += kHalves) {
      const __m512i halves = count - i >= kHalves ? _mm512_loadu_si512(from + i)
                                                  : _mm512_maskz_loadu_epi16((1u << (count - i)) - 1, from + i);
      most = _mm512_max_epu16(most, _mm512_and_si512(halves, _mm512_set1_epi16(0x7FFF)));
    }
    const __m256i sixteen = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(sixteen), _mm256_extracti128_si256(sixteen, 1));
    const __m128i ones = _mm_set1_epi16(-1);  // so that the instruction for the smallest of eight finds the largest
    return (uint32_t)(uint16_t)~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, ones))) << 16;
  }
#endif
  Words magnitude = broadcast_word(0);
  for (int64_t i = 0; i < count; i += kWidth) {
    const Floats value = load_some<E>(from + i, count - i);
    for (int p = 0; p < kParts; p++) {
      const IntPart bits = (IntPart)value.part[p] & 0x7FFFFFFF, most = (IntPart)magnitude.part[p];
      magnitude.part[p] = (WordPart)(bits > most ? bits : most);
    }
  }
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)magnitude.part[0]);
#else
  uint32_t most = 0;
  for (int i = 0; i < kParts; i++) {
    for (int j = 0; j < kLanes; j++) most = most > magnitude.part[i][j] ? most : magnitude.part[i][j];
  }
  return most;
#endif
}

// Stores the low byte of each lane.
INLINE void store_bytes(int8_t* to, const Ints& value) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)value.part[0]));
#else
  for (int i = 0; i < kParts; i++) {
    for (int j = 0; j < kLanes; j++) to[i * kLanes + j] = (int8_t)value.part[i][j];
  }
#endif
}

#if defined(__AVX512BW__)
constexpr int kRounded = 64;  // number of values that are converted to bytes together

// This many integers of 16 bits, or integers that fit in them. From bf16 they are in the order of the values. From fp32
// each quarter of the first register has four of the first 16 values and four of the next 16; the second register has
// the last 32 values likewise.
struct Shorts {
  __m512i part[2];
};

// Multiplies values by a factor, and rounds to the nearest, ties to even.
template <class E>
INLINE Shorts round_shorts(const typename E::Value* from, const Floats& factor) {
  const auto rounded = [&](const Floats& some) { return _mm512_cvtps_epi32((__m512)(some * factor).part[0]); };
  const auto packed = [&](const Floats& first, const Floats& second) {
    return _mm512_packs_epi32(rounded(first), rounded(second));
  };
  if constexpr (std::is_same_v<E, Bf16>) {
    const auto widened = [&](int i) {  // widens by halves of quarters, which are put together again later
      const __m512i all = _mm512_loadu_si512(from + i * kHalves), zero = _mm512_setzero_si512();
      return packed({{(FloatPart)_mm512_unpacklo_epi16(zero, all)}}, {{(FloatPart)_mm512_unpackhi_epi16(zero, all)}});
    };
    return {{widened(0), widened(1)}};
  }
  const auto sixteen = [&](int i) { return E::load(from + i * kWidth); };
  return {{packed(sixteen(0), sixteen(1)), packed(sixteen(2), sixteen(3))}};
}

// Converts to bytes, for values that fit in them, in the order of the values.
template <class E>
INLINE __m512i pack_bytes(const Shorts& values) {
  const __m512i bytes = _mm512_packs_epi16(values.part[0], values.part[1]);
  if constexpr (std::is_same_v<E, Bf16>) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes);
  }
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}

// Returns, in each lane, sum + four bytes.
INLINE Ints add_bytes(const Ints& sum, __m512i bytes) {
  return dot_bytes(broadcast_word(0x01010101u), Words{{(WordPart)bytes}}, sum);
}
#endif

constexpr int kPlaneBits = 7;  // bits of the low plane if there are two

constexpr float most_integer(int planes) { return planes == 1 ? 127.0f : 127.0f * (1 << kPlaneBits); }

// Writes `count` bytes to each plane, high before low, and zeros up to the next multiple of 16; if the scale is not
// finite, only zeros. Returns the scale; totals[i] is the sum of the bytes of plane i.
template <class E, int kPlanes = 1>
INLINE float quantise_block(const typename E::Value* from, int64_t count, int8_t* const (&to)[kPlanes],
                            int32_t (&totals)[kPlanes]) {
  constexpr float kMost = most_integer(kPlanes);
  const uint32_t bits = magnitude_bits<E>(from, count);
  const auto most = load_as<float>(&bits);
  if (!std::isfinite(most)) {  // sums of values that are not integers could leave their range
    for (int plane = 0; plane < kPlanes; plane++) {
      std::memset(to[plane], 0, (count + kWidth - 1) / kWidth * kWidth);
      totals[plane] = 0;
    }
    return most / kMost;
  }
  // below that the quotient may overflow, so all bytes are 0
  const float inverse = most > 1e-30f ? kMost / most : 0.0f;
  Ints sums[kPlanes];
  for (Ints& plane : sums) plane = broadcast_int(0);
  int64_t i = 0;
#if defined(__AVX512BW__)
  for (; kPlanes == 1 && i + kRounded <= count; i += kRounded) {
    const __m512i bytes = pack_bytes<E>(round_shorts<E>(from + i, broadcast(inverse)));
    _mm512_storeu_si512(to[0] + i, bytes);
    sums[0] = add_bytes(sums[0], bytes);
  }
#endif
  for (; i < count; i += kWidth) {
    const Floats scaled = load_some<E>(from + i, count - i) * broadcast(inverse);
    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    const Floats shifted = scaled + broadcast(12582912.0f);
    const Ints whole = map_ints([&](int p) { return (IntPart)shifted.part[p] - 0x4B400000; });
    Ints planes[kPlanes] = {whole};
    if constexpr (kPlanes == 2) {
      planes[0] = map_ints([&](int p) { return (whole.part[p] + (1 << (kPlaneBits - 1))) >> kPlaneBits; });
      planes[1] = map_ints([&](int p) { return whole.part[p] - (planes[0].part[p] << kPlaneBits); });
    }
    for (int plane = 0; plane < kPlanes; plane++) {
      store_bytes(to[plane] + i, planes[plane]);
      sums[plane] = map_ints([&](int p) { return sums[plane].part[p] + planes[plane].part[p]; });
    }
  }
  for (int plane = 0; plane < kPlanes; plane++) totals[plane] = sum(sums[plane]);
  return most / kMost;
}

// Writes `count` bytes, value / scale rounded to the nearest, ties to even, and limited to -128 .. 127, and zeros up to
// the next multiple of 16. Returns the scale. If a value is not finite, returns a scale that is not finite, and writes
// zeros.
template <class E>
INLINE float quantise_by(const typename E::Value* from, int64_t count, float scale, int8_t* to) {
  const uint32_t bits = magnitude_bits<E>(from, count);
  const auto most = load_as<float>(&bits);
  if (!std::isfinite(most)) {
    std::memset(to, 0, (count + kWidth - 1) / kWidth * kWidth);
    return most;
  }
  for (int64_t i = 0; i < count; i += kWidth) {
    const Floats value = load_some<E>(from + i, count - i);
    const Ints whole = map_ints([&](int p) {
      const FloatPart scaled = value.part[p] / scale, low = FloatPart{} - 128.0f, high = FloatPart{} + 127.0f;
      const FloatPart above = scaled < low ? low : scaled, within = above > high ? high : above;
      return (IntPart)(within + 12582912.0f) - 0x4B400000;  // 1.5 * 2^23, as above
    });
    store_bytes(to + i, whole);
  }
  return scale;
}

}  // namespace rootgraft
