// Sixteen lanes of fp32 on any instruction set: one AVX-512 register, two of AVX2, or four of SSE and NEON.
//
// Arithmetic uses the compiler's vector types. The library is compiled with -ffp-contract=off, so that multiply-adds
// are fused only in fma(): a sum then has the same bits in every instance of a template.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace rootgraft {

constexpr int kWidth = 16;
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kParts = kWidth / kLanes;

// Whether the CPU multiplies pairs of bf16 and adds them to fp32 in one instruction.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define ROOTGRAFT_DOT_BF16 1
#else
#define ROOTGRAFT_DOT_BF16 0
#endif

typedef float FloatPart __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntPart __attribute__((vector_size(kLanes * 4)));
typedef uint32_t WordPart __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfPart __attribute__((vector_size(kLanes * 2)));

struct Words {
  WordPart part[kParts];
};

struct Floats {
  FloatPart part[kParts];
};

template <class F>
INLINE Floats map(F f) {
  Floats result;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) result.part[i] = f(i);
  return result;
}

template <class T>
INLINE T load_as(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

INLINE Floats broadcast(float value) {
  return map([&](int) { return value - FloatPart{}; });  // value - 0, as value + 0 would turn -0 into 0
}

INLINE Words broadcast_word(uint32_t value) {
  Words result;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) result.part[i] = WordPart{} + value;
  return result;
}

// Loads a register from any address, or stores it. With memcpy, GCC 12 may move sixteen lanes in halves, through the
// stack, and wait for both: about fifteen cycles for each vector of a product.
template <class Part>
struct __attribute__((packed, may_alias)) Loose {
  Part part;
};

template <class Part>
INLINE Part load_part(const void* from, int i) {
  return static_cast<const Loose<Part>*>(from)[i].part;
}

template <class Part>
INLINE void store_parts(void* to, const Part (&parts)[kParts]) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) static_cast<Loose<Part>*>(to)[i].part = parts[i];
}

INLINE Words load_words(const uint32_t* from) {
  Words result;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) result.part[i] = load_part<WordPart>(from, i);
  return result;
}
INLINE void store_words(uint32_t* to, const Words& value) { store_parts(to, value.part); }
INLINE Floats load(const float* from) {
  return map([&](int i) { return load_part<FloatPart>(from, i); });
}
// Loads the first `count` lanes. The others are not read, and become 0.
INLINE Floats load_first(const float* from, int count) {
#if defined(__AVX512F__)
  return Floats{{(FloatPart)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from)}};
#else
  float lane[kWidth] = {};
  for (int i = 0; i < count; i++) lane[i] = from[i];
  return load(lane);
#endif
}
INLINE void store(float* to, const Floats& value) { store_parts(to, value.part); }
// Stores the first `count` lanes; nothing else is written.
INLINE void store_first(float* to, const Floats& value, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)value.part[0]);
#else
  float lane[kWidth];
  store(lane, value);
  for (int i = 0; i < count; i++) to[i] = lane[i];
#endif
}

INLINE Floats operator+(const Floats& a, const Floats& b) {
  return map([&](int i) { return a.part[i] + b.part[i]; });
}
INLINE Floats operator-(const Floats& a, const Floats& b) {
  return map([&](int i) { return a.part[i] - b.part[i]; });
}
INLINE Floats operator*(const Floats& a, const Floats& b) {
  return map([&](int i) { return a.part[i] * b.part[i]; });
}
INLINE Floats operator/(const Floats& a, const Floats& b) {
  return map([&](int i) { return a.part[i] / b.part[i]; });
}
// a > b ? a : b, so that a NaN in b stays.
INLINE Floats max(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
  return Floats{{(FloatPart)_mm512_max_ps((__m512)a.part[0], (__m512)b.part[0])}};
#else
  return map([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
#endif
}

// a * b + c, with a single rounding if the machine has such an instruction.
INLINE FloatPart fma(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX512F__)
  return (FloatPart)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (FloatPart)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (FloatPart)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < kLanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
INLINE Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return map([&](int i) { return fma(a.part[i], b.part[i], c.part[i]); });
}

INLINE float first_lane(const Floats& value) { return value.part[0][0]; }

// Folds the lanes in halves: 8 + 8, 4 + 4, ... The order of operations is part of the result.
template <class Op>
INLINE float fold(const Floats& value, Op op) {
  float lane[kWidth];
  store(lane, value);
#pragma GCC unroll 4
  for (int half = kWidth / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) lane[i] = op(lane[i], lane[i + half]);
  }
  return lane[0];
}

INLINE float sum(const Floats& value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value.part[0]);
#else
  return fold(value, [](float a, float b) { return a + b; });
#endif
}

INLINE float largest(const Floats& value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value.part[0]);
#else
  return fold(value, [](float a, float b) { return a > b ? a : b; });
#endif
}

