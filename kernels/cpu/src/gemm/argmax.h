// Maximum and argmax of rows, for greedy sampling from logits.
#pragma once

#include <limits>
#include <vector>

#include "int8/quantise.h"

namespace rootgraft {

constexpr float kLeast = -std::numeric_limits<float>::infinity();

// Running maximum and argmax per lane over vectors of 16: the first of equal maxima; NaN if there is one.
struct Largest {
  Floats best = broadcast(kLeast);
  Ints at = broadcast_int(0);  // which sixteen

  INLINE void take(const Floats& value, const Ints& sixteen) {
    for (int i = 0; i < kParts; i++) {
      const FloatPart next = value.part[i];
      const IntPart wins = (next > best.part[i]) | (next != next);
      best.part[i] = wins ? next : best.part[i];
      at.part[i] = wins ? sixteen.part[i] : at.part[i];
    }
  }

  // Of all lanes, and its place among all numbers.
  void write(float& value, int64_t& place) const {
    float lane[kWidth];
    store(lane, best);
    value = kLeast, place = 0;
    for (int i = 0; i < kWidth; i++) {
      const int64_t here = (int64_t)at.part[i / kLanes][i % kLanes] * kWidth + i;
      const bool wins = lane[i] > value || lane[i] != lane[i] || (lane[i] == value && here < place);
      if (wins) value = lane[i], place = here;
    }
  }
};

// The largest of a row of numbers, and its place.
inline void find_largest(const float* values, int64_t columns, float& best, int64_t& at) {
  const int32_t whole = (int32_t)(columns / kWidth);
  const int rest = (int)(columns % kWidth);
  Largest largest;
  for (int32_t i = 0; i < whole; i++) largest.take(load(values + i * kWidth), broadcast_int(i));
  if (rest) {
    const Floats last = load_some<Fp32>(values + whole * kWidth, rest);
    largest.take(keep_lanes(last, 0, rest, kLeast), broadcast_int(whole));
  }
  largest.write(best, at);
}

// Of the columns of a product that is computed in parts, each by one thread.
class LargestColumns {
 public:
  LargestColumns(int64_t columns, int64_t rows, int64_t parts) : columns_(columns), rows_(rows), all_(rows * parts) {}

  // A tile of sums, rows of panels of 16 columns. A part's panels come in order, and those of parts too.
  template <class E>
  void take(int64_t part, const float* sums, int64_t stride, int64_t row, int rows, int64_t panel, int panels,
            const typename E::Value* bias) {
    for (int v = 0; v < panels; v++) {
      const int64_t column = (panel + v) * kWidth, left = columns_ - column;
      const Floats more = bias ? load_some<E>(bias + column, left) : broadcast(0.0f);
      for (int m = 0; m < rows; m++) {
        const Floats sum = load(sums + m * stride + v * kWidth), value = bias ? sum + more : sum;
        all_[part * rows_ + row + m].take(left < kWidth ? keep_lanes(value, 0, (int)left, kLeast) : value,
                                          broadcast_int((int32_t)(panel + v)));
      }
    }
  }

  void write(float* best, int64_t* at) {
    for (int64_t row = 0; row < rows_; row++) {
      Largest& first = all_[row];
      for (size_t i = row + rows_; i < all_.size(); i += rows_) first.take(all_[i].best, all_[i].at);
      first.write(best[row], at[row]);
    }
  }

 private:
  int64_t columns_, rows_;
  std::vector<Largest> all_;  // [parts][rows]
};

}  // namespace rootgraft
