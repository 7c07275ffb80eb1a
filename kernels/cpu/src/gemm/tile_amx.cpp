#include "gemm/tile_amx.h"

#include "gemm/prefetches.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

struct Panels {
  const uint32_t* first;
  ptrdiff_t stride;

  INLINE const uint32_t* operator()(int i) const { return first + i * stride; }
};

// The work beside products: prefetching lines, and finishing rows of older sums. It is a local object without closures,
// so that the compiler keeps it in registers; members captured by a closure would go through memory before each
// product.
template <int Products, bool kFinishes, class Rows>
struct Beside {
  AheadLines ahead;
  const float* from;
  uint16_t* to;
  ptrdiff_t stride;
  int panels;
  Rows rows;

  template <int I>
  INLINE void before() {
    ahead.template ask<I, Products>();
    if constexpr (kFinishes && I % Rows::kProducts == 0) finish();
  }

  INLINE void finish() {
    rows(from, panels, to, stride, 1);
    from += kEpilogueStride, to += stride;
  }
};

// Sets the sums with which a product begins: those to which it is added, or zeros.
template <int R, int P>
INLINE void begin_sums(const Product& p, const AmxRows& rows) {
  if (!p.start) return for_constants<R * P>([](auto i) { amx_zero<i.value>(); });
  for_constants<R * P>([&](auto i) {
    const float* from = p.start + i.value / P * rows.second * p.start_stride + i.value % P * kWidth;
    amx_load<i.value>(from, p.start_stride * sizeof(float));
  });
}

// Adds the product to the sums of R tiles of rows and P panels in registers.
template <AmxWords Kind, int R, int P, AmxReuse kReuse>
INLINE void add_tiles(const Product& p, const AmxRows& rows) {
  const Panels panel = {p.b, p.b_stride};
  const uint32_t* a[R];
  a[0] = p.a;
  if constexpr (R == 2) a[1] = p.a + rows.second * p.a_stride;
  if (!p.ahead_lines) return add_by_amx<Kind, R, P, kReuse>(a, p.a_stride, panel, p.steps, [] {});
  Beside<R * P, false, RoundedRows> beside = {{p, p.steps / kAmxWords}};
  for (ptrdiff_t k = 0; k < p.steps; k += kAmxWords) {
    beside.ahead.next_step();
    amx_products<Kind, R, P, kReuse>(a[0], a[R - 1], p.a_stride * sizeof(uint32_t), panel, k, beside);
  }
}

template <AmxWords Kind, int R, int P, AmxReuse kReuse>
void run(const Product& p, const AmxRows& rows) {
  begin_sums<R, P>(p, rows);
  add_tiles<Kind, R, P, kReuse>(p, rows);
  for_constants<P>([&](auto i) {
    const auto to = [&](int row) { return static_cast<float*>(p.c.first) + row * p.c.stride + i.value * kWidth; };
    amx_store<i.value>(to(0), p.c.stride * sizeof(float));
    if constexpr (R == 2) amx_store<P + i.value>(to(rows.second), p.c.stride * sizeof(float));
  });
}

// Adds the product to sums in registers, and finishes the rows that are pending.
template <int R, int P, AmxReuse kReuse, class Rows>
INLINE void add_finishing(const Product& p, const AmxRows& rows, PendingRows& pending, const Rows& finish) {
  constexpr int kStepRows = R * P / Rows::kProducts;
  const Panels panel = {p.b, p.b_stride};
  const uint32_t *a = p.a, *second = p.a + rows.second * p.a_stride;
  const ptrdiff_t a_bytes = p.a_stride * sizeof(uint32_t), steps = p.steps;
  ptrdiff_t k = 0;
  Beside<R * P, true, Rows> both = {{p, steps / kAmxWords}, pending.from, pending.to, pending.stride, P, finish};
  for (; pending.left >= kStepRows && k < steps; pending.left -= kStepRows, k += kAmxWords) {
    both.ahead.next_step();
    amx_products<AmxWords::kBf16, R, P, kReuse>(a, second, a_bytes, panel, k, both);
  }
  for (; pending.left; pending.left--) both.finish();
  Beside<R * P, false, Rows> alone = {both.ahead};
  for (; k < steps; k += kAmxWords) {
    alone.ahead.next_step();
    amx_products<AmxWords::kBf16, R, P, kReuse>(a, second, a_bytes, panel, k, alone);
  }
}

