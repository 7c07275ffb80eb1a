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

constexpr int kHalfWords = kBlockWords / 2;

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

struct FourBitTable {
  float of[16];
};

// The integers of IQ4_NL, and twice the numbers of E2M1.
template <Format F>
constexpr FourBitTable kFourBits = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
template <>
inline constexpr FourBitTable kFourBits<Format::kFloat4> = {{0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12}};

// The entries of a table as bytes, 128 added.
struct BiasedTable {
  uint8_t of[16];
};

template <Format F>
constexpr BiasedTable biased_table() {
  BiasedTable result = {};
  for (int i = 0; i < 16; i++) result.of[i] = (uint8_t)(128 + (int)kFourBits<F>.of[i]);
  return result;
}

// The entries at numbers below 16, one in each byte.
INLINE Words look_up_bytes(const Words& numbers, const BiasedTable& table) {
  Words found;
  for (int p = 0; p < kParts; p++) {
#if defined(__AVX512BW__)
    const __m512i all = _mm512_broadcast_i32x4(load_as<__m128i>(table.of));
    found.part[p] = (WordPart)_mm512_shuffle_epi8(all, (__m512i)numbers.part[p]);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i all = _mm256_broadcastsi128_si256(load_as<__m128i>(table.of));
    found.part[p] = (WordPart)_mm256_shuffle_epi8(all, (__m256i)numbers.part[p]);
#else
    for (int i = 0; i < kLanes; i++) {
      const uint32_t word = numbers.part[p][i];
      found.part[p][i] = table.of[word & 15] | table.of[word >> 8 & 15] << 8 | table.of[word >> 16 & 15] << 16 |
                         (uint32_t)table.of[word >> 24 & 15] << 24;
    }
#endif
  }
  return found;
}

// The same as NibbleNumbers of a table's entries, without a minimum.
template <Format F>
struct TableNumbers : NibbleNumbers {
  // The entries of those at places 4 i up, one in each byte, 128 added.
  INLINE Words four(int i) const {
    alignas(16) static constexpr BiasedTable kTable = biased_table<F>();
    Words numbers = load_words(from + i % kHalfWords * kWidth);
    for (WordPart& part : numbers.part) part = part >> (i < kHalfWords ? 0 : 4) & 0x0F0F0F0F;
    return look_up_bytes(numbers, kTable);
  }

  template <int I>
  INLINE Floats number() const {
    constexpr int kHalf = kBlockValues / 2, kShift = 8 * (I % kWordBytes) + (I < kHalf ? 0 : 4);
    const Words word = load_words(from + I % kHalf / kWordBytes * kWidth);
    const float* table = kFourBits<F>.of;
#if defined(__AVX512F__)
    const __m512i low = _mm512_srli_epi32((__m512i)word.part[0], kShift);
    return scale * Floats{{(FloatPart)_mm512_permutexvar_ps(low, _mm512_loadu_ps(table))}};
#elif defined(__AVX2__)
    return scale * map([&](int p) {
      const auto low = (__m256i)(word.part[p] >> kShift);  // the lowest three bits choose, the fourth which eight
      const __m256 first = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), low);
      const __m256 second = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), low);
      return (FloatPart)_mm256_blendv_ps(first, second, (__m256)_mm256_slli_epi32(low, 28));
    });
#else
    return scale * map([&](int p) {
      FloatPart value;
      for (int i = 0; i < kLanes; i++) value[i] = table[word.part[p][i] >> kShift & 15];
      return value;
    });
#endif
  }
};

// Numbers in planes of kLow bits and, above them, of kTop bits, which may be 0.
template <int kLow, int kTop>
struct PlaneNumbers {
  static constexpr uint32_t kLowMask = (1 << kLow) - 1, kTopMask = (1 << kTop) - 1, kBytes = 0x01010101;

  const uint32_t* from;
  Floats scales[2], minima[2];  // of the first sixteen places, and of the others

  template <int I>
  INLINE Floats number() const {
    constexpr int kHalf = I / (kBlockValues / 2);
    const Words whole = words<I>();
    return fma(scales[kHalf], map([&](int p) {
      return __builtin_convertvector((IntPart)whole.part[p], FloatPart);
    }), minima[kHalf]);
  }

  // The one at a place as a word.
  template <int I>
  INLINE Words words() const {
    constexpr int kFour = I / kWordBytes, kByte = 8 * (I % kWordBytes);
    constexpr int kTopPlace = kByte + kFour / kTopWords * kTopWords;
    const Words top = top_bits(kFour);
    Words whole = load_words(from + kFour % kLow * kWidth);
    for (int p = 0; p < kParts; p++) {
      whole.part[p] = whole.part[p] >> (kByte + kFour / kLow * kLow) & kLowMask;
      if constexpr (kTop > 0) whole.part[p] |= moved<kTopPlace - kLow>(top.part[p]) & kTopMask << kLow;
    }
    return whole;
  }

