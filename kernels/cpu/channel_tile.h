// Products of a few rows of bytes with panels of bytes, where each row and each column has one scale.
//
//   A        rows of words of four signed bytes along K
//   B panel  [words][16 columns] of bytes stored + 128; panels lie b_stride words apart
//   C        rows of fp32, columns in the order of the panels
//
// Sums are exact, as integers.
#pragma once

#include "bytes.h"

namespace rootgraft {

struct ChannelProduct {
  const uint32_t* a;
  ptrdiff_t a_stride;    // words
  const float* a_scale;  // [rows]
  const int32_t* start;  // [rows]: kBiasedStart times the sum of the bytes
  const uint32_t* b;
  ptrdiff_t b_stride;    // words from panel to panel
  const float* b_scale;  // [panels][16]
  ptrdiff_t words;       // along K
  float* c;
  ptrdiff_t c_stride;    // floats
};

#if defined(__AVX512F__)
constexpr int kChannelRows = 6, kChannelPanels = 3;
#else
constexpr int kChannelRows = 4, kChannelPanels = 1;
#endif

// One tile, rows <= kChannelRows and panels <= kChannelPanels.
void multiply_channel_tile(const ChannelProduct& product, int rows, int panels);

}  // namespace rootgraft
