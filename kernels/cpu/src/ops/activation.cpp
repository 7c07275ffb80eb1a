// act(gate) * up, with gate and up side by side in a row.
#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // outputs below which one thread is faster

// Argument structure packed by Python: fields of 8 bytes in this order.
struct GatedActivation {
  const void* gate_up;  // [rows][2 * width]
  void* out;            // [rows][width]
  int64_t rows, width, is_gelu, is_bf16, threads;
};

struct Silu {
  static INLINE Floats apply(const Floats& x) { return x * sigmoid(x); }
};

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), with u = sqrt(2 / pi) * (x + 0.044715 x^3)
struct GeluTanh {
  static INLINE Floats apply(const Floats& x) {
    const Floats inner = fma(x * x, broadcast(0.044715f), broadcast(1.0f)) * x;
    return x * sigmoid(inner * broadcast(2.0f * 0.7978845608028654f));
  }
};

template <class E, class Act>
void run_row(const typename E::Value* gate, typename E::Value* out, int64_t width) {
  using Value = typename E::Value;
  const Value* up = gate + width;
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) E::store(out + i, Act::apply(E::load(gate + i)) * E::load(up + i));
  if (i == width) return;
  Value padded[3][kWidth] = {};
  const size_t bytes = (width - i) * sizeof(Value);
  std::memcpy(padded[0], gate + i, bytes);
  std::memcpy(padded[1], up + i, bytes);
  E::store(padded[2], Act::apply(E::load(padded[0])) * E::load(padded[1]));
  std::memcpy(out + i, padded[2], bytes);
}

template <class E, class Act>
void run(const GatedActivation& op) {
  using Value = typename E::Value;
  parallel_ranges(op.rows * op.width < kSmall ? 1 : (int)op.threads, op.rows, [&](int64_t row, int64_t end) {
    for (; row < end; row++) {
      run_row<E, Act>(static_cast<const Value*>(op.gate_up) + row * 2 * op.width,
                      static_cast<Value*>(op.out) + row * op.width, op.width);
    }
  });
}

template <class E>
void choose(const GatedActivation& op) {
  if (op.is_gelu) run<E, GeluTanh>(op);
  else run<E, Silu>(op);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int gated_activation(const GatedActivation* op) {
  if (op->is_bf16) choose<Bf16>(*op);
  else choose<Fp32>(*op);
  return 0;
}

extern "C" int64_t gated_activation_size() { return sizeof(GatedActivation); }
