// Products of a few rows of bytes with panels of bytes, where each column has one scale, and so has each row.
//
//   A        rows as int8_rows.h makes them: words of four signed bytes along K, and words of outliers
//   B panel  [words][16 columns] of bytes stored + 128; panels lie b_stride words apart
//   C        rows of fp32 or bf16, columns in the order of the panels
//
// Sums are exact integers, so that their bits do not depend on how they are made.
#pragma once

#include "int8/int8_rows.h"
#include "gemm/tile_amx.h"
#include "gemm/tile_rows.h"

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
  const uint32_t* ahead;
  ptrdiff_t ahead_lines;  // of 64 bytes
};

#if defined(__AVX512F__)
constexpr int kChannelRows = 6, kChannelPanels = 4;  // 24 of 32 registers hold sums
#else
constexpr int kChannelRows = 6, kChannelPanels = 1;  // 12 of 16 (AVX2)
#endif

// One tile, rows <= kChannelRows and panels <= kChannelPanels.
void multiply_channel_tile(const ChannelProduct& product, int rows, int panels);

#if ROOTGRAFT_AMX
// The same to the bit where words fill AMX's registers; in an AmxScope of amx_shapes(rows, kAmxWords).
void multiply_channel_amx(const ChannelProduct& product, const AmxRows& rows, int panels);
#endif

// Row m of C, of sums of the low bytes and of the outliers.
template <class To, int NV>
INLINE void finish_row(const ChannelProduct& p, int m, const Ints (&low)[NV]) {
  const ChannelRow& row = p.row[m];
  Floats whole[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) whole[v] = to_floats(low[v]);
  if (row.outliers) {
    Ints high[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) high[v] = broadcast_int(row.start_high);
    const OutlierWord* word = p.outliers + m * p.outlier_stride;
    for (const OutlierWord* end = word + row.outliers; word < end; word++) {
      const Words bytes = broadcast_word(word->high);
      const uint32_t* b = p.b + word->at * kWidth;
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) high[v] = dot_biased(load_words(b + v * p.b_stride), bytes, high[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) whole[v] = fma(to_floats(high[v]), broadcast(1 << kPlaneBits), whole[v]);
  }
  auto* to = static_cast<typename To::Value*>(p.c.first) + m * p.c.stride;
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) {
    To::store(to + v * kWidth, whole[v] * broadcast(row.scale) * load(p.b_scale + v * kWidth));
  }
}

}  // namespace rootgraft
