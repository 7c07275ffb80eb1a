// Activation functions of an MLP, and their products with a second value.
#pragma once

#include "simd/simd.h"

namespace rootgraft {

enum ActivationKind : int64_t { kSilu = 0, kGeluTanh = 1, kRelu2 = 2 };

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

struct Relu2 {
  static INLINE Floats apply(const Floats& x) {
    const Floats positive = max(broadcast(0.0f), x);
    return positive * positive;
  }
};

// Calls f(Silu{}), or f with the activation of this kind.
template <class F>
INLINE auto with_activation(int64_t kind, F f) {
  if (kind == kGeluTanh) return f(GeluTanh{});
  if (kind == kRelu2) return f(Relu2{});
  return f(Silu{});
}

// out = act(gate) * up, for sixteen values.
template <class E, class Act>
INLINE void store_gated(const typename E::Value* gate, const typename E::Value* up, typename E::Value* out) {
  E::store(out, Act::apply(E::load(gate)) * E::load(up));
}

}  // namespace rootgraft
