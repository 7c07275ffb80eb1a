// Activations of experts: act(gate) * up for each pick of each token. A gate row and its up row are neighbours.
#include "gemm/gate.h"
#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of outputs below which one thread is faster

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct ExpertActivation {
  const void* gate_up;  // [tokens][picks][2 * width]
  void* out;            // [tokens][picks][width]
  const float* weights;  // [tokens][picks] or null: factors of gate_up
  int64_t tokens, picks, width, kind, is_bf16, threads;
  double alpha, gate_limit, limit, offset;  // for the clamped activation
};

enum Kind : int64_t { kPlainSilu = 0, kClamped = 1, kPlainGelu = 2 };

// act(gate) * up with an activation of gate.h.
template <class Act>
struct Plain {
  explicit Plain(const ExpertActivation&) {}

  INLINE Floats operator()(const Floats& gate, const Floats& up) const { return Act::apply(gate) * up; }
};

// gate * sigmoid(alpha * gate) * (up + offset), with gate at most `gate_limit`, and up within -limit .. limit. NaN stays
// NaN.
struct Clamped {
  float alpha, gate_limit, limit, offset;

  explicit Clamped(const ExpertActivation& op)
      : alpha((float)op.alpha), gate_limit((float)op.gate_limit), limit((float)op.limit), offset((float)op.offset) {}

  INLINE Floats operator()(const Floats& gate, const Floats& up) const {
    const Floats zero = broadcast(0.0f), least = broadcast(-limit);
    const auto at_most = [&](float bound, const Floats& value) {
      return zero - max(broadcast(-bound), zero - value);
    };
    const Floats g = at_most(gate_limit, gate), u = max(least, at_most(limit, up));
    return g * sigmoid(g * broadcast(alpha)) * (u + broadcast(offset));
  }
};

template <class E, class Act>
void run_row(const Act& act, const typename E::Value* gate, typename E::Value* out, int64_t width, float weight) {
  using Value = typename E::Value;
  const Value* up = gate + width;
  const Floats factor = broadcast(weight);
  const auto store_activated = [&](Value* to, const Value* g, const Value* u) {
    E::store(to, act(E::load(g) * factor, E::load(u) * factor));
  };
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) store_activated(out + i, gate + i, up + i);
  if (i == width) return;
  Value padded[3][kWidth] = {};
  const size_t bytes = (width - i) * sizeof(Value);
  std::memcpy(padded[0], gate + i, bytes);
  std::memcpy(padded[1], up + i, bytes);
  store_activated(padded[2], padded[0], padded[1]);
  std::memcpy(out + i, padded[2], bytes);
}

template <class E, class Act>
void run(const ExpertActivation& op) {
  using Value = typename E::Value;
  const int64_t rows = op.tokens * op.picks;
  const Act act(op);
  parallel_ranges(threads_for(rows * op.width, kSmall, op.threads), rows, [&](int64_t row, int64_t end) {
    for (; row < end; row++) {
      run_row<E>(act, static_cast<const Value*>(op.gate_up) + row * 2 * op.width,
                 static_cast<Value*>(op.out) + row * op.width, op.width, op.weights ? op.weights[row] : 1.0f);
    }
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int expert_activation(const ExpertActivation* op) {
  with_types([&](auto element) {
    if (op->kind == kClamped) run<decltype(element), Clamped>(*op);
    else if (op->kind == kPlainGelu) run<decltype(element), Plain<GeluTanh>>(*op);
    else run<decltype(element), Plain<Silu>>(*op);
  }, op->is_bf16);
  return 0;
}

extern "C" int64_t expert_activation_size() { return sizeof(ExpertActivation); }
