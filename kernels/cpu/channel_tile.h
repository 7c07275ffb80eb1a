// Products of a few rows of bytes with panels of bytes, where each column has one scale, and each row one for every
// group of 64 values: a few large values then cost no more than their group its small ones.
//
//   A        rows of words of four signed bytes along K
//   B panel  [words][16 columns] of bytes stored + 128; panels lie b_stride words apart
//   C        rows of fp32 or bf16, columns in the order of the panels
//
// A group's products are summed exactly, as integers; groups are added in order, in fp32.
#pragma once

#include "amx.h"
#include "bytes.h"
#include "tile_rows.h"

namespace rootgraft {

constexpr int kGroupValues = 64;  // along K
constexpr int kGroupWords = kGroupValues / kWordBytes;

// Of a group of a row of A.
struct ChannelGroup {
  float scale;
  int32_t start;  // kBiasedStart times the sum of the bytes
};

struct ChannelProduct {
  const uint32_t* a;
  ptrdiff_t a_stride;         // words
  const ChannelGroup* group;  // [groups][group_rows]: those of neighbouring rows lie side by side
  ptrdiff_t group_rows;
  const uint32_t* b;
  ptrdiff_t b_stride;    // words from panel to panel
  const float* b_scale;  // [panels][16]
  ptrdiff_t words;       // along K
  TileRows c;
  // Memory to ask for while this runs, for a product soon to come.
  const uint32_t* ahead;
  ptrdiff_t ahead_lines;  // of 64 bytes

  ptrdiff_t groups() const { return (words + kGroupWords - 1) / kGroupWords; }
};

#if defined(__AVX512F__)
constexpr int kChannelRows = 6, kChannelPanels = 2;  // 24 of 32 registers hold sums
#else
constexpr int kChannelRows = 3, kChannelPanels = 1;  // 12 of 16 (AVX2)
#endif

// One tile, rows <= kChannelRows and panels <= kChannelPanels.
void multiply_channel_tile(const ChannelProduct& product, int rows, int panels);

#if ROOTGRAFT_AMX
// The same to the bit for whole groups, rows <= kAmxRows, panels side by side; in an AmxScope of the shapes for the rows.
void multiply_channel_amx(const ChannelProduct& product, int rows, int panels);
AmxShapes channel_shapes(int rows);
constexpr int kAmxPanels = 2;  // of a tile
#endif

}  // namespace rootgraft
