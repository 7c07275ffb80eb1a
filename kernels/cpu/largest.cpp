// The largest number of each row and its column: what a greedy draw needs.
#include <limits>

#include "bytes.h"
#include "parallel.h"

namespace rootgraft {
namespace {

constexpr float kLeast = -std::numeric_limits<float>::infinity();
constexpr int64_t kSmall = 1 << 16;  // numbers for which one thread is faster

// The call, as the caller packs it: fields of 8 bytes in this order.
struct Largest {
  const float* values;  // [rows][columns]
  float* best;          // [rows], NaN where there is one
  int64_t* at;          // [rows], the first of equal ones
  int64_t rows, columns, threads;
};

// Lane by lane, of sixteens that come in order.
struct Lanes {
  Floats best = broadcast(kLeast);
  Ints at = broadcast_int(0), is_nan = broadcast_int(0);

  INLINE void take(const Floats& value, int32_t sixteen) {
    for (int i = 0; i < kParts; i++) {
      const FloatPart next = value.part[i];
      at.part[i] = next > best.part[i] ? IntPart{} + sixteen : at.part[i];
      best.part[i] = next > best.part[i] ? next : best.part[i];
      is_nan.part[i] |= next != next;
    }
  }

  void write(float& value, int64_t& column) const {
    value = kLeast;
    column = 0;
    bool broken = false;
    for (int i = 0; i < kWidth; i++) {
      const float lane = best.part[i / kLanes][i % kLanes];
      const int64_t place = (int64_t)at.part[i / kLanes][i % kLanes] * kWidth + i;
      if (lane > value || (lane == value && place < column)) value = lane, column = place;
      broken |= is_nan.part[i / kLanes][i % kLanes] != 0;
    }
    if (broken) value = std::numeric_limits<float>::quiet_NaN();
  }
};

void find(const Largest& op, int64_t row) {
  const float* values = op.values + row * op.columns;
  const int32_t whole = (int32_t)(op.columns / kWidth);
  Lanes lanes;
  for (int32_t i = 0; i < whole; i++) lanes.take(load(values + i * kWidth), i);
  if (const int rest = (int)(op.columns % kWidth)) {
    float last[kWidth];
    for (int i = 0; i < kWidth; i++) last[i] = i < rest ? values[whole * kWidth + i] : kLeast;
    lanes.take(load(last), whole);
  }
  lanes.write(op.best[row], op.at[row]);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int largest(const Largest* op) {
  const int threads = op->rows * op->columns < kSmall ? 1 : (int)op->threads;
  parallel_items(threads, op->rows, [&](int64_t row) { find(*op, row); });
  return 0;
}

extern "C" int64_t largest_size() { return sizeof(Largest); }
