// Products of a few rows of bytes with panels of bytes. Each row and each column has one scale.
//
//   A        rows in the form of int8_rows.h: words of four signed bytes along K, and words of outliers
//   B panel  [words][16 columns] of bytes stored + 128; panels start b_stride words apart
//   C        rows of fp32 or bf16, columns in the order of the panels
//
// Sums are exact integers, so their bits do not depend on how they are computed.
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
  ptrdiff_t words;       // words along K
  TileRows c;
  // Memory to prefetch meanwhile, for a product that will follow soon.
  const uint32_t* ahead = nullptr;
  ptrdiff_t ahead_lines = 0;                    // number of lines of 64 bytes
  ptrdiff_t ahead_stream = 0, ahead_apart = 0;  // AMX: see Product
  int64_t gate = 0;     // see QuantisedLinear: every second panel then holds the factor of the gate in the panel before
  ptrdiff_t apart = 0;  // with a gate: panels from a panel of the gate to that of its factor
  bool passes_caches = false;  // AMX: whether C, in fp32 and whole cache lines, is stored past the caches

  void ask_for(const Lines& lines) { ahead = lines.first, ahead_lines = lines.count; }
  void ask_for(const Streams& lines) {
    ahead = lines.first, ahead_lines = lines.length, ahead_stream = lines.words, ahead_apart = lines.apart;
  }

  // The index of the panel at a place among the columns' panels, with or without a gate.
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

// Computes one tile, rows <= kChannelRows and panels <= kChannelPanels.
void multiply_channel_tile(const ChannelProduct& product, int rows, int panels);

// The sums of row m of C: those of the low bytes plus those of the outliers, scaled.
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

// Computes row m of C.
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
