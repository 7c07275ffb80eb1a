// Blocks of a panel as numbers, in order.
#pragma once

#include "gguf/super_blocks.h"
#include "int8/quantise.h"
#include "simd/amx.h"

namespace rootgraft {

#if defined(__AVX512F__)
// Lane i is the number i: a permutation by four bits of each lane turns these into numbers.
INLINE __m512 sixteen_numbers() {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
#endif

// A block of sixteen columns: number<I>() is the one of each at place I along K.
struct NibbleNumbers {
  const uint32_t* from;
  Floats scale, minimum;

  template <int I>
  INLINE Floats number() const {
    constexpr int kHalf = kBlockValues / 2, kShift = 8 * (I % kWordBytes) + (I < kHalf ? 0 : 4);
    const Words word = load_words(from + I % kHalf / kWordBytes * kWidth);
#if defined(__AVX512F__)
    const __m512i low = _mm512_srli_epi32((__m512i)word.part[0], kShift);
    return fma(scale, Floats{{(FloatPart)_mm512_permutexvar_ps(low, sixteen_numbers())}}, minimum);
#else
    return fma(scale, map([&](int p) {
      return __builtin_convertvector((IntPart)(word.part[p] >> kShift & 15), FloatPart);
    }), minimum);
#endif
  }
};

struct ByteNumbers {
  const uint32_t* from;
  Floats scales[2];  // of the first sixteen places, and of the others

  template <int I>
  INLINE Floats number() const {
    const Words word = load_words(from + I / kWordBytes * kWidth);
    const Floats whole = map([&](int p) {
      const IntPart value = (IntPart)((word.part[p] ^ 0x80808080u) << (24 - 8 * (I % kWordBytes))) >> 24;
      return __builtin_convertvector(value, FloatPart);
    });
    return whole * scales[I / (kBlockValues / 2)];
  }
};

#if ROOTGRAFT_AMX
// A word of each of four registers, which are so many words apart, in as many lanes.
INLINE __m512i four_words(const uint32_t* from, int apart) {
  const __m512i first = _mm512_set1_epi32((int)from[0]);
  const __m512i second = _mm512_mask_set1_epi32(first, 0x00F0, (int)from[apart]);
  const __m512i third = _mm512_mask_set1_epi32(second, 0x0F00, (int)from[2 * apart]);
  return _mm512_mask_set1_epi32(third, 0xF000, (int)from[3 * apart]);
}

// The same of blocks that are arranged by columns, see block_rows.h.
struct NibbleRowNumbers {
  const uint32_t* from;
  Floats scale, minimum;

  template <int I>
  INLINE Floats number() const {
    constexpr int kShift = I % 2 * 16;
    const __m512i shifts = _mm512_add_epi32(_mm512_set4_epi32(12, 8, 4, 0), _mm512_set1_epi32(kShift));
    const __m512i low = _mm512_srlv_epi32(four_words(from + I / 2, kWidth), shifts);
    return fma(scale, Floats{{(FloatPart)_mm512_permutexvar_ps(low, sixteen_numbers())}}, minimum);
  }
};

struct SymmetricRowNumbers : NibbleRowNumbers {};

struct ByteRowNumbers {
  const uint32_t* from;
  Floats scales[2];

  template <int I>
  INLINE Floats number() const {
    constexpr int kHalf = I / (kBlockValues / 2), kPlace = I % (kBlockValues / 2);
    const __m512i words = four_words(from + kHalf * kWidth + kPlace, 2 * kWidth);
    const __m512i bytes = _mm512_srlv_epi32(words, _mm512_set4_epi32(24, 16, 8, 0));
    const __m512i whole = _mm512_sub_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(255)), _mm512_set1_epi32(128));
    return Floats{{(FloatPart)_mm512_cvtepi32_ps(whole)}} * scales[kHalf];
  }
};
#endif

// All numbers of a block.
template <int I = 0, class Block>
INLINE void store_numbers(const Block& block, float (*to)[kWidth]) {
  if constexpr (I < kBlockValues) {
    store(to[I], block.template number<I>());
    store_numbers<I + 1>(block, to);
  }
}

// The numbers of one column.
template <class Block>
INLINE void store_column(const Block& block, int column, float* to) {
  float numbers[kBlockValues][kWidth];
  store_numbers(block, numbers);
  for (int i = 0; i < kBlockValues; i++) to[i] = numbers[i][column];
}

#if ROOTGRAFT_AMX
INLINE void store_column(const NibbleRowNumbers& block, int column, float* to) {
  const __m512i places = _mm512_loadu_si512(block.from + column / 4 * kWidth);
  const __m512i low = _mm512_srl_epi16(places, _mm_cvtsi32_si128(column % 4 * 4));
  const Floats scale = broadcast(block.scale.part[0][column]), minimum = broadcast(block.minimum.part[0][column]);
  const auto sixteen = [&](const __m256i& halves, float* sixteen_to) {
    const __m512 whole = _mm512_permutexvar_ps(_mm512_cvtepu16_epi32(halves), sixteen_numbers());
    store(sixteen_to, fma(scale, Floats{{(FloatPart)whole}}, minimum));
  };
  sixteen(_mm512_castsi512_si256(low), to);
  sixteen(_mm512_extracti64x4_epi64(low, 1), to + kWidth);
}

INLINE void store_column(const ByteRowNumbers& block, int column, float* to) {
  for (int half = 0; half < 2; half++) {
    const __m512i words = _mm512_loadu_si512(block.from + (column / 4 * 2 + half) * kWidth);
    const __m512i bytes = _mm512_srl_epi32(words, _mm_cvtsi32_si128(column % 4 * 8));
    const __m512i whole = _mm512_sub_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(255)), _mm512_set1_epi32(128));
    const Floats scale = broadcast(block.scales[half].part[0][column]);
    store(to + half * kWidth, Floats{{(FloatPart)_mm512_cvtepi32_ps(whole)}} * scale);
  }
}
#endif

