#include "gemm/tile_amx.h"

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

// R tiles of rows and P panels.
template <AmxWords Kind, int R, int P>
void run(const Product& p, const AmxRows& rows) {
  const ptrdiff_t b_stride = p.b_stride, steps = p.steps;
  const ptrdiff_t products = steps / kAmxWords * R * P, burst = (p.ahead_lines + products - 1) / products;
  const uint32_t *a[R], *b = p.b, *line = p.ahead, *end_line = p.ahead + p.ahead_lines * kWidth;
  a[0] = p.a;
  if constexpr (R == 2) a[1] = p.a + rows.second * p.a_stride;
  const auto panel = [=](int i) { return b + i * b_stride; };
  if (!p.ahead_lines) sum_by_amx<Kind, R, P>(a, p.a_stride, panel, steps, [] {});
  else sum_by_amx<Kind, R, P>(a, p.a_stride, panel, steps, [&] {
    for (ptrdiff_t i = 0; i < burst && line < end_line; i++, line += kWidth) __builtin_prefetch(line, 0, 2);
  });
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
