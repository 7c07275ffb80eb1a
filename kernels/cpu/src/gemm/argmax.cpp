// Maximum and argmax of each row.
#include "gemm/argmax.h"

#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 16;  // numbers for which one thread is faster

// Argument structure packed by Python: fields of 8 bytes in this order.
struct LargestOfRows {
  const float* values;  // [rows][columns]
  float* best;          // [rows]
  int64_t* at;          // [rows]
  int64_t rows, columns, threads;
};

void find(const LargestOfRows& op, int64_t row) {
  const float* values = op.values + row * op.columns;
  const int32_t whole = (int32_t)(op.columns / kWidth);
  const int rest = (int)(op.columns % kWidth);
  Largest largest;
  for (int32_t i = 0; i < whole; i++) largest.take(load(values + i * kWidth), broadcast_int(i));
  if (rest) {
    const Floats last = load_some<Fp32>(values + whole * kWidth, rest);
    largest.take(keep_lanes(last, 0, rest, kLeast), broadcast_int(whole));
  }
  largest.write(op.best[row], op.at[row]);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int largest(const LargestOfRows* op) {
  const int threads = threads_for(op->rows * op->columns, kSmall, op->threads);
  parallel_items(threads, op->rows, [&](int64_t row) { find(*op, row); });
  return 0;
}

extern "C" int64_t largest_size() { return sizeof(LargestOfRows); }
