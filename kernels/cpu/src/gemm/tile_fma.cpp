#include "gemm/tile_fma.h"

#if ROOTGRAFT_FMA

#include "gemm/prefetches.h"

namespace rootgraft {
namespace {

// sums += a[m] * b for MR rows that are a constant distance apart.
template <int MR, int NV>
INLINE void add_products(const float* a, const Floats (&b)[NV], Floats (&sums)[MR][NV]) {
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    const Floats row = broadcast(a[m * kWidth]);
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sums[m][v] = fma(row, b[v], sums[m][v]);
  }
}

// Two neighbours along K (`half` 0 and 1) of the columns of NV panels.
template <class B, int NV>
INLINE void load_half(const uint32_t* b, ptrdiff_t b_stride, int half, Floats (&columns)[NV]) {
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++, b += b_stride) {
    if constexpr (B::kPerWord == Fp32::kPerWord) {
      columns[v] = Fp32::load(reinterpret_cast<const float*>(b) + half * kWidth);
    } else {
      const Words words = load_words(b);
      columns[v] = map([&](int i) {
        return (FloatPart)(half ? words.part[i] & 0xFFFF0000u : words.part[i] << 16);
      });
    }
  }
}

template <class B, int MR, int NV>
INLINE void add_step(const float* a, const uint32_t* b, ptrdiff_t b_stride, Floats (&sums)[MR][NV]) {
  Floats columns[NV];
  load_half<B>(b, b_stride, 0, columns);
  add_products(a, columns, sums);
  // If the sums fill the registers, words are read twice, which is faster than keeping them.
  if constexpr (kParts > 1 && MR * NV >= 5) asm volatile("" ::: "memory");
  load_half<B>(b, b_stride, 1, columns);
  add_products(a + 1, columns, sums);
}

template <class B, int MR, int NV>
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
  constexpr ptrdiff_t kStep = kWidth * Bf16::kPerWord / B::kPerWord;  // words of B in a step
  Prefetches prefetches(p, (steps + kRunSteps - 1) / kRunSteps);
  ptrdiff_t k = 0;
  for (; k + kRunSteps <= steps; k += kRunSteps, a += MR * kWidth) {
    prefetches.next_burst();
#pragma GCC unroll 2
    for (int i = 0; i < kRunSteps; i++, b += kStep) add_step<B>(a + i * Bf16::kPerWord, b, b_stride, sums);
  }
  for (; k < steps; k++, a += Bf16::kPerWord, b += kStep) add_step<B>(a, b, b_stride, sums);
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

void widen_panel(const uint32_t* words, ptrdiff_t steps, float* out) {
  for (ptrdiff_t k = 0; k < steps; k++, words += kWidth, out += 2 * kWidth) {
    const Words pair = load_words(words);
    store(out, map([&](int i) { return (FloatPart)(pair.part[i] << 16); }));
    store(out + kWidth, map([&](int i) { return (FloatPart)(pair.part[i] & 0xFFFF0000u); }));
  }
}

template <class B>
void multiply_fma(const Product& product, int rows, int panels) {
  with_constant<kFmaRows>(rows, [&](auto mr) {
    with_constant<fma_panels(mr.value)>(panels, [&](auto nv) { run_tile<B, mr.value, nv.value>(product); });
  });
}

template void multiply_fma<Bf16>(const Product&, int, int);
template void multiply_fma<Fp32>(const Product&, int, int);

}  // namespace rootgraft

#endif
