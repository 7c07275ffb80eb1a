#include "gemm/tile_amx.h"

#include "gemm/gate.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

// Spreads the prefetches of a product over its instructions.
struct Prefetches {
  const uint32_t *line, *end;
  ptrdiff_t burst, apart;  // lines, words

  Prefetches(const Product& p, ptrdiff_t products)
      : line(p.ahead),
        end(p.ahead + p.ahead_lines * kWidth),
        burst((p.ahead_lines + products - 1) / products),
        apart(p.ahead_apart) {}

  INLINE void next_burst() {
    for (ptrdiff_t i = 0; i < burst && line < end; i++, line += kWidth) {
      __builtin_prefetch(line, 0, 2);
      if (apart) __builtin_prefetch(line + apart, 0, 2);
    }
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
  if (!p.ahead_lines) sum_by_amx<Kind, R, P, kReuse>(a, p.a_stride, panel, p.steps, each);
  else sum_by_amx<Kind, R, P, kReuse>(a, p.a_stride, panel, p.steps, [&] {
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
template <int R, int P, AmxReuse kReuse, class Row>
void run_finished(const Product& p, const AmxRows& rows, AmxEpilogue<Row>& epilogue) {
  constexpr int kStride = AmxEpilogue<Row>::kStride;
  sum_tiles<AmxWords::kBf16, R, P, kReuse>(p, rows, [&] { epilogue.step(); });
  float* room = epilogue.begin(p.c, rows.all(), P, p.steps / kAmxWords * R * P);
  for_constants<P>([&](auto i) {
    const auto to = [&](int row) { return room + row * kStride + i.value * kWidth; };
    amx_store<i.value>(to(0), kStride * sizeof(float));
    if constexpr (R == 2) amx_store<P + i.value>(to(rows.second), kStride * sizeof(float));
  });
}

template <class Act>
void store_gated_row(const float* sums, uint16_t* to) {
  alignas(64) uint16_t rounded[2 * kWidth];
  Bf16::store_two(rounded, load(sums), load(sums + kWidth));
  store_gated<Bf16, Act>(rounded, rounded + kWidth, to);
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

// P panels of any rows.
template <int P, class Row>
void run_rows(const Product& p, const AmxRows& rows, AmxReuse reuse, AmxEpilogue<Row>& epilogue) {
  if (rows.second) {
    with_reuse<2>(reuse, [&](auto use) { run_finished<2, P, use.value>(p, rows, epilogue); });
  } else {
    with_reuse<1>(reuse, [&](auto use) { run_finished<1, P, use.value>(p, rows, epilogue); });
  }
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

void multiply_amx(const Product& product, const AmxRows& rows, int panels, AmxReuse reuse,
                  AmxEpilogue<RoundedRow>& epilogue) {
  for_pairs(product, panels, [&](const Product& part, int count) {
    with_constant<2>(count, [&](auto pair) { run_rows<pair.value>(part, rows, reuse, epilogue); });
  });
}

void multiply_gated_amx(const Product& product, const AmxRows& rows, AmxReuse reuse, AmxEpilogue<GatedRow>& epilogue) {
  run_rows<2>(product, rows, reuse, epilogue);
}

GatedRow gated_row(int64_t kind) {
  return {with_activation(kind, [](auto act) { return &store_gated_row<decltype(act)>; })};
}

}  // namespace rootgraft

#endif
