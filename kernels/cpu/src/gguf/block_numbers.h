// Blocks of a panel as numbers, in order.
#pragma once

#include "gguf/super_blocks.h"
#include "int8/quantise.h"

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

// All numbers of a block.
template <int I = 0, class Block>
INLINE void store_numbers(const Block& block, float (*to)[kWidth]) {
  if constexpr (I < kBlockValues) {
    store(to[I], block.template number<I>());
    store_numbers<I + 1>(block, to);
  }
}

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
  __builtin_prefetch(place.scales + blocks * kPanelScales<F>, 0, 3);
}

// The block at a place, which moves on to the next.
template <Format F>
INLINE auto next_block(BlockPlace& place) {
  const uint32_t* words = place.words;
  const uint16_t* scales = place.scales;
  place.words += kPanelWords<F>;
  if constexpr (F == Format::kNibbles) {
    place.scales += kPanelScales<F>;
    return NibbleNumbers{words, load_half(scales), load_half(scales + kWidth)};
  } else if constexpr (F == Format::kBytes) {
    place.scales += kPanelScales<F>;
    const Floats scale = load_half(scales);
    return ByteNumbers{words, {scale, scale}};
  } else {
    using Byte = std::conditional_t<F == Format::kSuperNibbles, uint8_t, int8_t>;
    const auto* steps = reinterpret_cast<const Byte*>(scales + kFactorHalves<F> + place.index * kStepHalves);
    if (++place.index == kSuperBlocks) place.index = 0, place.scales += kSuperHalves<F>;
    const Floats factor = load_half(scales), first = load_bytes(steps), second = load_bytes(steps + kWidth);
    if constexpr (F == Format::kSuperBytes) return ByteNumbers{words, {factor * first, factor * second}};
    else return NibbleNumbers{words, factor * first, broadcast(-1.0f) * (load_half(scales + kWidth) * second)};
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
    case Format::kChannels:
    case Format::kWidened: return;
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
    size.halves = kIsSuper<F> ? blocks / kSuperBlocks * kSuperHalves<F> : blocks * kPanelScales<F>;
  });
  return size;
}

}  // namespace rootgraft
