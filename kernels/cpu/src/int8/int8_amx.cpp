// Products of bytes with a scale for each row, by AMX.
//
// Finishing a row (outliers, scales, rounding) takes the vector units about as long as AMX takes to sum it. So rows of
// one product are finished between the multiplying instructions of the next one.
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

// Finishes a row in fp32, and stores it past the caches.
template <int P>
void finish_past_caches(const ChannelProduct& p, const int32_t* sums, int row) {
  Ints low[P];
  Floats whole[P];
  load_row(p, sums, row, low);
  scale_row(p, row, low, whole);
  float* to = static_cast<float*>(p.c.first) + row * p.c.stride;
#pragma GCC unroll 4
  for (int v = 0; v < P; v++) _mm512_stream_ps(to + v * kWidth, (__m512)whole[v].part[0]);
}

// act(gate) * up from panels to 32 columns of bf16; each panel of the gate comes before the one of its factor, and all
// values are rounded first. Two panels are rounded together and widened again in registers, with four columns of each
// eight in one and four in the other. Through memory this took a twelfth of the op's time.
template <class Act>
INLINE void store_gated_pair(const Floats (&whole)[4], uint16_t* to) {
  const auto rounded = [](const Floats& first, const Floats& second) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0]);
  };
  const __m512i gate = rounded(whole[0], whole[2]), up = rounded(whole[1], whole[3]), zero = _mm512_setzero_si512();
  const auto first = [=](__m512i all) { return Floats{{(FloatPart)_mm512_unpacklo_epi16(zero, all)}}; };
  const auto second = [=](__m512i all) { return Floats{{(FloatPart)_mm512_unpackhi_epi16(zero, all)}}; };
  const __m512i fours = rounded(Act::apply(first(gate)) * first(up), Act::apply(second(gate)) * second(up));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), fours));
}

// act(gate) * up of P / 2 panels of a gate, each before the panel of its factor; all values are rounded first.
template <class To, class Act, int P>
void finish_gated(const ChannelProduct& p, const int32_t* sums, int row) {
  Ints low[P];
  Floats whole[P];
  load_row(p, sums, row, low);
  scale_row<true>(p, row, low, whole);
  auto* to = static_cast<typename To::Value*>(p.c.first) + row * p.c.stride;
  if constexpr (P == 4 && To::kPerWord == Bf16::kPerWord) return store_gated_pair<Act>(whole, to);
  alignas(64) typename To::Value rounded[P * kWidth];
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
  if (product.passes_caches) return &finish_past_caches<P>;
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

// The work beside products: prefetching lines, and finishing rows of the product before.
template <int Products>
struct BesideChannels {
  AheadLines ahead;
  int wait;
  ChannelFinish& finishing;

  template <int I>
  INLINE void before() {
    ahead.template ask<I, Products>();
    if (--wait == 0) wait = finishing.finish_one();
  }
};

// Calls f(register, offset) for the sums of R tiles of rows and P panels; `panel` is the first panel in the product.
template <int R, int P, class F>
INLINE void for_sums(int panel, const AmxRows& rows, F f) {
  for_constants<R * P>([&](auto i) {
    f(i, i.value / P * rows.second * ChannelFinish::kStride + (panel + i.value % P) * kWidth);
  });
}

// Adds to the sums of R tiles of rows and P panels, and stores them to `room`.
template <int R, int P, AmxReuse kReuse>
void sum(const ChannelProduct& p, int panel, const AmxRows& rows, AheadLines& ahead, ChannelFinish& finishing,
         const ChannelPiece& piece, int32_t* room) {
  constexpr ptrdiff_t kRow = ChannelFinish::kStride * sizeof(int32_t);
  const uint32_t *a = p.a + piece.word, *second = a + rows.second * p.a_stride;
  const uint32_t* b[P];
  for (int i = 0; i < P; i++) b[i] = p.panel(panel + i) + piece.word * kWidth;
  if (piece.from) for_sums<R, P>(panel, rows, [&](auto i, ptrdiff_t at) { amx_load<i.value>(piece.from + at, kRow); });
  else for_constants<R * P>([](auto i) { amx_zero<i.value>(); });
  BesideChannels<R * P> beside = {ahead, finishing.wait, finishing};
  for (ptrdiff_t k = 0; k < piece.words; k += kAmxWords) {
    beside.ahead.next_step();
    amx_products<AmxWords::kBytes, R, P, kReuse>(a, second, p.a_stride * sizeof(uint32_t),
                                                 [&](int i) { return b[i]; }, k, beside);
  }
  ahead = beside.ahead, finishing.wait = beside.wait;
  for_sums<R, P>(panel, rows, [&](auto i, ptrdiff_t at) { amx_store<i.value>(room + at, kRow); });
}

}  // namespace

void ChannelFinish::begin(const ChannelProduct& product, int rows, int panels, ptrdiff_t products) {
  finish_all();
  product_ = product;
  with_constant<kAmxPanels>(panels, [&](auto count) { row_ = finishing_of<count.value>(product); });
  from_ = sums_[room_], room_ ^= 1;
  next_ = 0, rows_ = rows;
  wait = every_ = std::max(1, (int)(products / rows));
}

void multiply_channel_amx(const ChannelProduct& product, const AmxRows& rows, int panels, AmxReuse reuse,
                          ChannelFinish& finishing, const ChannelPiece& piece) {
  const ptrdiff_t steps = piece.words / kAmxWords, products = steps * panels * (rows.second ? 2 : 1);
  AheadLines ahead(product, steps * (rows.second ? (panels + 1) / 2 : 1));
  int32_t* room = piece.to ? piece.to : finishing.room();
  if (rows.second) {
    for (int first = 0; first < panels; first += 2) {
      with_constant<2>(std::min(2, panels - first), [&](auto count) {
        with_reuse<2>(reuse, [&](auto kind) {
          sum<2, count.value, kind.value>(product, first, rows, ahead, finishing, piece, room);
        });
      });
    }
  } else {
    with_constant<kAmxPanels>(panels, [&](auto count) {
      sum<1, count.value, AmxReuse::kFirstCache>(product, 0, rows, ahead, finishing, piece, room);
    });
  }
  if (!piece.to) finishing.begin(product, rows.all(), panels, products);
}

}  // namespace rootgraft

#endif
