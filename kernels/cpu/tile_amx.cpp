#include "tile_amx.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

// Registers: sums of one or two tiles of rows by up to four panels; then two of A, two of B.
constexpr int kA = 4, kB = 6;

// Sums of a tile and a panel to where they go.
template <int C>
INLINE void store_sums(const TileRows& c, int rows, int row, int panel) {
  const ptrdiff_t at = row * c.stride + panel * kWidth;
  if (!c.is_bf16) return amx_store<C>(static_cast<float*>(c.first) + at, c.stride * sizeof(float));
  alignas(64) float sums[kAmxRows * kWidth];
  amx_store<C>(sums, kWidth * sizeof(float));
  auto* to = static_cast<uint16_t*>(c.first) + at;
  for (int m = 0; m < rows; m++) Bf16::store(to + m * c.stride, load(sums + m * kWidth));
}

// f(Constant<0>{}), ... f(Constant<Count - 1>{})
template <int Count, class F>
INLINE void for_constants(F f) {
  if constexpr (Count > 0) {
    for_constants<Count - 1>(f);
    f(Constant<Count - 1>{});
  }
}

// R tiles of rows and P panels, R * P <= 4.
template <int R, int P>
void run(const Product& p, const AmxRows& rows) {
  const ptrdiff_t a_bytes = p.a_stride * sizeof(uint32_t), b_stride = p.b_stride, steps = p.steps;
  const ptrdiff_t burst = (p.ahead_lines * kAmxWords + steps - 1) / steps;
  const uint32_t *a = p.a, *second = p.a + rows.second * p.a_stride, *b = p.b;
  const uint32_t *line = p.ahead, *end_line = p.ahead + p.ahead_lines * kWidth;
  for_constants<R * P>([](auto i) { amx_zero<i.value>(); });
  for (ptrdiff_t k = 0; k < steps; k += kAmxWords, b += kAmxWords * kWidth) {
    for (ptrdiff_t i = 0; i < burst && line < end_line; i++, line += kWidth) __builtin_prefetch(line, 0, 2);
    amx_load<kA>(a + k, a_bytes);
    if constexpr (R == 2) amx_load<kA + 1>(second + k, a_bytes);
    for_constants<P>([&](auto i) {
      constexpr int kPanel = i.value, kColumns = kB + kPanel % 2;
      amx_load<kColumns>(b + kPanel * b_stride, kWidth * sizeof(uint32_t));
      amx_dot_bf16<kPanel, kA, kColumns>();
      if constexpr (R == 2) amx_dot_bf16<P + kPanel, kA + 1, kColumns>();
    });
  }
  for_constants<P>([&](auto i) {
    store_sums<i.value>(p.c, rows.count, 0, i.value);
    if constexpr (R == 2) store_sums<P + i.value>(p.c, rows.count, rows.second, i.value);
  });
}

}  // namespace

AmxShapes product_shapes(int rows) {
  AmxShapes shapes;
  for (int i = 0; i < kB; i++) shapes.set(i, rows, kAmxWords);
  for (int i = kB; i < kB + 2; i++) shapes.set(i, kAmxWords, kWidth);
  return shapes;
}

void multiply_amx(const Product& product, const AmxRows& rows, int panels) {
  if (rows.second) with_constant<2>(panels, [&](auto count) { run<2, count.value>(product, rows); });
  else with_constant<4>(panels, [&](auto count) { run<1, count.value>(product, rows); });
}

}  // namespace rootgraft

#endif
