// RMS norm and layer norm in steps, shared by residual norms and head norms.
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

// out = x * scale * (offset + weight), from elements of type From to elements of type To.
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

template <class E>
float sum_of(const typename E::Value* x, int64_t count) {
  Floats total = broadcast(0.0f);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) total = total + E::load(x + i);
  float result = sum(total);
  for (; i < count; i++) result += E::widen(x[i]);
  return result;
}

template <class E>
float sum_of_squares_around(float mean, const typename E::Value* x, int64_t count) {
  Floats total = broadcast(0.0f);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats value = E::load(x + i) - broadcast(mean);
    total = fma(value, value, total);
  }
  float result = sum(total);
  for (; i < count; i++) result += (E::widen(x[i]) - mean) * (E::widen(x[i]) - mean);
  return result;
}

// Layer norm: out = (x - mean) / deviation * (offset + weight) + bias, if there is a bias.
template <class From, class W, class To>
void centre_and_scale(const typename From::Value* x, const typename W::Value* weight, const typename W::Value* bias,
                      float offset, float eps, typename To::Value* out, int64_t count) {
  const float mean = sum_of<From>(x, count) / (float)count;
  const float scale = 1.0f / std::sqrt(sum_of_squares_around<From>(mean, x, count) / (float)count + eps);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats factor = broadcast(offset) + W::load(weight + i);
    const Floats normed = (From::load(x + i) - broadcast(mean)) * broadcast(scale) * factor;
    To::store(out + i, bias ? normed + W::load(bias + i) : normed);
  }
  for (; i < count; i++) {
    const float normed = (From::widen(x[i]) - mean) * scale * (offset + W::widen(weight[i]));
    out[i] = To::narrow(bias ? normed + W::widen(bias[i]) : normed);
  }
}

}  // namespace rootgraft
