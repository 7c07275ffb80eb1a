// Activations of an MLP: act(gate) * up, with gate and up side by side in a row; or act(x) without a gate.
#include "gemm/gate.h"
#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of outputs below which one thread is faster

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct Activation {
  const void* x;  // [rows][2 * width], gate and up; or [rows][width] without a gate
  void* out;      // [rows][width]
  int64_t rows, width, kind, is_gated, is_bf16, threads;
};

template <class E, class Act>
void run_row(const typename E::Value* gate, const typename E::Value* up, typename E::Value* out, int64_t width) {
  using Value = typename E::Value;
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) {
    const Floats active = Act::apply(E::load(gate + i));
    E::store(out + i, up ? active * E::load(up + i) : active);
  }
  if (i == width) return;
  Value padded[3][kWidth] = {};
  const size_t bytes = (width - i) * sizeof(Value);
  std::memcpy(padded[0], gate + i, bytes);
  if (up) std::memcpy(padded[1], up + i, bytes);
  const Floats active = Act::apply(E::load(padded[0]));
  E::store(padded[2], up ? active * E::load(padded[1]) : active);
  std::memcpy(out + i, padded[2], bytes);
}

template <class E, class Act>
void run(const Activation& op) {
  using Value = typename E::Value;
  const int64_t step = op.is_gated ? 2 * op.width : op.width;
  parallel_ranges(threads_for(op.rows * op.width, kSmall, op.threads), op.rows, [&](int64_t row, int64_t end) {
    for (; row < end; row++) {
      const Value* x = static_cast<const Value*>(op.x) + row * step;
      run_row<E, Act>(x, op.is_gated ? x + op.width : nullptr, static_cast<Value*>(op.out) + row * op.width, op.width);
    }
  });
}

template <class E>
void choose(const Activation& op) {
  with_activation(op.kind, [&](auto act) { run<E, decltype(act)>(op); });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int activation(const Activation* op) {
  if (op->is_bf16) choose<Bf16>(*op);
  else choose<Fp32>(*op);
  return 0;
}

extern "C" int64_t activation_size() { return sizeof(Activation); }
