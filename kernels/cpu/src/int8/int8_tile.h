// Products of a few rows of bytes with panels of bytes, where each column has one scale, and so has each row.
//
//   A        rows as int8_rows.h makes them: words of four signed bytes along K, and words of outliers
//   B panel  [words][16 columns] of bytes stored + 128; panels lie b_stride words apart
//   C        rows of fp32 or bf16, columns in the order of the panels
//
// Sums are exact integers, so that their bits do not depend on how they are made.
#pragma once

#include "int8/int8_rows.h"
#include "gemm/tile_rows.h"
#include "simd/partition.h"

namespace rootgraft {

struct ChannelProduct {
  const uint32_t* a;
  ptrdiff_t a_stride;  // words
  const ChannelRow* row;
  const OutlierWord* outliers;  // [rows][outlier_stride]
  ptrdiff_t outlier_stride;
  const uint32_t* b;
  ptrdiff_t b_stride;    // words from panel to panel
  const float* b_scale;  // [panels][16]
  ptrdiff_t words;       // along K
  TileRows c;
  // Memory to ask for while this runs, for a product soon to come.
  const uint32_t* ahead = nullptr;
  ptrdiff_t ahead_lines = 0;                    // of 64 bytes
  ptrdiff_t ahead_stream = 0, ahead_apart = 0;  // AMX: see Product
  int64_t gate = 0;     // as of a QuantisedLinear: every second panel has the factors of the one before
  ptrdiff_t apart = 0;  // with a gate, panels from those to their factors
  bool passes_caches = false;  // AMX: C, of fp32 in whole lines, is stored past the caches

  void ask_for(const Lines& lines) { ahead = lines.first, ahead_lines = lines.count; }
  void ask_for(const Streams& lines) {
    ahead = lines.first, ahead_lines = lines.length, ahead_stream = lines.words, ahead_apart = lines.apart;
  }

  // Which of the columns' panels is at a place, with a gate or without.
  template <bool kGated>
  INLINE int64_t index(int place) const {
    return kGated ? place / 2 + place % 2 * apart : place;
  }
  const uint32_t* panel(int place) const { return b + (gate ? index<true>(place) : index<false>(place)) * b_stride; }
};

#if defined(__AVX512F__)
constexpr int kChannelRows = 6, kChannelPanels = 4;  // 24 of 32 registers hold sums
#else
constexpr int kChannelRows = 6, kChannelPanels = 1;  // 12 of 16 (AVX2)
#endif

// One tile, rows <= kChannelRows and panels <= kChannelPanels.
void multiply_channel_tile(const ChannelProduct& product, int rows, int panels);

// Sums of row m of C, of those of the low bytes and of the outliers, scaled.
template <bool kGated = false, int NV>
INLINE void scale_row(const ChannelProduct& p, int m, const Ints (&low)[NV], Floats (&whole)[NV]) {
  const ChannelRow& row = p.row[m];
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) whole[v] = to_floats(low[v]);
  if (row.outliers) {
    Ints high[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) high[v] = broadcast_int(row.start_high);
    const uint32_t* b[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) b[v] = p.b + p.index<kGated>(v) * p.b_stride;
    const OutlierWord* word = p.outliers + m * p.outlier_stride;
    for (const OutlierWord* end = word + row.outliers; word < end; word++) {
      const Words bytes = broadcast_word(word->high);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) high[v] = dot_biased(load_words(b[v] + word->at * kWidth), bytes, high[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) whole[v] = fma(to_floats(high[v]), broadcast(1 << kPlaneBits), whole[v]);
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) whole[v] = whole[v] * broadcast(row.scale) * load(p.b_scale + p.index<kGated>(v) * kWidth);
}

// Row m of C.
template <class To, int NV>
INLINE void finish_row(const ChannelProduct& p, int m, const Ints (&low)[NV]) {
  Floats whole[NV];
  scale_row(p, m, low, whole);
  auto* to = static_cast<typename To::Value*>(p.c.first) + m * p.c.stride;
  if constexpr (NV % 2 == 0) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; v += 2) To::store_two(to + v * kWidth, whole[v], whole[v + 1]);
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) To::store(to + v * kWidth, whole[v]);
  }
}

}  // namespace rootgraft