  // Those at places 4 i up, one in each byte.
  INLINE Words four(int i) const {
    Words bytes = load_words(from + i % kLow * kWidth);
    const Words top = top_bits(i);
    for (int p = 0; p < kParts; p++) {
      bytes.part[p] = bytes.part[p] >> (i / kLow * kLow) & (kLowMask * kBytes);
      if constexpr (kTop > 0) {
        bytes.part[p] |= (top.part[p] >> (i / kTopWords * kTopWords) & (kTopMask * kBytes)) << kLow;
      }
    }
    return bytes;
  }

 private:
  static constexpr int kTopWords = kTop > 0 ? kTop : 1;

  INLINE Words top_bits(int four) const { return load_words(from + (kTop > 0 ? kLow + four % kTopWords : 0) * kWidth); }

  // Bits so many places further down, or up.
  template <int kBy>
  static INLINE WordPart moved(const WordPart& bits) {
    if constexpr (kBy >= 0) return bits >> kBy;
    else return bits << -kBy;
  }
};

// Numbers of three bits that choose a value of the grids of IQ2_XXS, IQ2_XS and IQ2_S: a level, and its sign.
struct GridNumbers {
  PlaneNumbers<2, 1> numbers;

  template <int I>
  INLINE Floats number() const {
    alignas(64) static constexpr float kValues[16] = {1, 3.125f, 5.375f, 0, -1, -3.125f, -5.375f, 0};
    const Words whole = numbers.words<I>();
    return numbers.scales[I / (kBlockValues / 2)] * map([&](int p) {
#if defined(__AVX512F__)
      return (FloatPart)_mm512_permutexvar_ps((__m512i)whole.part[p], _mm512_load_ps(kValues));
#elif defined(__AVX2__)
      return (FloatPart)_mm256_permutevar8x32_ps(_mm256_load_ps(kValues), (__m256i)whole.part[p]);
#else
      FloatPart value;
      for (int i = 0; i < kLanes; i++) value[i] = kValues[whole.part[p][i]];
      return value;
#endif
    });
  }
};

// Numbers of E2M1, with scales of the first sixteen places and of the others.
struct Float4Numbers {
  TableNumbers<Format::kFloat4> halves[2];

  template <int I>
  INLINE Floats number() const {
    return halves[I / (kBlockValues / 2)].template number<I>();
  }
};

struct ByteNumbers {
  const uint32_t* from;
  Floats scale;

