// Maximum and argmax of each row.
#include "gemm/argmax.h"

#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 16;  // number of values below which one thread is faster

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct LargestOfRows {
  const float* values;  // [rows][columns]
  float* best;          // [rows]
  int64_t* at;          // [rows]
  int64_t rows, columns, threads;
};

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int largest(const LargestOfRows* op) {
  const int threads = threads_for(op->rows * op->columns, kSmall, op->threads);
  parallel_items(threads, op->rows, [&](int64_t row) {
    find_largest(op->values + row * op->columns, op->columns, op->best[row], op->at[row]);
  });
  return 0;
}

extern "C" int64_t largest_size() { return sizeof(LargestOfRows); }
