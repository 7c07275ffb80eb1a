// The inner loop of tile products, one instance for each shape of tile.
#include "gemm/tile.h"

#include "gemm/prefetches.h"
#include "simd/amx.h"

namespace rootgraft {
namespace {

// Steps between bursts of prefetches. Loads of panels wait for a large burst, so if many lines are prefetched, bursts
// are more frequent. (GCC 12 keeps sums in memory during a burst; loops whose sums stay in registers were not faster.)
ptrdiff_t run_steps(const Product& p) { return p.ahead_lines > p.steps ? 8 : 16; }

template <class E, int MR, int NV>
void run_tile(const Product& p) {
  Floats sums[MR][NV];
  const auto* before = static_cast<const float*>(p.c.first);
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      const auto older = [&] { return load(before + m * p.c.stride + v * kWidth) * broadcast(p.c_scale[m]); };
      sums[m][v] = p.c_scale ? older() : broadcast(0.0f);
    }
  }
  const uint32_t *a = p.a, *b = p.b;
  const ptrdiff_t a_stride = p.a_stride, b_stride = p.b_stride, steps = p.steps, run = run_steps(p);
  Prefetches prefetches(p, (steps + run - 1) / run);
  for (ptrdiff_t first = 0; first < steps; first += run) {
    prefetches.next_burst();
    const ptrdiff_t end = first + run < steps ? first + run : steps;
#pragma GCC unroll 2
    for (ptrdiff_t k = first; k < end; k++) {
      Words column[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) column[v] = load_words(b + v * b_stride + k * kWidth);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        const Words row = broadcast_word(load_as<uint32_t>(a + m * a_stride + k));
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) sums[m][v] = E::dot(row, column[v], sums[m][v]);
      }
    }
  }
  p.c.store(sums);
}

template <class E, int MR, int NV>
__attribute__((noinline)) void run_groups(const Product& p, const GroupFactors& factors) {
  const uint32_t *a = p.a, *b = p.b;
  const float* factor = factors.first;
  const ptrdiff_t a_stride = p.a_stride, b_stride = p.b_stride;
  for (ptrdiff_t first = 0; first < p.steps; first += factors.steps, factor += kWidth) {
    const ptrdiff_t end = first + factors.steps < p.steps ? first + factors.steps : p.steps;
    Floats sums[MR][NV];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) sums[m][v] = broadcast(0.0f);
    }
    for (ptrdiff_t k = first; k < end; k++) {
      Words column[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) column[v] = load_words(b + v * b_stride + k * kWidth);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        const Words row = broadcast_word(load_as<uint32_t>(a + m * a_stride + k));
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) sums[m][v] = E::dot(row, column[v], sums[m][v]);
      }
    }
    auto* c = static_cast<float*>(p.c.first);
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      const Floats scale = load(factor + v * factors.stride) * broadcast(factors.unit);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        float* to = c + m * p.c.stride + v * kWidth;
        store(to, first ? fma(sums[m][v], scale, load(to)) : sums[m][v] * scale);
      }
    }
  }
}

}  // namespace

template <class E>
void multiply_tile(const Product& product, int rows, int panels) {
  with_constant<kTileRows>(rows, [&](auto mr) {
    with_constant<kTilePanels>(panels, [&](auto nv) { run_tile<E, mr.value, nv.value>(product); });
  });
}

template void multiply_tile<Bf16>(const Product&, int, int);
template void multiply_tile<Fp32>(const Product&, int, int);

template <class E>
void multiply_groups(const Product& product, const GroupFactors& factors, int rows, int panels) {
  with_constant<kTileRows>(rows, [&](auto mr) {
    with_constant<kTilePanels>(panels, [&](auto nv) { run_groups<E, mr.value, nv.value>(product, factors); });
  });
}

template void multiply_groups<Bf16>(const Product&, const GroupFactors&, int, int);
template void multiply_groups<Fp32>(const Product&, const GroupFactors&, int, int);

}  // namespace rootgraft

extern "C" const char* instruction_set() {
#if defined(__AVX512BF16__)
  return rootgraft::has_amx() ? "AVX-512 with BF16 and AMX" : "AVX-512 with BF16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return "NEON with BF16";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "NEON with dot products";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "baseline vectors";
#endif
}
