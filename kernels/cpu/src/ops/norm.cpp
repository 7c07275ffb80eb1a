// RMS norm, alone or after an addition to the residual stream: one pass adds and squares, a second one scales.
#include "ops/norm.h"

#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of elements below which one thread is faster

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct RmsNorm {
  const void* x;       // [rows][width]
  float* residual;     // [rows][width] or null: x is added to it, and the sum is normed in place of x
  const void* weight;  // [width]
  void* out;           // [rows][width]
  int64_t rows, width, is_bf16, weight_is_bf16, out_is_bf16, threads;
  double eps, offset;
};

// The sum of squares of the new residual. Meanwhile the next row and the output are prefetched. With many rows they are
// in no cache of this core, and would be waited for one after another.
template <class E, class To>
float add_and_square(const typename E::Value* x, float* residual, const typename To::Value* out, int64_t count) {
  Floats total = broadcast(0.0f);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    __builtin_prefetch(residual + count + i, 1);
    if (i / kWidth % E::kPerWord == 0) __builtin_prefetch(x + count + i);
    if (i / kWidth % To::kPerWord == 0) __builtin_prefetch(out + i, 1);
    const Floats value = load(residual + i) + E::load(x + i);
    store(residual + i, value);
    total = fma(value, value, total);
  }
  float result = sum(total);
  for (; i < count; i++) {
    residual[i] += E::widen(x[i]);
    result += residual[i] * residual[i];
  }
  return result;
}

template <class E, class W, class To>
void run_row(const RmsNorm& op, int64_t row) {
  const auto* x = static_cast<const typename E::Value*>(op.x) + row * op.width;
  const auto* weight = static_cast<const typename W::Value*>(op.weight);
  auto* out = static_cast<typename To::Value*>(op.out) + row * op.width;
  float* stream = op.residual ? op.residual + row * op.width : nullptr;
  const float squares = stream ? add_and_square<E, To>(x, stream, out, op.width) : sum_of_squares<E>(x, op.width);
  const float scale = 1.0f / std::sqrt(squares / (float)op.width + (float)op.eps);
  if (stream) scale_by_weight<Fp32, W, To>(stream, weight, (float)op.offset, scale, out, op.width);
  else scale_by_weight<E, W, To>(x, weight, (float)op.offset, scale, out, op.width);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int rms_norm(const RmsNorm* op) {
  const auto run = [&](auto element, auto weight_element, auto out_element) {
    parallel_ranges(threads_for(op->rows * op->width, kSmall, op->threads), op->rows, [&](int64_t row, int64_t end) {
      for (; row < end; row++) {
        run_row<decltype(element), decltype(weight_element), decltype(out_element)>(*op, row);
      }
    });
  };
  with_types(run, op->is_bf16, op->weight_is_bf16, op->out_is_bf16);
  return 0;
}

extern "C" int64_t rms_norm_size() { return sizeof(RmsNorm); }
