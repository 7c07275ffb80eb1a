#include "gemm/tile_amx.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

// Spreads the prefetches of a product over its instructions.
struct Prefetches {
  const uint32_t *line, *end;
  ptrdiff_t burst;  // lines

  Prefetches(const Product& p, ptrdiff_t products)
      : line(p.ahead), end(p.ahead + p.ahead_lines * kWidth), burst((p.ahead_lines + products - 1) / products) {}

  INLINE void next_burst() {
    for (ptrdiff_t i = 0; i < burst && line < end; i++, line += kWidth) __builtin_prefetch(line, 0, 2);
  }
};

// The sums of R tiles of rows and P panels in registers.
template <AmxWords Kind, int R, int P, AmxReuse kReuse, class Each>
INLINE void sum_tiles(const Product& p, const AmxRows& rows, Each each) {
  const uint32_t *a[R], *b = p.b;
  const ptrdiff_t b_stride = p.b_stride;
  a[0] = p.a;
  if constexpr (R == 2) a[1] = p.a + rows.second * p.a_stride;
  Prefetches prefetches(p, p.steps / kAmxWords * R * P);
  const auto panel = [=](int i) { return b + i * b_stride; };
  if (!p.start) for_constants<R * P>([](auto i) { amx_zero<i.value>(); });
  else for_constants<R * P>([&](auto i) {
    const float* from = p.start + i.value / P * rows.second * p.start_stride + i.value % P * kWidth;
    amx_load<i.value>(from, p.start_stride * sizeof(float));
  });
  if (!p.ahead_lines) add_by_amx<Kind, R, P, kReuse>(a, p.a_stride, panel, p.steps, each);
  else add_by_amx<Kind, R, P, kReuse>(a, p.a_stride, panel, p.steps, [&] {
    prefetches.next_burst();
    each();
  });
}

template <AmxWords Kind, int R, int P, AmxReuse kReuse>
void run(const Product& p, const AmxRows& rows) {
  sum_tiles<Kind, R, P, kReuse>(p, rows, [] {});
  for_constants<P>([&](auto i) {
    const auto to = [&](int row) { return static_cast<float*>(p.c.first) + row * p.c.stride + i.value * kWidth; };
    amx_store<i.value>(to(0), p.c.stride * sizeof(float));
    if constexpr (R == 2) amx_store<P + i.value>(to(rows.second), p.c.stride * sizeof(float));
  });
}

// One or two panels, to bf16.
template <int R, int P, AmxReuse kReuse>
void run_rounded(const Product& p, const AmxRows& rows, AmxRounding& rounding) {
  sum_tiles<AmxWords::kBf16, R, P, kReuse>(p, rows, [&] { rounding.step(); });
  float* room = rounding.begin(p.c, rows.all(), P);
  for_constants<P>([&](auto i) {
    const auto to = [&](int row) { return room + row * AmxRounding::kStride + i.value * kWidth; };
    amx_store<i.value>(to(0), AmxRounding::kStride * sizeof(float));
    if constexpr (R == 2) amx_store<P + i.value>(to(rows.second), AmxRounding::kStride * sizeof(float));
  });
}

// f(product, count) for two panels after two of a product.
template <class F>
INLINE void for_pairs(const Product& product, int panels, F f) {
  for (int first = 0; first < panels; first += 2) {
    const int count = panels - first < 2 ? panels - first : 2;
    const ptrdiff_t lines = product.ahead_lines, line = lines * first / panels;
    Product part = product;
    part.b += first * product.b_stride;
    part.c = product.c.right(first * kWidth);
    if (part.start) part.start += first * kWidth;
    part.ahead += line * kWidth;
    part.ahead_lines = lines * (first + count) / panels - line;
    f(part, count);
  }
}

// f(kReuse) for one tile of rows, or for two.
template <int R, class F>
INLINE void with_reuse(AmxReuse reuse, F f) {
  constexpr AmxReuse kOther = R == 1 ? AmxReuse::kNone : AmxReuse::kSecondCache;
  if (reuse == kOther) f(std::integral_constant<AmxReuse, kOther>{});
  else f(std::integral_constant<AmxReuse, AmxReuse::kFirstCache>{});
}

}  // namespace

template <AmxWords Kind>
void multiply_amx(const Product& product, const AmxRows& rows, int panels, AmxReuse reuse) {
  if (!rows.second) {
    return with_constant<kAmxPanels>(panels, [&](auto count) {
      with_reuse<1>(reuse, [&](auto use) { run<Kind, 1, count.value, use.value>(product, rows); });
    });
  }
  for_pairs(product, panels, [&](const Product& part, int count) {
    with_constant<2>(count, [&](auto pair) {
      with_reuse<2>(reuse, [&](auto use) { run<Kind, 2, pair.value, use.value>(part, rows); });
    });
  });
}

template void multiply_amx<AmxWords::kBf16>(const Product&, const AmxRows&, int, AmxReuse);
template void multiply_amx<AmxWords::kBytes>(const Product&, const AmxRows&, int, AmxReuse);

void multiply_amx(const Product& product, const AmxRows& rows, int panels, AmxReuse reuse, AmxRounding& rounding) {
  for_pairs(product, panels, [&](const Product& part, int count) {
    with_constant<2>(count, [&](auto pair) {
      if (rows.second) {
        with_reuse<2>(reuse, [&](auto use) { run_rounded<2, pair.value, use.value>(part, rows, rounding); });
      } else {
        with_reuse<1>(reuse, [&](auto use) { run_rounded<1, pair.value, use.value>(part, rows, rounding); });
      }
    });
  });
}

}  // namespace rootgraft

#endif