// Where a block is, of panels that lie one after another.
struct BlockPlace {
  const uint32_t* words = nullptr;
  const uint16_t* scales = nullptr;
  int index = 0;  // in its super-block
};

// Of a block that is counted over panels.
template <Format F>
INLINE BlockPlace block_place(const uint32_t* panels, const uint16_t* scales, int64_t block) {
  const int64_t halves = kIsSuper<F> ? block / kSuperBlocks * kSuperHalves<F> : block * kPanelScales<F>;
  return {panels + block * kPanelWords<F>, scales + halves, (int)(block % kSuperBlocks)};
}

// Asks for the memory of a block so many further on.
template <Format F>
INLINE void prefetch_block(const BlockPlace& place, int blocks) {
  const uint32_t* words = place.words + blocks * kPanelWords<F>;
  for (int i = 0; i < kPanelLines<F>; i++) __builtin_prefetch(words + i * kWidth, 0, 3);
  const int halves = kIsSuper<F> ? kSuperHalves<F> + place.index * kBlockHalves<F> : blocks * kBlockHalves<F>;
  __builtin_prefetch(place.scales + halves, 0, 3);
}

// Blocks of a format as numbers.
template <Format F>
struct BlockNumbers {
  using Nibbles = NibbleNumbers;
  using Bytes = ByteNumbers;
};
#if ROOTGRAFT_AMX
struct RowNumbers {
  using Nibbles = NibbleRowNumbers;
  using Bytes = ByteRowNumbers;
};
template <>
struct BlockNumbers<Format::kNibbleRows> : RowNumbers {};
template <>
struct BlockNumbers<Format::kByteRows> : RowNumbers {};
template <>
struct BlockNumbers<Format::kSuperNibbleRows> : RowNumbers {};
template <>
struct BlockNumbers<Format::kSuperByteRows> : RowNumbers {};
template <>
struct BlockNumbers<Format::kZeroPointRows> : RowNumbers {};
template <>
struct BlockNumbers<Format::kSymmetricRows> {
  using Nibbles = SymmetricRowNumbers;
  using Bytes = ByteRowNumbers;
};
#endif

// The block at a place, which moves on to the next.
template <Format F>
INLINE auto next_block(BlockPlace& place) {
  using Nibbles = typename BlockNumbers<F>::Nibbles;
  using Bytes = typename BlockNumbers<F>::Bytes;
  const uint32_t* words = place.words;
  const uint16_t* scales = place.scales;
  place.words += kPanelWords<F>;
  if constexpr (kIsSuper<F>) {
    using Byte = std::conditional_t<kIsNibbles<F>, uint8_t, int8_t>;
    const auto* steps = reinterpret_cast<const Byte*>(scales + kFactorHalves<F> + place.index * kStepHalves);
    if (++place.index == kSuperBlocks) place.index = 0, place.scales += kSuperHalves<F>;
    const Floats factor = load_half(scales), first = load_bytes(steps), second = load_bytes(steps + kWidth);
    if constexpr (!kIsNibbles<F>) return Bytes{words, {factor * first, factor * second}};
    else return Nibbles{words, factor * first, broadcast(-1.0f) * (load_half(scales + kWidth) * second)};
  } else {
    place.scales += kPanelScales<F>;
    const Floats scale = load_half(scales);
    if constexpr (kIsNibbles<F>) return Nibbles{words, scale, minimum_of<F>(scale, scales)};
    else return Bytes{words, {scale, scale}};
  }
}

// f(std::integral_constant<Format, F>{}) for a format with blocks.
template <class Fn>
INLINE void with_block_format(Format format, Fn f) {
  switch (format) {
    case Format::kNibbles: return f(std::integral_constant<Format, Format::kNibbles>{});
    case Format::kBytes: return f(std::integral_constant<Format, Format::kBytes>{});
    case Format::kSuperNibbles: return f(std::integral_constant<Format, Format::kSuperNibbles>{});
    case Format::kSuperBytes: return f(std::integral_constant<Format, Format::kSuperBytes>{});
    case Format::kSymmetric: return f(std::integral_constant<Format, Format::kSymmetric>{});
    case Format::kZeroPoints: return f(std::integral_constant<Format, Format::kZeroPoints>{});
#if ROOTGRAFT_AMX
    case Format::kNibbleRows: return f(std::integral_constant<Format, Format::kNibbleRows>{});
    case Format::kByteRows: return f(std::integral_constant<Format, Format::kByteRows>{});
    case Format::kSuperNibbleRows: return f(std::integral_constant<Format, Format::kSuperNibbleRows>{});
    case Format::kSuperByteRows: return f(std::integral_constant<Format, Format::kSuperByteRows>{});
    case Format::kSymmetricRows: return f(std::integral_constant<Format, Format::kSymmetricRows>{});
    case Format::kZeroPointRows: return f(std::integral_constant<Format, Format::kZeroPointRows>{});
#endif
    case Format::kChannels:
    case Format::kWidened:
    default: return;
  }
}

// Words of a panel, and halves of its scales.
struct PanelSize {
  int64_t words, halves;
};

inline PanelSize panel_size(Format format, int64_t width) {
  PanelSize size = {};
  with_block_format(format, [&](auto f) {
    constexpr Format F = f.value;
    const int64_t blocks = width / kBlockValues;
    size.words = blocks * kPanelWords<F>;
    size.halves = scale_halves<F>(blocks);
  });
  return size;
}

}  // namespace rootgraft