// Whether any of the first `count` lanes is larger than `bound`; a NaN is not.
INLINE bool any_above(const Floats& value, float bound, int count = kWidth) {
#if defined(__AVX512F__)
  const __mmask16 first = (__mmask16)((1u << count) - 1);
  return _mm512_mask_cmp_ps_mask(first, (__m512)value.part[0], _mm512_set1_ps(bound), _CMP_GT_OQ);
#else
  float lane[kWidth];
  store(lane, value);
  int found = 0;
  for (int i = 0; i < count; i++) found |= lane[i] > bound;
  return found;
#endif
}

// Returns `value` in lanes first <= lane < end, and `other` in all others.
INLINE Floats keep_lanes(const Floats& value, int first, int end, float other) {
  Floats result;
  for (int i = 0; i < kParts; i++) {
    IntPart lane;
    for (int j = 0; j < kLanes; j++) lane[j] = i * kLanes + j;
    result.part[i] = ((lane >= first) & (lane < end)) ? value.part[i] : FloatPart{} + other;
  }
  return result;
}

// 2^whole * p(fraction), with whole + fraction = x and |fraction| <= 1/2. Exactly 0 below 2^-126.5.
template <class Polynomial>
INLINE Floats exp2_by(const Floats& x, Polynomial p) {
#if defined(__AVX512DQ__)
  constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;  // takes as long as two instructions to give
  const Floats fraction = {{(FloatPart)_mm512_reduce_ps((__m512)x.part[0], kRounding)}};  // the integer itself; 0 of infinity
  const auto whole = (__m512)(x - fraction).part[0];
  // A lane whose result underflows makes the whole instruction take 36 times as long (Granite Rapids). So it is
  // excluded.
  const __mmask16 counts = _mm512_cmp_ps_mask(whole, _mm512_set1_ps(-127.0f), _CMP_NLE_UQ);
  return Floats{{(FloatPart)_mm512_maskz_scalef_ps(counts, (__m512)p(fraction).part[0], whole)}};
#else
  const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Floats lower = max(broadcast(-127.0f), x);
  const Floats clamped = map([&](int i) { return lower.part[i] > 127.0f ? FloatPart{} + 127.0f : lower.part[i]; });
  const Floats shifted = clamped + shifter;
  const Floats power = p(clamped - (shifted - shifter));
  return map([&](int i) {
    const IntPart exponent = ((IntPart)shifted.part[i] - 0x4B400000 + 127) << 23;  // 2^-127 becomes 0
    return power.part[i] * (FloatPart)exponent;
  });
#endif
}

// 2^x with relative error 1e-7, by the polynomial of Cephes; exp2(0) is exactly 1.
INLINE Floats exp2(const Floats& x) {
  return exp2_by(x, [](const Floats& f) {
    Floats p = broadcast(1.535336188319500e-4f);
    p = fma(p, f, broadcast(1.339887440266574e-3f));
    p = fma(p, f, broadcast(9.618437357674640e-3f));
    p = fma(p, f, broadcast(5.550332471162809e-2f));
    p = fma(p, f, broadcast(2.402264791363012e-1f));
    p = fma(p, f, broadcast(6.931472028550421e-1f));
    return fma(p, f, broadcast(1.0f));
  });
}

// 2^x with relative error 3e-6, which is enough if the result is rounded to bf16 next. A minimax fit.
INLINE Floats rough_exp2(const Floats& x) {
  return exp2_by(x, [](const Floats& f) {
    Floats p = broadcast(9.570068844e-3f);
    p = fma(p, f, broadcast(5.591780839e-2f));
    p = fma(p, f, broadcast(2.402474506e-1f));
    p = fma(p, f, broadcast(6.931218213e-1f));
    return fma(p, f, broadcast(0.9999992616f));
  });
}

constexpr float kLog2E = 1.4426950408889634f;

// 1 / (1 + exp(-x))
INLINE Floats sigmoid(const Floats& x) {
  return broadcast(1.0f) / (broadcast(1.0f) + exp2(x * broadcast(-kLog2E)));
}

// log(1 + e^x) with relative error 1e-7: log(1 + t) is 2 artanh(t / (2 + t)), and the square of that argument is at
// most 1/9.
INLINE Floats softplus(const Floats& x) {
  const Floats zero = broadcast(0.0f), small = exp2((zero - max(x, zero - x)) * broadcast(kLog2E));
  const Floats ratio = small / (broadcast(2.0f) + small), square = ratio * ratio;
  Floats series = broadcast(1.0f / 15);
  for (int odd = 13; odd > 0; odd -= 2) series = fma(series, square, broadcast(1.0f / odd));
  return fma(broadcast(2.0f) * ratio, series, max(x, zero));
}

// Element types. A *word* holds kPerWord neighbours in 32 bits, which one lane of dot() multiplies.
struct Fp32 {
  using Value = float;
  static constexpr int kPerWord = 1;

