// Products of bytes with a scale for each row, by AMX.
//
// Finishing a row (outliers, scales, rounding) takes vectors about as long as AMX takes to sum it, so rows of one
// product are finished between the instructions that multiply the next one.
#include "int8/int8_amx.h"

#include <algorithm>

#include "gemm/gate.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

template <int P>
INLINE void load_row(const ChannelProduct& p, const int32_t* sums, int row, Ints (&low)[P]) {
  const Ints start = broadcast_int(p.row[row].start_low);
#pragma GCC unroll 4
  for (int v = 0; v < P; v++) low[v] = load_ints(sums + row * ChannelFinish::kStride + v * kWidth) + start;
}

template <class To, int P>
void finish(const ChannelProduct& p, const int32_t* sums, int row) {
  Ints low[P];
  load_row(p, sums, row, low);
  finish_row<To>(p, row, low);
}

// act(gate) * up of P / 2 panels, each beside the one of its factors; all rounded first.
template <class To, class Act, int P>
void finish_gated(const ChannelProduct& p, const int32_t* sums, int row) {
  Ints low[P];
  Floats whole[P];
  load_row(p, sums, row, low);
  scale_row<true>(p, row, low, whole);
  alignas(64) typename To::Value rounded[P * kWidth];
  auto* to = static_cast<typename To::Value*>(p.c.first) + row * p.c.stride;
#pragma GCC unroll 2
  for (int v = 0; v < P; v += 2) To::store_two(rounded + v * kWidth, whole[v], whole[v + 1]);
#pragma GCC unroll 2
  for (int v = 0; v < P; v += 2) {
    store_gated<To, Act>(rounded + v * kWidth, rounded + (v + 1) * kWidth, to + v / 2 * kWidth);
  }
}

// How the rows of a product of P panels are finished.
template <int P>
ChannelFinish::Row finishing_of(const ChannelProduct& product) {
  ChannelFinish::Row finish_one = nullptr;
  with_types([&](auto to) {
    using To = decltype(to);
    finish_one = &finish<To, P>;
    if constexpr (P % 2 == 0) {
      const auto gated = [](auto act) { return &finish_gated<To, decltype(act), P>; };
      if (product.gate) finish_one = with_activation(product.gate - 1, gated);
    }
  }, product.c.is_bf16);
  return finish_one;
}

// The sums of R tiles of rows and P panels, the first of which is `panel` of the product, over some words: to the piece's
// target, or to `room`.
template <int R, int P, AmxReuse kReuse>
void sum(const ChannelProduct& p, int panel, const AmxRows& rows, ptrdiff_t word, ptrdiff_t end, Prefetches& prefetches,
         ChannelFinish& finishing, const Piece<int32_t>& piece, int32_t* room) {
  const uint32_t* a[R];
  a[0] = p.a + word;
  if constexpr (R == 2) a[1] = a[0] + rows.second * p.a_stride;
  const uint32_t* b[P];
  for (int i = 0; i < P; i++) b[i] = p.panel(panel + i) + word * kWidth;
  begin_piece<R * P>(piece);
  add_by_amx<AmxWords::kBytes, R, P, kReuse>(a, p.a_stride, [&](int i) { return b[i]; }, end - word, [&] {
    prefetches.next_burst();
    finishing.step();
  });
  if (piece.to) return end_piece<R * P>(piece);
  for_constants<P>([&](auto i) {
    const auto to = [&](int row) { return room + row * ChannelFinish::kStride + i.value * kWidth; };
    amx_store<i.value>(to(0), ChannelFinish::kStride * sizeof(int32_t));
    if constexpr (R == 2) amx_store<P + i.value>(to(rows.second), ChannelFinish::kStride * sizeof(int32_t));
  });
}

// The sums of one tile of rows, kAmxPanels panels at a time.
void sum_one(const ChannelProduct& p, const AmxRows& rows, int panels, Prefetches& prefetches, ChannelFinish& finishing) {
  int32_t* room = finishing.room();
  for (int first = 0; first < panels; first += kAmxPanels) {
    with_constant<kAmxPanels>(std::min(kAmxPanels, panels - first), [&](auto count) {
      sum<1, count.value, AmxReuse::kFirstCache>(p, first, rows, 0, p.words, prefetches, finishing, {},
                                                 room + first * kWidth);
    });
  }
}

// Those of two tiles of rows, two panels at a time.
template <AmxReuse kReuse>
void sum_two(const ChannelProduct& p, const AmxRows& rows, int panels, Prefetches& prefetches, ChannelFinish& finishing) {
  const ptrdiff_t blocks = p.words / kAmxWords, most = kPieceWords / kAmxWords;
  const ptrdiff_t pieces = kReuse == AmxReuse::kSecondCache ? (blocks + most - 1) / most : 1;
  alignas(64) int32_t sums[kChannelGroup * 2 * kTileSums];
  int32_t* room = finishing.room();
  for (ptrdiff_t i = 0; i < pieces; i++) {
    const ptrdiff_t word = blocks * i / pieces * kAmxWords, end = blocks * (i + 1) / pieces * kAmxWords;
    for (int first = 0; first < panels; first += 2) {
      int32_t* kept = sums + first * 2 * kTileSums;
      const Piece<int32_t> piece = {i ? kept : nullptr, i + 1 < pieces ? kept : nullptr};
      with_constant<2>(std::min(2, panels - first), [&](auto count) {
        sum<2, count.value, kReuse>(p, first, rows, word, end, prefetches, finishing, piece, room + first * kWidth);
      });
    }
  }
}

}  // namespace

void ChannelFinish::begin(const ChannelProduct& product, int rows, int panels, ptrdiff_t products) {
  finish_all();
  int parts = 0;
  for (int first = 0; first < panels; first += kAmxPanels, parts++) {
    Part& part = parts_[parts];
    part.product = product.right(first);
    with_constant<kAmxPanels>(std::min(kAmxPanels, panels - first), [&](auto count) {
      part.row = finishing_of<count.value>(product);
    });
  }
  from_ = sums_[room_], room_ ^= 1;
  next_ = 0, rows_ = rows, end_ = rows * parts;
  wait_ = every_ = (int)(products / end_);
}

void multiply_channel_amx(const ChannelProduct& product, const AmxRows& rows, int panels, AmxReuse reuse,
                          ChannelFinish& finishing) {
  const ptrdiff_t products = product.words / kAmxWords * panels * (rows.second ? 2 : 1);
  Prefetches prefetches(product.ahead, product.ahead_lines, product.ahead_apart, products);
  if (rows.second) {
    with_reuse<2>(reuse, [&](auto use) { sum_two<use.value>(product, rows, panels, prefetches, finishing); });
  } else {
    sum_one(product, rows, panels, prefetches, finishing);
  }
  finishing.begin(product, rows.all(), panels, products);
}

}  // namespace rootgraft

#endif
