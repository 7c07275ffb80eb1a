// RMS norm in two steps, sum of squares and scaling, shared by residual norms and head norms.
#pragma once

#include <cmath>

#include "simd/simd.h"

namespace rootgraft {

template <class E>
float sum_of_squares(const typename E::Value* x, int64_t count) {
  Floats total = broadcast(0.0f);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats value = E::load(x + i);
    total = fma(value, value, total);
  }
  float result = sum(total);
  for (; i < count; i++) result += E::widen(x[i]) * E::widen(x[i]);
  return result;
}

// out = x * scale * (offset + weight), from elements From to elements To.
template <class From, class W, class To>
void scale_by_weight(const typename From::Value* x, const typename W::Value* weight, float offset, float scale,
                     typename To::Value* out, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats factor = broadcast(offset) + W::load(weight + i);
    To::store(out + i, From::load(x + i) * broadcast(scale) * factor);
  }
  for (; i < count; i++) out[i] = To::narrow(From::widen(x[i]) * scale * (offset + W::widen(weight[i])));
}

}  // namespace rootgraft
