// Products of bytes with exact 32-bit sums, and scales in half precision.
#pragma once

#include "simd/simd.h"

namespace rootgraft {

constexpr int kWordBytes = 4;  // number of values of 8 bits in a word

struct Ints {
  IntPart part[kParts];
};

template <class F>
INLINE Ints map_ints(F f) {
  Ints result;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) result.part[i] = f(i);
  return result;
}

INLINE Ints load_ints(const int32_t* from) {
  return map_ints([&](int i) { return load_part<IntPart>(from, i); });
}

// Addition modulo 2^32: lanes that are not used may hold anything.
INLINE Ints operator+(const Ints& a, const Ints& b) {
  return map_ints([&](int i) { return (IntPart)((WordPart)a.part[i] + (WordPart)b.part[i]); });
}

INLINE Ints broadcast_int(int32_t value) {
  return map_ints([&](int) { return IntPart{} + value; });
}

INLINE Floats to_floats(const Ints& value) {
  return map([&](int i) { return __builtin_convertvector(value.part[i], FloatPart); });
}

// Conversion with rounding towards zero.
INLINE Ints to_ints(const Floats& value) {
  return map_ints([&](int i) { return __builtin_convertvector(value.part[i], IntPart); });
}

// Whether any lane is not 0.
INLINE bool any(const Ints& value) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)value.part[0], (__m512i)value.part[0]);
#else
  int32_t found = 0;
  for (int i = 0; i < kParts; i++) {
    for (int j = 0; j < kLanes; j++) found |= value.part[i][j];
  }
  return found;
#endif
}

INLINE int32_t sum(const Ints& value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)value.part[0]);
#else
  int32_t total = 0;
  for (int i = 0; i < kParts; i++) {
    for (int j = 0; j < kLanes; j++) total += value.part[i][j];
  }
  return total;
#endif
}

// Loads sixteen finite numbers of IEEE half precision.
INLINE Floats load_half(const uint16_t* from) {
#if defined(__AVX512F__)
  return Floats{{(FloatPart)_mm512_cvtph_ps(load_as<__m256i>(from))}};
#elif defined(__AVX2__) && defined(__F16C__)
  return map([&](int i) { return (FloatPart)_mm256_cvtph_ps(load_as<__m128i>(from + i * kLanes)); });
#elif defined(__aarch64__)
  return map([&](int i) { return (FloatPart)vcvt_f32_f16(load_as<float16x4_t>(from + i * kLanes)); });
#else
  return map([&](int i) {
    const WordPart bits = __builtin_convertvector(load_as<HalfPart>(from + i * kLanes), WordPart);
    // The biases of the exponents differ by 112. The product is exact, for subnormal numbers too.
    const FloatPart magnitude = (FloatPart)((bits & 0x7FFF) << 13) * 0x1p112f;
    return (FloatPart)((WordPart)magnitude | (bits & 0x8000) << 16);
  });
#endif
}

#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
INLINE IntPart add_pairs(__m512i bytes, __m512i signed_bytes, IntPart acc) {
  const __m512i pairs = _mm512_maddubs_epi16(bytes, signed_bytes);
  return acc + (IntPart)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
INLINE IntPart add_pairs(__m256i bytes, __m256i signed_bytes, IntPart acc) {
  const __m256i pairs = _mm256_maddubs_epi16(bytes, signed_bytes);
  return acc + (IntPart)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#endif

#if defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8)
// Returns, in each lane, acc + the sum of four products of signed bytes.
INLINE IntPart dot_signed(int8x16_t a, int8x16_t b, IntPart acc) {
#if defined(__ARM_FEATURE_DOTPROD)
  return (IntPart)vdotq_s32((int32x4_t)acc, a, b);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(a), vget_high_s8(b)));
  return acc + (IntPart)vpaddq_s32(low, high);
#endif
}
#endif

// Returns, in each lane, acc + the sum of four products: bytes of a, unsigned and up to kMostByte, with signed bytes of
// b.
INLINE Ints dot_bytes(const Words& a, const Words& b, const Ints& acc) {
#if defined(__AVX512VNNI__)
  return Ints{{(IntPart)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)a.part[0], (__m512i)b.part[0])}};
#elif defined(__AVX512BW__)
  return Ints{{add_pairs((__m512i)a.part[0], (__m512i)b.part[0], acc.part[0])}};
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return map_ints([&](int i) { return add_pairs((__m256i)a.part[i], (__m256i)b.part[i], acc.part[i]); });
#elif defined(__SSE2__)
  // Bytes at even and at odd places are widened to 16 bits; their products are summed in pairs.
  return map_ints([&](int i) {
    const __m128i bytes = (__m128i)a.part[i], other = (__m128i)b.part[i];
    const __m128i even = _mm_madd_epi16(_mm_and_si128(bytes, _mm_set1_epi16(0xFF)),
                                        _mm_srai_epi16(_mm_slli_epi16(other, 8), 8));
    const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(bytes, 8), _mm_srai_epi16(other, 8));
    return acc.part[i] + (IntPart)even + (IntPart)odd;
  });
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return map_ints([&](int i) {
    return (IntPart)vusdotq_s32((int32x4_t)acc.part[i], (uint8x16_t)a.part[i], (int8x16_t)b.part[i]);
  });
#elif defined(__aarch64__)
  return map_ints([&](int i) { return dot_signed((int8x16_t)a.part[i], (int8x16_t)b.part[i], acc.part[i]); });
#else
  return map_ints([&](int i) {
    IntPart total = acc.part[i];
#pragma GCC unroll 4
    for (int j = 0; j < kWordBytes; j++) {
      total += (IntPart)(a.part[i] >> 8 * j & 0xFF) * ((IntPart)(b.part[i] << (24 - 8 * j)) >> 24);
    }
    return total;
  });
#endif
}

// The same if the bytes of a hold 128 + a signed number. acc must start with kBiasedStart times the sum of b's bytes in
// each lane: if the machine multiplies unsigned bytes of full range, this removes the 128 again.
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8) || \
    !(defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__aarch64__))
constexpr int32_t kBiasedStart = -128;
constexpr int kMostByte = 255;  // largest unsigned byte for which products are summed exactly

INLINE Ints dot_biased(const Words& a, const Words& b, const Ints& acc) { return dot_bytes(a, b, acc); }
#else
constexpr int32_t kBiasedStart = 0;
// so that the sum of two products fits in 16 bits; otherwise bytes are multiplied as signed ones
constexpr int kMostByte = 127;

// Pairs of products must fit in 16 bits: |a| times b with a's sign. NEON multiplies signed bytes directly.
INLINE Ints dot_biased(const Words& a, const Words& b, const Ints& acc) {
  return map_ints([&](int i) {
    const WordPart value = a.part[i] ^ 0x80808080u;
#if defined(__aarch64__)
    return dot_signed((int8x16_t)value, (int8x16_t)b.part[i], acc.part[i]);
#elif defined(__AVX512BW__)
    const __m512i bytes = (__m512i)value, other = (__m512i)b.part[i];
    const __m512i turned = _mm512_mask_sub_epi8(other, _mm512_movepi8_mask(bytes), _mm512_setzero_si512(), other);
    return add_pairs(_mm512_abs_epi8(bytes), turned, acc.part[i]);
#else
    const __m256i bytes = (__m256i)value;
    return add_pairs(_mm256_abs_epi8(bytes), _mm256_sign_epi8((__m256i)b.part[i], bytes), acc.part[i]);
#endif
  });
}
#endif

}  // namespace rootgraft
