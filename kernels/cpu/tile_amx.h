// Products of rows of bf16 with panels of B by AMX: see tile.h. Sums of even and of odd K run apart and meet after every
// 32, so they have other bits than those of vectors; like them they depend on nothing but a row and a column.
#pragma once

#include "amx.h"
#include "tile.h"

#if ROOTGRAFT_AMX

namespace rootgraft {

// One or two tiles of rows. A tile has at most kAmxRows, and the second may begin within the first.
struct AmxRows {
  int count;   // of a tile
  int second;  // row at which the second begins, 0: there is none

  int all() const { return second + count; }
};

constexpr int kMostAmxRows = 2 * kAmxRows;  // of both

// A product without c_scale, whose steps are a multiple of kAmxWords; in an AmxScope of the shapes for such tiles.
void multiply_amx(const Product& product, const AmxRows& rows, int panels);
AmxShapes product_shapes(int rows);

// f(first row, rows) for pairs of equal tiles that cover so many rows.
template <class F>
INLINE void for_amx_rows(int count, F f) {
  const int tiles = (count + kAmxRows - 1) / kAmxRows, each = (count + tiles - 1) / tiles;
  const auto edge = [&](int tile) { return tile * each < count - each ? tile * each : count - each; };
  for (int tile = 0; tile < tiles; tile += 2) {
    const int row = edge(tile);
    f(row, AmxRows{each, tile + 1 < tiles ? edge(tile + 1) - row : 0});
  }
}

// Rows of a tile of for_amx_rows().
inline int amx_rows(int count) {
  const int tiles = (count + kAmxRows - 1) / kAmxRows;
  return (count + tiles - 1) / tiles;
}

}  // namespace rootgraft

#endif
