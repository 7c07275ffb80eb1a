// Quantisation of rows of x to integers with one scale per row and separate outliers, for products of bytes.
//
// In a language model a few values of a row are tens of times as large as the others. A scale that fits them would
// leave few steps for the others. So the scale fits the usual values of the row, and a part of each outlier is stored
// separately:
//
//   value = scale * (low + 128 * high)     low is a byte; high is 0 except in words with an outlier, which are listed
//
// Integers are within 127 * 128, and rounded to the nearest, ties to even. The usual magnitude is the median of the
// largest magnitudes of groups of 64 values. The scale makes 1.25 times that magnitude 127. If the largest value of all
// would then be too large, the scale makes that value 127 * 128 instead. A row with an infinity or NaN gets a scale
// that is not finite.
#pragma once

#include <algorithm>
#include <vector>

#include "simd/parallel.h"
#include "int8/quantise.h"

namespace rootgraft {

struct OutlierWord {
  uint32_t at;    // index of the word in the row
  uint32_t high;  // four bytes
};

struct ChannelRow {
  float scale;
  int32_t start_low, start_high;  // kBiasedStart times the sums of the low and of the high bytes
  int32_t outliers;               // number of words with outliers
};

constexpr int64_t kUsualValues = 64;  // values of a group

#if defined(__AVX512F__)
// The median of at most this many values, without branches: the smallest value that at most half of them exceed.
template <int kVectors>
INLINE uint32_t median_of_few(const uint32_t* all, int64_t count) {
  __m512i values[kVectors], above[kVectors];
  __mmask16 some[kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v++) {
    const int64_t left = count - v * kWidth;
    some[v] = left < kWidth ? (1u << left) - 1 : 0xFFFF;
    values[v] = _mm512_maskz_loadu_epi32(some[v], all + v * kWidth), above[v] = _mm512_setzero_si512();
  }
  for (int64_t i = 0; i < count; i++) {
    const __m512i one = _mm512_set1_epi32((int)all[i]);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) {
      const __mmask16 less = _mm512_cmplt_epu32_mask(values[v], one);
      above[v] = _mm512_mask_add_epi32(above[v], less, above[v], _mm512_set1_epi32(1));
    }
  }
  __m512i least = _mm512_set1_epi32(-1);
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v++) {
    const __m512i half = _mm512_set1_epi32((int)(count / 2));
    const __mmask16 upper = _mm512_mask_cmple_epu32_mask(some[v], above[v], half);
    least = _mm512_mask_min_epu32(least, upper, least, values[v]);
  }
  return _mm512_reduce_min_epu32(least);
}
#endif

// The median of [count] bit patterns of magnitudes; the lower one of two.
inline uint32_t median(const uint32_t* all, int64_t count) {
#if defined(__AVX512F__)
  if (count <= kWidth) return median_of_few<1>(all, count);
  if (count <= 2 * kWidth) return median_of_few<2>(all, count);
#endif
  for (int64_t i = 0;; i++) {
    int above = 0, equal = 0;
    for (int64_t j = 0; j < count; j += kWidth) {
#if defined(__AVX512F__)
      const __mmask16 some = count - j < kWidth ? (1u << (count - j)) - 1 : 0xFFFF;
      const __m512i others = _mm512_maskz_loadu_epi32(some, all + j), mine = _mm512_set1_epi32((int)all[i]);
      above += __builtin_popcount(_mm512_mask_cmpgt_epu32_mask(some, others, mine));
      equal += __builtin_popcount(_mm512_mask_cmpeq_epu32_mask(some, others, mine));
#else
      for (int64_t other = j; other < std::min(j + kWidth, count); other++) {
        above += all[other] > all[i];
        equal += all[other] == all[i];
      }
#endif
    }
    if (above <= count / 2 && count / 2 < above + equal) return all[i];
  }
}

#if defined(__AVX512BW__)
// Removes the part that does not fit in a byte from `values`, and returns it: the nearest multiples of 128.
INLINE Shorts take_high(Shorts& values) {
  Shorts high;
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    __m512i& all = values.part[i];
    const __m512i from_least = _mm512_add_epi16(all, _mm512_set1_epi16(127));
    const __mmask32 beyond = _mm512_cmpgt_epu16_mask(from_least, _mm512_set1_epi16(254));
    const __m512i nearest = _mm512_add_epi16(all, _mm512_set1_epi16(1 << (kPlaneBits - 1)));
    high.part[i] = _mm512_maskz_srai_epi16(beyond, nearest, kPlaneBits);
    all = _mm512_sub_epi16(all, _mm512_slli_epi16(high.part[i], kPlaneBits));
  }
  return high;
}

