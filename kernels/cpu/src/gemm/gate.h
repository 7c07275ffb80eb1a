// Activation functions of an MLP, and their products with a second value.
#pragma once

#include "simd/simd.h"

namespace rootgraft {

enum ActivationKind : int64_t { kSilu = 0, kGeluTanh = 1, kRelu2 = 2, kGelu = 3 };

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

// x * Phi(x), with Phi(-|x|) = erfc(|x| / sqrt(2)) / 2 by the fit of Numerical Recipes (second edition, erfcc), to 1.2e-7
// relative, so that the tail below zero keeps its digits. Beyond 16 it is 0, and no infinity meets that zero.
struct Gelu {
  static INLINE Floats apply(const Floats& x) {
    constexpr float kFit[] = {-0.82215223f, 1.48851587f,  -1.13520398f, 0.27886807f, -0.18628806f,
                              0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    const Floats zero = broadcast(0.0f), one = broadcast(1.0f);
    const Floats size = zero - max(broadcast(-16.0f), zero - max(x, zero - x));
    const Floats z = size * broadcast(0.7071067811865476f);
    const Floats t = one / fma(z, broadcast(0.5f), one);
    Floats p = broadcast(0.17087277f);
    for (const float each : kFit) p = fma(p, t, broadcast(each));
    const Floats tail = t * broadcast(0.5f) * exp2((p - z * z) * broadcast(kLog2E));
    return max(zero, x) - size * tail;
  }
};

// Calls f(Silu{}), or f with the activation of this kind.
template <class F>
INLINE auto with_activation(int64_t kind, F f) {
  if (kind == kGeluTanh) return f(GeluTanh{});
  if (kind == kRelu2) return f(Relu2{});
  if (kind == kGelu) return f(Gelu{});
  return f(Silu{});
}

// out = act(gate) * up, for sixteen values.
template <class E, class Act>
INLINE void store_gated(const typename E::Value* gate, const typename E::Value* up, typename E::Value* out) {
  E::store(out, Act::apply(E::load(gate)) * E::load(up));
}

}  // namespace rootgraft
