// RMS norm, alone or after the addition to the residual stream: one pass to add and square, one to scale.
#include "norm.h"

#include "parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 15;  // elements below which one thread is faster

// The call, as the caller packs it: fields of 8 bytes in this order.
struct RmsNorm {
  const void* x;       // [rows][width]
  void* residual;      // [rows][width] or null: to be added to, and normed in place of x
  const void* weight;  // [width]
  void* out;           // [rows][width]
  int64_t rows, width, is_bf16, weight_is_bf16, threads;
  double eps, offset;
};

template <class E>
float add_and_square(const typename E::Value* x, typename E::Value* residual, int64_t count) {
  Floats total = broadcast(0.0f);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    E::store(residual + i, E::load(residual + i) + E::load(x + i));
    const Floats rounded = E::load(residual + i);
    total = fma(rounded, rounded, total);
  }
  float result = sum(total);
  for (; i < count; i++) {
    residual[i] = E::narrow(E::widen(residual[i]) + E::widen(x[i]));
    result += E::widen(residual[i]) * E::widen(residual[i]);
  }
  return result;
}

template <class E, class W>
void run_row(const RmsNorm& op, int64_t row) {
  using Value = typename E::Value;
  const Value* x = static_cast<const Value*>(op.x) + row * op.width;
  Value* stream = op.residual ? static_cast<Value*>(op.residual) + row * op.width : nullptr;
  const float squares = stream ? add_and_square<E>(x, stream, op.width) : sum_of_squares<E>(x, op.width);
  const float scale = 1.0f / std::sqrt(squares / (float)op.width + (float)op.eps);
  scale_by_weight<E, W, E>(stream ? stream : x, static_cast<const typename W::Value*>(op.weight), (float)op.offset,
                           scale, static_cast<Value*>(op.out) + row * op.width, op.width);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int rms_norm(const RmsNorm* op) {
  with_types(op->is_bf16, op->weight_is_bf16, [&](auto element, auto weight_element) {
    parallel(op->rows * op->width < kSmall ? 1 : (int)op->threads, [&](int thread, int team) {
      for (int64_t row = op->rows * thread / team; row < op->rows * (thread + 1) / team; row++) {
        run_row<decltype(element), decltype(weight_element)>(*op, row);
      }
    });
  });
  return 0;
}

extern "C" int64_t rms_norm_size() { return sizeof(RmsNorm); }
