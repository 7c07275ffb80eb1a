// Reads the blocks of a panel as numbers, in order.
#pragma once

#include "gguf/super_blocks.h"
#include "int8/quantise.h"
#include "simd/amx.h"

namespace rootgraft {

#if defined(__AVX512F__)
// Lane i is the number i. A permutation indexed by four bits of each lane converts these bits to numbers.
INLINE __m512 sixteen_numbers() {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
#endif

constexpr int kHalfWords = kBlockWords / 2;

// A block of sixteen columns. number<I>() returns the number of each column at place I along K.
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

// The integers of IQ4_NL, or twice the numbers of E2M1.
template <Format F>
constexpr FourBitTable kFourBits = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
template <>
inline constexpr FourBitTable kFourBits<Format::kFloat4> = {{0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12}};
template <>
inline constexpr FourBitTable kFourBits<Format::kSuperFloat4> = kFourBits<Format::kFloat4>;

// The entries of a table as bytes, with 128 added.
struct BiasedTable {
  uint8_t of[16];
};

template <Format F>
constexpr BiasedTable biased_table() {
  BiasedTable result = {};
  for (int i = 0; i < 16; i++) result.of[i] = (uint8_t)(128 + (int)kFourBits<F>.of[i]);
  return result;
}

// The table's entries for numbers below 16, one in each byte.
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

// Like NibbleNumbers, for the entries of a table, and without a minimum.
template <Format F>
struct TableNumbers : NibbleNumbers {
  // The entries for the numbers at places 4 i .. 4 i + 3, one in each byte, with 128 added.
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
      // the lowest three bits choose within eight entries, the fourth chooses the eight
      const auto low = (__m256i)(word.part[p] >> kShift);
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

// Numbers in planes: kLow bits in the lower ones, and kTop bits, which may be 0, in those above.
template <int kLow, int kTop>
struct PlaneNumbers {
  static constexpr uint32_t kLowMask = (1 << kLow) - 1, kTopMask = (1 << kTop) - 1, kBytes = 0x01010101;

  const uint32_t* from;
  Floats scales[2], minima[2];  // for the first sixteen places, and for the others

  template <int I>
  INLINE Floats number() const {
    constexpr int kHalf = I / (kBlockValues / 2);
    const Words whole = words<I>();
    return fma(scales[kHalf], map([&](int p) {
      return __builtin_convertvector((IntPart)whole.part[p], FloatPart);
    }), minima[kHalf]);
  }

  // The number at a place, as a word.
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

  // The numbers at places 4 i .. 4 i + 3, one in each byte.
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

  // Shifts bits down, or up, by this many places.
  template <int kBy>
  static INLINE WordPart moved(const WordPart& bits) {
    if constexpr (kBy >= 0) return bits >> kBy;
    else return bits << -kBy;
  }
};

// The values that numbers of three bits choose in the grids of IQ2_XXS, IQ2_XS and IQ2_S: a level with its sign.
alignas(64) inline constexpr float kGridValues[16] = {1, 3.125f, 5.375f, 0, -1, -3.125f, -5.375f, 0};

struct GridNumbers {
  PlaneNumbers<2, 1> numbers;

  template <int I>
  INLINE Floats number() const {
    const Words whole = numbers.words<I>();
    return numbers.scales[I / (kBlockValues / 2)] * map([&](int p) {
#if defined(__AVX512F__)
      return (FloatPart)_mm512_permutexvar_ps((__m512i)whole.part[p], _mm512_load_ps(kGridValues));
#elif defined(__AVX2__)
      return (FloatPart)_mm256_permutevar8x32_ps(_mm256_load_ps(kGridValues), (__m256i)whole.part[p]);
#else
      FloatPart value;
      for (int i = 0; i < kLanes; i++) value[i] = kGridValues[whole.part[p][i]];
      return value;
#endif
    });
  }
};

// Numbers of E2M1, with separate scales for the first sixteen places and for the others.
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
// Loads a word from each of four registers that are `apart` words apart, and repeats each word in four lanes.
INLINE __m512i four_words(const uint32_t* from, int apart) {
  const __m512i first = _mm512_set1_epi32((int)from[0]);
  const __m512i second = _mm512_mask_set1_epi32(first, 0x00F0, (int)from[apart]);
  const __m512i third = _mm512_mask_set1_epi32(second, 0x0F00, (int)from[2 * apart]);
  return _mm512_mask_set1_epi32(third, 0xF000, (int)from[3 * apart]);
}

// The same for blocks that are arranged by columns, see block_rows.h.
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

// Fields of a given number of bits in lanes of 16 or 32 bits; see block_rows.h. Registers: those of all places, or of
// sixteen.
template <Format F>
struct RowFields {
  static constexpr int kBits = bits_of<F>(), kLane = kBits > 5 ? 32 : 16, kCount = kLane / kBits, kSpare = kLane % kBits;
  static constexpr int kRegisters = kBits * kWidth / kLane, kFirstSpare = kCount * kBits;
  static constexpr uint32_t kMask = (1 << kBits) - 1;

  // The lane of a register that holds a place along K; also its word, and the bit at which the lane begins in it.
  static constexpr int lane(int i, int place) {
    return kLane == 16 ? i * kBlockValues + place : (2 * i + place / kWidth) * kWidth + place % kWidth;
  }
  static constexpr int word(int i, int place) { return lane(i, place) * kLane / 32; }
  static constexpr int first_bit(int place) { return kLane == 16 ? place % 2 * 16 : 0; }

  // Calls f(lane, bit in the lane, bit of the number, number of bits) for the parts of a column's number.
  template <class Fn>
  static INLINE void for_parts(int column, int place, Fn f) {
    if (column < kCount * kRegisters) return f(lane(column / kCount, place), column % kCount * kBits, 0, kBits);
    for (int i = 0; i < kRegisters; i++) f(lane(i, place), kFirstSpare, i * kSpare, kSpare);
  }
};

// The entries of a format's table.
template <Format F>
INLINE const float* values_of() {
  return kUnarranged<F> == Format::kSuperGrid ? kGridValues : kFourBits<kUnarranged<F>>.of;
}
template <Format F>
constexpr bool kHasTable = kIsTable<F> || kUnarranged<F> == Format::kSuperGrid;

// Numbers in such fields, with scales and minima for the first sixteen places and for the others.
template <Format F>
struct FieldRowNumbers {
  using Fields = RowFields<F>;

  const uint32_t* from;
  Floats scales[2], minima[2];

  // The numbers of all columns at a place. `last` are the fields of the last column, if these are in left-over bits.
  template <int I>
  INLINE Floats number(const uint32_t* last) const {
    constexpr int kHalf = I / (kBlockValues / 2);
    const __m512i whole = fields<I>(last);
    if constexpr (kHasTable<F>) {
      return scales[kHalf] * Floats{{(FloatPart)_mm512_permutexvar_ps(whole, _mm512_loadu_ps(values_of<F>()))}};
    } else {
      return fma(scales[kHalf], Floats{{(FloatPart)_mm512_cvtepi32_ps(whole)}}, minima[kHalf]);
    }
  }

  // Stores the numbers of a column.
  INLINE void store_column(int column, float* to) const {
    using Lane = std::conditional_t<Fields::kLane == 16, uint16_t, uint32_t>;
    const auto* lanes = reinterpret_cast<const Lane*>(from);
    for (int half = 0; half < 2; half++, to += kWidth) {
      uint32_t whole[kWidth] = {};
      for (int i = 0; i < kWidth; i++) {
        Fields::for_parts(column, half * kWidth + i, [&](int lane, int bit, int up, int bits) {
          whole[i] |= ((uint32_t)lanes[lane] >> bit & ((1u << bits) - 1)) << up;
        });
      }
      const Floats scale = broadcast(scales[half].part[0][column]), minimum = broadcast(minima[half].part[0][column]);
      const __m512i all = _mm512_loadu_si512(whole);
      if constexpr (kHasTable<F>) {
        store(to, scale * Floats{{(FloatPart)_mm512_permutexvar_ps(all, _mm512_loadu_ps(values_of<F>()))}});
      } else {
        store(to, fma(scale, Floats{{(FloatPart)_mm512_cvtepi32_ps(all)}}, minimum));
      }
    }
  }

 private:
  // The fields of all columns at a place.
  template <int I>
  INLINE __m512i fields(const uint32_t* last) const {
    alignas(64) static constexpr auto kShifts = [] {
      struct { uint32_t of[kWidth]; } shifts = {};
      for (int i = 0; i < kWidth; i++) shifts.of[i] = (uint32_t)(Fields::first_bit(I) + i % Fields::kCount * Fields::kBits);
      return shifts;
    }();
    __m512i words = _mm512_set1_epi32((int)from[Fields::word(0, I)]);
#pragma GCC unroll 8
    for (int i = 1; i < Fields::kRegisters; i++) {
      const auto lanes = (__mmask16)(0xFFFFu << i * Fields::kCount);
      words = _mm512_mask_set1_epi32(words, lanes, (int)from[Fields::word(i, I)]);
    }
    const __m512i shifted = _mm512_srlv_epi32(words, _mm512_load_si512(kShifts.of));
    __m512i found = _mm512_and_si512(shifted, _mm512_set1_epi32(Fields::kMask));
    if constexpr (Fields::kSpare > 0) found = _mm512_mask_set1_epi32(found, 0x8000, (int)last[I]);
    return found;
  }
};
#endif

// Converts all numbers of a block.
template <int I = 0, class Block>
INLINE void store_numbers(const Block& block, float (*to)[kWidth]) {
  if constexpr (I < kBlockValues) {
    store(to[I], block.template number<I>());
    store_numbers<I + 1>(block, to);
  }
}

// Converts the numbers of one column.
template <class Block>
INLINE void store_column(const Block& block, int column, float* to) {
  float numbers[kBlockValues][kWidth];
  store_numbers(block, numbers);
  for (int i = 0; i < kBlockValues; i++) to[i] = numbers[i][column];
}

#if ROOTGRAFT_AMX
template <Format F>
INLINE void store_column(const FieldRowNumbers<F>& block, int column, float* to) {
  block.store_column(column, to);
}

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

// The position of a block in panels that are one after another.
struct BlockPlace {
  const uint32_t* words = nullptr;
  const uint16_t* scales = nullptr;
  int index = 0;  // index in its super-block
};

// The position of a block that is counted over panels.
template <Format F>
INLINE BlockPlace block_place(const uint32_t* panels, const uint16_t* scales, int64_t block) {
  const int64_t halves = kIsSuper<F> ? block / kSuperBlocks * kSuperHalves<F> : block * kPanelScales<F>;
  return {panels + block * kPanelWords<F>, scales + halves, (int)(block % kSuperBlocks)};
}

// Prefetches the memory of the block this many blocks further on.
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

// A block of a super-block; its factors and steps are at these addresses.
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

// The block at a position, which is advanced to the next block. Its words are read in the order of the format that is
// not arranged by columns and has no fields.
template <Format F>
INLINE auto next_unarranged(BlockPlace& place) {
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

#if ROOTGRAFT_AMX
// A block that is read as one of another format with its words in another order.
template <Format F, class Block>
INLINE FieldRowNumbers<F> in_fields(const Block& block) {
  if constexpr (std::is_same_v<Block, GridNumbers>) return in_fields<F>(block.numbers);
  else if constexpr (std::is_same_v<Block, PlanesOf<F>>) {
    return {block.from, {block.scales[0], block.scales[1]}, {block.minima[0], block.minima[1]}};
  } else if constexpr (std::is_same_v<Block, Float4Numbers>) {
    const Floats none = broadcast(0.0f);
    return {block.halves[0].from, {block.halves[0].scale, block.halves[1].scale}, {none, none}};
  } else {
    return {block.from, {block.scale, block.scale}, {block.minimum, block.minimum}};
  }
}
#endif

// The block at a position, which is advanced to the next block.
template <Format F>
INLINE auto next_block(BlockPlace& place) {
#if ROOTGRAFT_AMX
  if constexpr (kHasFields<F>) return in_fields<F>(next_unarranged<kUnarranged<F>>(place));
  else return next_unarranged<F>(place);
#else
  return next_unarranged<F>(place);
#endif
}

// Calls f(std::integral_constant<Format, F>{}) for a format with blocks.
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
    case Format::kTableRows: return f(std::integral_constant<Format, Format::kTableRows>{});
    case Format::kFloat4Rows: return f(std::integral_constant<Format, Format::kFloat4Rows>{});
    case Format::kSuper5BitsRows: return f(std::integral_constant<Format, Format::kSuper5BitsRows>{});
    case Format::kSuper3BitsRows: return f(std::integral_constant<Format, Format::kSuper3BitsRows>{});
    case Format::kSuper2BitsRows: return f(std::integral_constant<Format, Format::kSuper2BitsRows>{});
    case Format::kSuperTableRows: return f(std::integral_constant<Format, Format::kSuperTableRows>{});
    case Format::kSuperFloat4Rows: return f(std::integral_constant<Format, Format::kSuperFloat4Rows>{});
    case Format::k5BitsRows: return f(std::integral_constant<Format, Format::k5BitsRows>{});
    case Format::kSymmetric5BitsRows: return f(std::integral_constant<Format, Format::kSymmetric5BitsRows>{});
    case Format::kSuperGridRows: return f(std::integral_constant<Format, Format::kSuperGridRows>{});
    case Format::kSuper6BitsRows: return f(std::integral_constant<Format, Format::kSuper6BitsRows>{});
#endif
    case Format::kChannels:
    case Format::kWidened:
    default: return;
  }
}

// Number of words of a panel, and of half-precision scales.
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
