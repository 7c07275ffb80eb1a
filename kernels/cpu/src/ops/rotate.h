// Rotates a head by the cosines and sines of its position, for the ops that store keys.
#pragma once

#include "simd/simd.h"

namespace rootgraft {

// Rotates each pair (i, i + half) by its angle.
INLINE void rotate(float* head, const float* cos, int64_t half) {
  const float* sin = cos + half;
  float* second = head + half;
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    const Floats a = load(head + i), b = load(second + i), c = load(cos + i), s = load(sin + i);
    store(head + i, a * c - b * s);
    store(second + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = head[i], b = second[i];
    head[i] = a * cos[i] - b * sin[i];
    second[i] = b * cos[i] + a * sin[i];
  }
}

// Rotates each pair (2 i, 2 i + 1) by its angle.
INLINE void rotate_neighbours(float* head, const float* cos, int64_t half) {
  const float* sin = cos + half;
  for (int64_t i = 0; i < half; i++) {
    const float a = head[2 * i], b = head[2 * i + 1];
    head[2 * i] = a * cos[i] - b * sin[i];
    head[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

template <class From, class To>
INLINE void convert(const typename From::Value* from, typename To::Value* to, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) To::store(to + i, From::load(from + i));
  for (; i < count; i++) to[i] = To::narrow(From::widen(from[i]));
}

}  // namespace rootgraft
