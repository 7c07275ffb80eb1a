// Rows of x as integers with one scale each, for products with bytes.
//
// In a language model a few values of a row are tens of times as large as the others. A scale that fits them would
// leave the others few steps, so it fits what is usual in the row, and of these outliers a part is kept aside:
//
//   value = scale * (low + 128 * high)     low in a byte; high 0 but in words with an outlier, of which there is a list
//
// Integers are as large as 127 * 128, and rounded to the nearest, ties to even. Usual is the median of the largest
// magnitudes of groups of 64 values. 1.25 times as much becomes 127, unless the largest of all would then be too large:
// that becomes 127 * 128. A row with an infinity or NaN gets a scale that is not finite.
#pragma once

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "quantise.h"

namespace rootgraft {

struct OutlierWord {
  uint32_t at;    // which word of the row
  uint32_t high;  // four bytes
};

struct ChannelRow {
  float scale;
  int32_t start_low, start_high;  // kBiasedStart times the sum of the bytes
  int32_t outliers;               // words
};

constexpr int64_t kUsualValues = 64;  // of a group

// The median of [count] bits of magnitudes, the lower one of two.
inline uint32_t median(const uint32_t* all, int64_t count) {
  for (int64_t i = 0;; i++) {
    int64_t above = 0, equal = 0;
    for (int64_t j = 0; j < count; j++) {
      above += all[j] > all[i];
      equal += all[j] == all[i];
    }
    if (above <= count / 2 && count / 2 < above + equal) return all[i];
  }
}

// Writes `low` up to the next multiple of 16 values, and the outliers. `largest` has room for every group.
template <class E>
ChannelRow quantise_row(const typename E::Value* from, int64_t count, int8_t* low, OutlierWord* outliers,
                        uint32_t* largest) {
  const int64_t groups = (count + kUsualValues - 1) / kUsualValues;
  uint32_t top_bits = 0;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = g * kUsualValues;
    largest[g] = magnitude_bits<E>(from + first, std::min(kUsualValues, count - first));
    top_bits = std::max(top_bits, largest[g]);
  }
  const uint32_t usual_bits = median(largest, groups);
  const float top = load_as<float>(&top_bits), usual = 1.25f * load_as<float>(&usual_bits);
  const float scale = usual < top ? std::max(usual / 127.0f, top / most_integer(2)) : top / 127.0f;
  const float inverse = top > 1e-30f ? 1.0f / scale : 0.0f;  // below that it may overflow: all integers 0

  OutlierWord* next = outliers;
  Ints lows = broadcast_int(0), highs = broadcast_int(0);
  for (int64_t i = 0; i < count; i += kWidth) {
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
  return {scale, kBiasedStart * sum(lows), kBiasedStart * sum(highs), (int32_t)(next - outliers)};
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
    const int64_t lines = (words + kLineWords - 1) / kLineWords | 1;  // odd: rows lie in different sets of a cache
    stride = lines * kLineWords;
    outlier_stride = words;
    grow(lines_, count * lines);
    grow(rows_, count);
    grow(outliers_, count * words);
    grow(largest_, count * groups);
    parallel_ranges(threads, count, [&](int64_t row, int64_t end) {
      for (; row < end; row++) {
        rows_[row] = quantise_row<E>(x + row * width, width, reinterpret_cast<int8_t*>(&lines_[row * lines]),
                                     &outliers_[row * words], &largest_[row * groups]);
      }
    });
  }

 private:
  static constexpr int64_t kLineWords = 16;
  struct alignas(64) Line {
    uint32_t words[kLineWords];
  };
  // Never shorter: what a vector grows by is set to zeros, each time.
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