// Lists the words that are not 0; the first word is word `at` of the row. Returns the end of the list. Writes 16
// entries.
INLINE OutlierWord* list_words(__m512i high, uint32_t at, OutlierWord* to) {
  const __mmask16 some = _mm512_test_epi32_mask(high, high);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i places = _mm512_maskz_compress_epi32(some, _mm512_add_epi32(lane, _mm512_set1_epi32((int)at)));
  const __m512i words = _mm512_maskz_compress_epi32(some, high);
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi32(places, first, words));
  _mm512_storeu_si512(to + kWidth / 2, _mm512_permutex2var_epi32(places, second, words));
  return to + __builtin_popcount(some);
}
#endif

// The largest of some bit patterns of magnitudes.
inline uint32_t most_bits(const uint32_t* all, int64_t count) {
#if defined(__AVX512F__)
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += kWidth) {
    const __mmask16 some = count - i < kWidth ? (1u << (count - i)) - 1 : 0xFFFF;
    most = _mm512_max_epu32(most, _mm512_maskz_loadu_epi32(some, all + i));
  }
  return _mm512_reduce_max_epu32(most);
#else
  return *std::max_element(all, all + count);
#endif
}

#if defined(__AVX512BW__)
// The same as magnitude_bits of each of up to 16 groups of bf16: pairs of registers are folded into one, by halves.
inline void magnitude_bits_of_groups(const uint16_t* from, int64_t groups, uint32_t* to) {
  const auto fold = [](__m512i a, __m512i b) { return _mm512_max_epu16(a, b); };
  const auto halves = [&](__m512i a, __m512i b) {
    return fold(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xEE));
  };
  const auto quarters = [&](__m512i a, __m512i b) {
    return fold(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
  };
  const auto group = [&](int i) {
    if (i >= groups) return _mm512_setzero_si512();
    const __m512i first = _mm512_loadu_si512(from + i * kUsualValues);
    const __m512i second = _mm512_loadu_si512(from + i * kUsualValues + kHalves), sign = _mm512_set1_epi16(0x7FFF);
    return fold(_mm512_and_si512(first, sign), _mm512_and_si512(second, sign));
  };
  const auto four = [&](int i) {  // one group in each quarter
    return quarters(halves(group(i), group(i + 1)), halves(group(i + 2), group(i + 3)));
  };
  const auto eight = [&](int i) {  // in each quarter, one of the first four groups and one of the others
    const __m512i first = four(i), second = four(i + 4);
    return fold(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
  };
  const __m512 first = _mm512_castsi512_ps(eight(0));
  const __m512 second = _mm512_castsi512_ps(groups > 8 ? eight(8) : _mm512_setzero_si512());
  const __m512i all = fold(_mm512_castps_si512(_mm512_shuffle_ps(first, second, 0x88)),
                           _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0xDD)));
  // In each quarter: one of each four groups.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i pairs = _mm512_permutexvar_epi32(order, all), high = _mm512_set1_epi32(0xFFFF0000);
  const __m512i bits = _mm512_max_epu32(_mm512_and_si512(pairs, high), _mm512_slli_epi32(pairs, 16));
  _mm512_mask_storeu_epi32(to, groups < kWidth ? (1u << groups) - 1 : 0xFFFF, bits);
}
#endif

// Finds the largest magnitudes of all groups of a row.
template <class E>
INLINE void find_largest(const typename E::Value* from, int64_t count, uint32_t* largest) {
  const int64_t whole = count / kUsualValues;
  int64_t g = 0;
#if defined(__AVX512BW__)
  if constexpr (std::is_same_v<E, Bf16>) {
    for (; g < whole; g += kWidth) {
      magnitude_bits_of_groups(from + g * kUsualValues, std::min<int64_t>(whole - g, kWidth), largest + g);
    }
    g = whole;
  }
#endif
  for (; g < whole; g++) largest[g] = magnitude_bits<E>(from + g * kUsualValues, kUsualValues);
  if (count % kUsualValues) largest[whole] = magnitude_bits<E>(from + whole * kUsualValues, count % kUsualValues);
}

struct RowScale {
  float scale, inverse;
};

// Finds the scale of a row; writes the largest magnitudes of its groups.
template <class E>
RowScale row_scale(const typename E::Value* from, int64_t count, uint32_t* largest) {
  const int64_t groups = (count + kUsualValues - 1) / kUsualValues;
  find_largest<E>(from, count, largest);
  const uint32_t top_bits = most_bits(largest, groups);
  const uint32_t usual_bits = median(largest, groups);
  const float top = load_as<float>(&top_bits), usual = 1.25f * load_as<float>(&usual_bits);
  const float scale = usual < top ? std::max(usual / 127.0f, top / most_integer(2)) : top / 127.0f;
  return {scale, top > 1e-30f ? 1.0f / scale : 0.0f};  // below that it may overflow, so all integers are 0
}

