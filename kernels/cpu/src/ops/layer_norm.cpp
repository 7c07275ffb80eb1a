// Layer norm, alone or after the addition to the residual stream.
#include "ops/norm.h"
#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of elements below which one thread is faster

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct LayerNorm {
  const void* x;       // [rows][width]
  float* residual;     // [rows][width] or null: x is added to it, and the sum is normed in place of x
  const void* weight;  // [width]
  const void* bias;    // [width] of the weight's type, or null
  void* out;           // [rows][width]
  int64_t rows, width, is_bf16, weight_is_bf16, out_is_bf16, threads;
  double eps, offset;
};

template <class E, class W, class To>
void run_row(const LayerNorm& op, int64_t row) {
  const auto* x = static_cast<const typename E::Value*>(op.x) + row * op.width;
  const auto* weight = static_cast<const typename W::Value*>(op.weight);
  const auto* bias = static_cast<const typename W::Value*>(op.bias);
  auto* out = static_cast<typename To::Value*>(op.out) + row * op.width;
  if (!op.residual) {
    centre_and_scale<E, W, To>(x, weight, bias, (float)op.offset, (float)op.eps, out, op.width);
    return;
  }
  float* stream = op.residual + row * op.width;
  int64_t i = 0;
  for (; i + kWidth <= op.width; i += kWidth) store(stream + i, load(stream + i) + E::load(x + i));
  for (; i < op.width; i++) stream[i] += E::widen(x[i]);
  centre_and_scale<Fp32, W, To>(stream, weight, bias, (float)op.offset, (float)op.eps, out, op.width);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int layer_norm(const LayerNorm* op) {
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

extern "C" int64_t layer_norm_size() { return sizeof(LayerNorm); }
