#include "gemm/tile_fma.h"

#if ROOTGRAFT_FMA

#include "gemm/prefetches.h"

namespace rootgraft {
namespace {

// sums += a[m] * b for MR rows at constant distances.
template <int MR, int NV>
INLINE void add_products(const float* a, const Floats (&b)[NV], Floats (&sums)[MR][NV]) {
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    const Floats row = broadcast(a[m * kWidth]);
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sums[m][v] = fma(row, b[v], sums[m][v]);
  }
}

// One word along K: its low half, then its high half.
template <int MR, int NV>
INLINE void add_step(const float* a, const uint32_t* b, ptrdiff_t b_stride, Floats (&sums)[MR][NV]) {
  Floats column[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) {
    const Words words = load_words(b + v * b_stride);
    column[v] = map([&](int i) { return (FloatPart)(words.part[i] << 16); });
  }
  add_products(a, column, sums);
  asm volatile("" ::: "memory");  // the words are read again, which is cheaper than to keep them: sums fill the registers
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) {
    const Words words = load_words(b + v * b_stride);
    column[v] = map([&](int i) { return (FloatPart)(words.part[i] & 0xFFFF0000u); });
  }
  add_products(a + 1, column, sums);
}

template <int MR, int NV>
__attribute__((noinline)) void run_tile(const Product& p) {
  Floats sums[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sums[m][v] = broadcast(0.0f);
  }
  const auto* a = reinterpret_cast<const float*>(p.a);
  const uint32_t* b = p.b;
  const ptrdiff_t b_stride = p.b_stride, steps = p.steps;
  Prefetches prefetches(p, (steps + kRunSteps - 1) / kRunSteps);
  ptrdiff_t k = 0;
  for (; k + kRunSteps <= steps; k += kRunSteps, a += MR * kWidth) {
    prefetches.next_burst();
#pragma GCC unroll 2
    for (int i = 0; i < kRunSteps; i++, b += kWidth) add_step(a + i * Bf16::kPerWord, b, b_stride, sums);
  }
  for (; k < steps; k++, a += Bf16::kPerWord, b += kWidth) add_step(a, b, b_stride, sums);
  p.c.store(sums);
}

}  // namespace

void lay_out_fma_rows(const uint32_t* words, ptrdiff_t steps, int rows, float* out) {
  const ptrdiff_t row_floats = fma_row_floats(steps), values = steps * Bf16::kPerWord;
  for_tiles<kFmaRows, 1>(rows, 1, [&](int first, int count, int, int) {
    for (int m = 0; m < count; m++) {
      const auto* from = reinterpret_cast<const uint16_t*>(words + (first + m) * steps);
      float* to = out + first * row_floats + m * kWidth;
      ptrdiff_t k = 0;
      for (; k + kWidth <= values; k += kWidth, to += count * kWidth) store(to, Bf16::load(from + k));
      for (; k < values; k++) to[k % kWidth] = Bf16::widen(from[k]);
    }
  });
}

void multiply_fma(const Product& product, int rows, int panels) {
  with_constant<kFmaRows>(rows, [&](auto mr) {
    with_constant<fma_panels(mr.value)>(panels, [&](auto nv) { run_tile<mr.value, nv.value>(product); });
  });
}

}  // namespace rootgraft

#endif