// Writes `low` up to the next multiple of 16 values (zeros if the scale is not finite), and the outliers. There is at
// most one outlier word for each word of the row, but memory after the last one is used too. `largest`: the magnitudes
// of the groups.
template <class E>
ChannelRow quantise_row(const typename E::Value* from, int64_t count, const RowScale& row, const uint32_t* largest,
                        int8_t* low, OutlierWord* outliers) {
  if (!std::isfinite(row.scale)) {  // sums of values that are not integers could leave their range
    std::memset(low, 0, (count + kWidth - 1) / kWidth * kWidth);
    return {row.scale, 0, 0, 0};
  }
  const float inverse = row.inverse;
  OutlierWord* next = outliers;
  Ints lows = broadcast_int(0), highs = broadcast_int(0);
  int64_t i = 0;
#if defined(__AVX512BW__)
  static_assert(kRounded == kUsualValues);
  for (; i + kRounded <= count; i += kRounded) {
    Shorts rest = round_shorts<E>(from + i, broadcast(inverse));
    // The largest magnitude of the group is rounded like all its values. If it fits in a byte, they do too.
    if (load_as<float>(&largest[i / kUsualValues]) * inverse > 127.0f) {
      const __m512i high = pack_bytes<E>(take_high(rest));
      highs = add_bytes(highs, high);
      next = list_words(high, (uint32_t)(i / kWordBytes), next);
    }
    const __m512i bytes = pack_bytes<E>(rest);
    _mm512_storeu_si512(low + i, bytes);
    lows = add_bytes(lows, bytes);
  }
#endif
  for (; i < count; i += kWidth) {
    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    const Floats shifted = load_some<E>(from + i, count - i) * broadcast(inverse) + broadcast(12582912.0f);
    Ints rest = map_ints([&](int p) { return (IntPart)shifted.part[p] - 0x4B400000; });
    const Ints beyond = map_ints([&](int p) { return (IntPart)((WordPart)(rest.part[p] + 127) > 254u); });
    if (any(beyond)) {
      const Ints high = map_ints([&](int p) {
        return (rest.part[p] + (1 << (kPlaneBits - 1))) >> kPlaneBits & beyond.part[p];
      });
      rest = map_ints([&](int p) { return rest.part[p] - (high.part[p] << kPlaneBits); });
      highs = highs + high;
      alignas(16) int8_t bytes[kWidth];
      store_bytes(bytes, high);
      for (int word = 0; word < kWidth / kWordBytes; word++) {
        const auto four = load_as<uint32_t>(bytes + word * kWordBytes);
        if (four) *next++ = {(uint32_t)(i / kWordBytes + word), four};
      }
    }
    store_bytes(low + i, rest);
    lows = lows + rest;
  }
  return {row.scale, kBiasedStart * sum(lows), kBiasedStart * sum(highs), (int32_t)(next - outliers)};
}

// All rows of x [rows][width].
class ChannelRows {
 public:
  int64_t stride;  // words from row to row
  int64_t outlier_stride;

  const uint32_t* low(int64_t row) const { return lines_.data()->words + row * stride; }
  const ChannelRow* row(int64_t index) const { return &rows_[index]; }
  const OutlierWord* outliers(int64_t row) const { return &outliers_[row * outlier_stride]; }

  template <class E>
  void fill(const typename E::Value* x, int64_t count, int64_t width, int threads) {
    const int64_t groups = (width + kUsualValues - 1) / kUsualValues, words = (width + kWordBytes - 1) / kWordBytes;
    // odd, so that rows are in different sets of a cache
    const int64_t lines = (words + kLineWords - 1) / kLineWords | 1;
    stride = lines * kLineWords;
    outlier_stride = words + kWidth;  // lists are written 16 words at a time
    grow(lines_, count * lines);
    grow(rows_, count);
    grow(outliers_, count * outlier_stride);
    grow(largest_, count * groups);
    parallel_ranges(threads, count, [&](int64_t row, int64_t end) {
      for (int64_t first = row; first < end; first = row) {
        // A scale takes a long chain of instructions, and the chains of a few rows overlap.
        const int64_t last = std::min(first + kRowsTogether, end);
        RowScale scales[kRowsTogether];
        for (; row < last; row++) scales[row - first] = row_scale<E>(x + row * width, width, &largest_[row * groups]);
        for (row = first; row < last; row++) {
          auto* low = reinterpret_cast<int8_t*>(&lines_[row * lines]);
          rows_[row] = quantise_row<E>(x + row * width, width, scales[row - first], &largest_[row * groups], low,
                                       &outliers_[row * outlier_stride]);
        }
      }
    });
  }

 private:
  static constexpr int64_t kLineWords = 16, kRowsTogether = 4;
  struct alignas(64) Line {
    uint32_t words[kLineWords];
  };
  // Never shrinks a vector, as the elements by which one grows are set to zeros each time.
  template <class T>
  static void grow(std::vector<T>& all, int64_t count) {
    if ((int64_t)all.size() < count) all.resize(count);
  }

  std::vector<Line> lines_;
  std::vector<ChannelRow> rows_;
  std::vector<OutlierWord> outliers_;
  std::vector<uint32_t> largest_;
};

}  // namespace rootgraft