  template <int I>
  INLINE Floats number() const {
    const Words word = load_words(from + I / kWordBytes * kWidth);
    const Floats whole = map([&](int p) {
      const IntPart value = (IntPart)((word.part[p] ^ 0x80808080u) << (24 - 8 * (I % kWordBytes))) >> 24;
      return __builtin_convertvector(value, FloatPart);
    });
    return whole * scale;
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
  Floats scale;

  template <int I>
  INLINE Floats number() const {
    constexpr int kHalf = I / (kBlockValues / 2), kPlace = I % (kBlockValues / 2);
    const __m512i words = four_words(from + kHalf * kWidth + kPlace, 2 * kWidth);
    const __m512i bytes = _mm512_srlv_epi32(words, _mm512_set4_epi32(24, 16, 8, 0));
    const __m512i whole = _mm512_sub_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(255)), _mm512_set1_epi32(128));
    return Floats{{(FloatPart)_mm512_cvtepi32_ps(whole)}} * scale;
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
    const Floats scale = broadcast(block.scale.part[0][column]);
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
template <>
struct BlockNumbers<Format::kTable> {
  using Nibbles = TableNumbers<Format::kTable>;
  using Bytes = ByteNumbers;
};
template <>
struct BlockNumbers<Format::kFloat4> {
  using Nibbles = TableNumbers<Format::kFloat4>;
  using Bytes = ByteNumbers;
};
template <>
struct BlockNumbers<Format::kSuperTable> {
  using Nibbles = TableNumbers<Format::kSuperTable>;
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
struct BlockNumbers<Format::kZeroPointRows> : RowNumbers {};
template <>
struct BlockNumbers<Format::kSymmetricRows> {
  using Nibbles = SymmetricRowNumbers;
  using Bytes = ByteRowNumbers;
};
#endif

template <Format F>
using PlanesOf = PlaneNumbers<kLowBits<F>, kTopBits<F>>;

// A block of a super-block in planes, with scales or minima of both halves.
template <Format F>
INLINE auto plane_block(const uint32_t* words, const uint16_t* factors, const uint8_t* steps) {
  using Planes = PlanesOf<F>;
  const Floats factor = load_half(factors);
  if constexpr (!kHasMinimumFactor<F>) {
    const auto* signed_steps = reinterpret_cast<const int8_t*>(steps);
    const Floats first = factor * load_bytes(signed_steps), second = factor * load_bytes(signed_steps + kWidth);
    if constexpr (F == Format::kSuperGrid) {
      return GridNumbers{{words, {first, second}, {}}};
    } else {
      const Floats middle = broadcast(F == Format::kSuper6Bits ? -32.0f : -4.0f);
      return Planes{words, {first, second}, {first * middle, second * middle}};
    }
  } else {
    const Floats minimum = load_half(factors + kWidth) * broadcast(-1.0f);
    if constexpr (F == Format::kSuper5Bits) {
      const Floats scale = factor * load_bytes(steps), offset = minimum * load_bytes(steps + kWidth);
      return Planes{words, {scale, scale}, {offset, offset}};
    } else {
      const auto scale = [&](int half) { return factor * load_half_bytes<0>(steps + half * kWidth); };
      const auto offset = [&](int half) { return minimum * load_half_bytes<4>(steps + half * kWidth); };
      return Planes{words, {scale(0), scale(1)}, {offset(0), offset(1)}};
    }
  }
}

// A block of a super-block, whose factors and steps are at these places.
template <Format F>
INLINE auto super_block(const uint32_t* words, const uint16_t* factors, const uint8_t* steps) {
  if constexpr (kIsPlanes<F>) {
    return plane_block<F>(words, factors, steps);
  } else if constexpr (F == Format::kSuperFloat4) {
    const Floats factor = load(reinterpret_cast<const float*>(factors)), none = broadcast(0.0f);
    const Floats first = factor * load_float8(steps), second = factor * load_float8(steps + kWidth);
    return Float4Numbers{{{{words, first, none}}, {{words, second, none}}}};
  } else if constexpr (kIsTable<F>) {
    const Floats scale = load_half(factors) * load_bytes(reinterpret_cast<const int8_t*>(steps));
    return typename BlockNumbers<F>::Nibbles{{words, scale, broadcast(0.0f)}};
  } else {
    const Floats minimum = broadcast(-1.0f) * (load_half(factors + kWidth) * load_bytes(steps + kWidth));
    return typename BlockNumbers<F>::Nibbles{words, load_half(factors) * load_bytes(steps), minimum};
  }
}

// The block at a place, which moves on to the next.
template <Format F>
INLINE auto next_block(BlockPlace& place) {
  const uint32_t* words = place.words;
  const uint16_t* scales = place.scales;
  place.words += kPanelWords<F>;
  if constexpr (kIsSuper<F>) {
    const auto* steps = reinterpret_cast<const uint8_t*>(scales + kFactorHalves<F> + place.index * kStepHalves<F>);
    if (++place.index == kSuperBlocks) place.index = 0, place.scales += kSuperHalves<F>;
    return super_block<F>(words, scales, steps);
  } else {
    using Nibbles = typename BlockNumbers<F>::Nibbles;
    using Bytes = typename BlockNumbers<F>::Bytes;
    place.scales += kPanelScales<F>;
    const Floats scale = load_half(scales);
    if constexpr (kIsPlanes<F>) {
      const Floats minimum = minimum_of<F>(scale, scales);
      return PlanesOf<F>{words, {scale, scale}, {minimum, minimum}};
    } else if constexpr (kIsTable<F>) return Nibbles{{words, scale, minimum_of<F>(scale, scales)}};
    else if constexpr (kIsNibbles<F>) return Nibbles{words, scale, minimum_of<F>(scale, scales)};
    else return Bytes{words, scale};
  }
}

// f(std::integral_constant<Format, F>{}) for a format with blocks.
template <class Fn>
INLINE void with_block_format(Format format, Fn f) {
  switch (format) {
    case Format::kNibbles: return f(std::integral_constant<Format, Format::kNibbles>{});
    case Format::kBytes: return f(std::integral_constant<Format, Format::kBytes>{});
    case Format::kSuperNibbles: return f(std::integral_constant<Format, Format::kSuperNibbles>{});
    case Format::kSuper6Bits: return f(std::integral_constant<Format, Format::kSuper6Bits>{});
    case Format::kSymmetric: return f(std::integral_constant<Format, Format::kSymmetric>{});
    case Format::kZeroPoints: return f(std::integral_constant<Format, Format::kZeroPoints>{});
    case Format::kTable: return f(std::integral_constant<Format, Format::kTable>{});
    case Format::kFloat4: return f(std::integral_constant<Format, Format::kFloat4>{});
    case Format::kSuper5Bits: return f(std::integral_constant<Format, Format::kSuper5Bits>{});
    case Format::kSuper3Bits: return f(std::integral_constant<Format, Format::kSuper3Bits>{});
    case Format::kSuper2Bits: return f(std::integral_constant<Format, Format::kSuper2Bits>{});
    case Format::kSuperTable: return f(std::integral_constant<Format, Format::kSuperTable>{});
    case Format::kSuperFloat4: return f(std::integral_constant<Format, Format::kSuperFloat4>{});
    case Format::k5Bits: return f(std::integral_constant<Format, Format::k5Bits>{});
    case Format::kSymmetric5Bits: return f(std::integral_constant<Format, Format::kSymmetric5Bits>{});
    case Format::kSuperGrid: return f(std::integral_constant<Format, Format::kSuperGrid>{});
#if ROOTGRAFT_AMX
    case Format::kNibbleRows: return f(std::integral_constant<Format, Format::kNibbleRows>{});
    case Format::kByteRows: return f(std::integral_constant<Format, Format::kByteRows>{});
    case Format::kSuperNibbleRows: return f(std::integral_constant<Format, Format::kSuperNibbleRows>{});
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
