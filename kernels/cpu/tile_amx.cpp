#include "tile_amx.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

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

template <AmxWords Kind, int C, int A, int B>
INLINE void amx_dot() {
  if constexpr (Kind == AmxWords::kBf16) amx_dot_bf16<C, A, B>();
  else amx_dot_signed_unsigned<C, A, B>();
}

// R tiles of rows and P panels, R * P <= kAmxSums.
template <AmxWords Kind, int R, int P>
void run(const Product& p, const AmxRows& rows) {
  const ptrdiff_t a_bytes = p.a_stride * sizeof(uint32_t), b_stride = p.b_stride, steps = p.steps;
  const ptrdiff_t burst = (p.ahead_lines * kAmxWords + steps - 1) / steps;
  const uint32_t *a = p.a, *second = p.a + rows.second * p.a_stride, *b = p.b;
  const uint32_t *line = p.ahead, *end_line = p.ahead + p.ahead_lines * kWidth;
  for_constants<R * P>([](auto i) { amx_zero<i.value>(); });
  for (ptrdiff_t k = 0; k < steps; k += kAmxWords, b += kAmxWords * kWidth) {
    for (ptrdiff_t i = 0; i < burst && line < end_line; i++, line += kWidth) __builtin_prefetch(line, 0, 2);
    amx_load<kAmxA>(a + k, a_bytes);
    if constexpr (R == 2) amx_load<kAmxA + 1>(second + k, a_bytes);
    for_constants<P>([&](auto i) {
      constexpr int kPanel = i.value, kColumns = kAmxB + kPanel % 2;
      amx_load<kColumns>(b + kPanel * b_stride, kWidth * sizeof(uint32_t));
      amx_dot<Kind, kPanel, kAmxA, kColumns>();
      if constexpr (R == 2) amx_dot<Kind, P + kPanel, kAmxA + 1, kColumns>();
    });
  }
  for_constants<P>([&](auto i) {
    store_sums<i.value>(p.c, rows.count, 0, i.value);
    if constexpr (R == 2) store_sums<P + i.value>(p.c, rows.count, rows.second, i.value);
  });
}

}  // namespace

template <AmxWords Kind>
void multiply_amx(const Product& product, const AmxRows& rows, int panels) {
  if (!rows.second) {
    return with_constant<kAmxPanels>(panels, [&](auto count) { run<Kind, 1, count.value>(product, rows); });
  }
  for (int first = 0; first < panels; first += 2) {
    const int count = panels - first < 2 ? panels - first : 2;
    const ptrdiff_t lines = product.ahead_lines, line = lines * first / panels;
    Product part = product;
    part.b += first * product.b_stride;
    part.c = product.c.right(first * kWidth);
    part.ahead += line * kWidth;
    part.ahead_lines = lines * (first + count) / panels - line;
    if (count == 2) run<Kind, 2, 2>(part, rows);
    else run<Kind, 2, 1>(part, rows);
  }
}

template void multiply_amx<AmxWords::kBf16>(const Product&, const AmxRows&, int);
template void multiply_amx<AmxWords::kBytes>(const Product&, const AmxRows&, int);

}  // namespace rootgraft

#endif
