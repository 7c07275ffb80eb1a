// Maximum and argmax of rows, for greedy sampling from logits.
#pragma once

#include <limits>
#include <vector>

#include "int8/quantise.h"

namespace rootgraft {

constexpr float kLeast = -std::numeric_limits<float>::infinity();

// Running maximum and argmax of each lane over vectors of 16. Of equal maxima the first counts; NaN counts as largest.
struct Largest {
  Floats best = broadcast(kLeast);
  Ints at = broadcast_int(0);  // number of the vector

  INLINE void take(const Floats& value, const Ints& sixteen) {
    for (int i = 0; i < kParts; i++) {
      const FloatPart next = value.part[i];
      const IntPart wins = (next > best.part[i]) | (next != next);
      best.part[i] = wins ? next : best.part[i];
      at.part[i] = wins ? sixteen.part[i] : at.part[i];
    }
  }

  // Writes the maximum of all lanes, and its index among all numbers.
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

// Finds the largest number of a row, and its index.
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

// Finds the largest column of each row of a product that is computed in parts, each by one thread.
class LargestColumns {
 public:
  LargestColumns(int64_t columns, int64_t rows, int64_t parts) : columns_(columns), rows_(rows), all_(rows * parts) {}

  // Takes a tile of sums: rows of panels of 16 columns. The panels of a part come in order, and so do parts.
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