// Multiplies one or two panels, with results in bf16.
template <int R, int P, AmxReuse kReuse, class Rows>
void run_finished(const Product& p, const AmxRows& rows, AmxEpilogue<Rows>& epilogue, const Piece<float>& piece) {
  if (epilogue.pending.panels != P) epilogue.finish(epilogue.pending);
  if (p.start) begin_sums<R, P>(p, rows);
  else begin_piece<R * P>(piece);
  add_finishing<R, P, kReuse>(p, rows, epilogue.pending, epilogue.rows());
  if (piece.to) return end_piece<R * P>(piece);
  float* room = epilogue.begin(p.c, rows.all(), P);
  for_constants<P>([&](auto i) {
    const auto to = [&](int row) { return room + row * kEpilogueStride + i.value * kWidth; };
    amx_store<i.value>(to(0), kEpilogueStride * sizeof(float));
    if constexpr (R == 2) amx_store<P + i.value>(to(rows.second), kEpilogueStride * sizeof(float));
  });
}

template <class Act>
void store_gated_rows(const float* sums, uint16_t* to, ptrdiff_t stride, int rows) {
  const ActivatedRows<Act> finish;
  for (int r = 0; r < rows; r++, sums += kEpilogueStride, to += stride) finish(sums, 2, to, stride, 1);
}

// Calls f(product, count) for each two panels of a product.
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

// Multiplies P panels with any number of rows.
template <int P, class Rows>
void run_rows(const Product& p, const AmxRows& rows, AmxReuse reuse, AmxEpilogue<Rows>& epilogue, const Piece<float>& piece) {
  if (rows.second) {
    with_reuse<2>(reuse, [&](auto use) { run_finished<2, P, use.value>(p, rows, epilogue, piece); });
  } else {
    with_reuse<1>(reuse, [&](auto use) { run_finished<1, P, use.value>(p, rows, epilogue, piece); });
  }
}

// Calls f(product, first word of the piece, whether it is the last) for pieces along K.
template <class F>
INLINE void for_pieces(const Product& product, AmxReuse reuse, F f) {
  const ptrdiff_t blocks = product.steps / kAmxWords, most = kShortPieceWords / kAmxWords;
  const bool is_cut = reuse == AmxReuse::kSecondCache && product.steps > kPieceWords;
  const ptrdiff_t pieces = is_cut ? (blocks + most - 1) / most : 1;
  for (ptrdiff_t i = 0; i < pieces; i++) {
    const ptrdiff_t from = blocks * i / pieces, to = blocks * (i + 1) / pieces, lines = product.ahead_lines;
    Product part = product;
    part.a += from * kAmxWords;
    part.b += from * kAmxWords * kWidth;
    part.steps = (to - from) * kAmxWords;
    part.ahead += lines * i / pieces * kWidth;
    part.ahead_lines = lines * (i + 1) / pieces - lines * i / pieces;
    f(part, i > 0, i + 1 < pieces);
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
                  AmxEpilogue<RoundedRows>& epilogue) {
  alignas(64) float sums[kAmxGroup * 2 * kTileSums];
  for_pieces(product, reuse, [&](const Product& piece, bool resumes, bool goes_on) {
    float* room = sums;
    for_pairs(piece, panels, [&](const Product& part, int count) {
      const Piece<float> place = {resumes ? room : nullptr, goes_on ? room : nullptr};
      with_constant<2>(count, [&](auto pair) { run_rows<pair.value>(part, rows, reuse, epilogue, place); });
      room += 4 * kTileSums;
    });
  });
}

template <class Act>
void multiply_gated_amx(const Product& product, const AmxRows& rows, AmxReuse reuse,
                        AmxEpilogue<ActivatedRows<Act>>& epilogue) {
  run_rows<2>(product, rows, reuse, epilogue, {});
}

#define MULTIPLY_GATED(Act) \
  template void multiply_gated_amx<Act>(const Product&, const AmxRows&, AmxReuse, AmxEpilogue<ActivatedRows<Act>>&)
MULTIPLY_GATED(Silu);
MULTIPLY_GATED(GeluTanh);
MULTIPLY_GATED(Relu2);
MULTIPLY_GATED(Gelu);

GatedRows gated_rows(int64_t kind) {
  return {with_activation(kind, [](auto act) { return &store_gated_rows<decltype(act)>; })};
}

}  // namespace rootgraft

#endif