  static INLINE Floats load(const float* from) { return rootgraft::load(from); }
  static INLINE void store(float* to, const Floats& value) { rootgraft::store(to, value); }
  static INLINE void store_two(float* to, const Floats& first, const Floats& second) {
    rootgraft::store(to, first);
    rootgraft::store(to + kWidth, second);
  }
  static INLINE Floats weight_exp2(const Floats& x) { return exp2(x); }
  static INLINE float widen(float value) { return value; }
  static INLINE float narrow(float value) { return value; }
  // acc + a * b
  static INLINE Floats dot(const Words& a, const Words& b, const Floats& acc) {
    return map([&](int i) { return fma((FloatPart)a.part[i], (FloatPart)b.part[i], acc.part[i]); });
  }
};

struct Bf16 {
  using Value = uint16_t;
  static constexpr int kPerWord = 2;

  static INLINE Floats load(const uint16_t* from) {
#if defined(__AVX512F__)
    return Floats{{(FloatPart)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(from)), 16)}};
#else
    return map([&](int i) {
      const HalfPart half = load_as<HalfPart>(from + i * kLanes);
      return (FloatPart)(__builtin_convertvector(half, WordPart) << 16);
    });
#endif
  }

  // The value that store() would keep, for each lane.
  static INLINE Floats rounded(const Floats& value) {
    return map([&](int i) {
      const WordPart bits = (WordPart)value.part[i], quiet_nan = WordPart{} + 0x7FC00000;
      const WordPart rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
      return (FloatPart)(value.part[i] == value.part[i] ? rounded : quiet_nan);
    });
  }

  // Rounds to the nearest, ties to even.
  static INLINE void store(uint16_t* to, const Floats& value) {
#if defined(__AVX512BF16__)
    const __m256bh half = _mm512_cvtneps_pbh((__m512)value.part[0]);
    std::memcpy(to, &half, sizeof(half));
#else
    const Floats narrow = rounded(value);
    for (int i = 0; i < kParts; i++) {
      const HalfPart half = __builtin_convertvector((WordPart)narrow.part[i] >> 16, HalfPart);
      std::memcpy(to + i * kLanes, &half, sizeof(half));
    }
#endif
  }

  // Stores two neighbouring vectors.
  static INLINE void store_two(uint16_t* to, const Floats& first, const Floats& second) {
#if defined(__AVX512BF16__)
    const auto both = _mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0]);
    __builtin_memcpy(to, &both, sizeof(both));
#else
    store(to, first);
    store(to + kWidth, second);
#endif
  }

  static INLINE Floats weight_exp2(const Floats& x) { return rough_exp2(x); }

  static INLINE float widen(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    return load_as<float>(&bits);
  }

  static INLINE uint16_t narrow(float value) {
    uint16_t all[kWidth];
    store(all, broadcast(value));
    return all[0];
  }

  // The words made of low[i] and high[i], for 16 of each.
  static INLINE Words interleave(const uint16_t* low, const uint16_t* high) {
#if defined(__AVX512BW__)
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i even = _mm512_castsi256_si512(load_as<__m256i>(low));
    const __m512i odd = _mm512_castsi256_si512(load_as<__m256i>(high));
    return Words{{(WordPart)_mm512_permutex2var_epi16(even, _mm512_load_si512(kOrder), odd)}};
#else
    Words result;
    for (int i = 0; i < kParts; i++) {
      const HalfPart even = load_as<HalfPart>(low + i * kLanes), odd = load_as<HalfPart>(high + i * kLanes);
      result.part[i] = __builtin_convertvector(even, WordPart) | __builtin_convertvector(odd, WordPart) << 16;
    }
    return result;
#endif
  }

  // acc + (low of a * low of b) + (high of a * high of b)
  static INLINE Floats dot(const Words& a, const Words& b, const Floats& acc) {
#if defined(__AVX512BF16__)
    return Floats{{(FloatPart)_mm512_dpbf16_ps((__m512)acc.part[0], (__m512bh)a.part[0], (__m512bh)b.part[0])}};
#elif ROOTGRAFT_DOT_BF16
    return map([&](int i) {
      return (FloatPart)vbfdotq_f32((float32x4_t)acc.part[i], (bfloat16x8_t)a.part[i], (bfloat16x8_t)b.part[i]);
    });
#else
    return map([&](int i) {
      const FloatPart low = fma((FloatPart)(a.part[i] << 16), (FloatPart)(b.part[i] << 16), acc.part[i]);
      return fma((FloatPart)(a.part[i] & 0xFFFF0000u), (FloatPart)(b.part[i] & 0xFFFF0000u), low);
    });
#endif
  }
};

// Calls f(E{}, ...) with an element type for each flag: Bf16 if it is true, Fp32 if it is not.
template <class F>
INLINE void with_types(F f) {
  f();
}
template <class F, class... Flags>
INLINE void with_types(F f, bool is_bf16, Flags... flags) {
  if (is_bf16) with_types([&](auto... types) { f(Bf16{}, types...); }, flags...);
  else with_types([&](auto... types) { f(Fp32{}, types...); }, flags...);
}

}  // namespace rootgraft
