// Position and target of a tile of sums.
#pragma once

#include "simd/simd.h"

namespace rootgraft {

// A tile of sums: its first row and panel, and its number of rows and panels.
struct TileSpan {
  int64_t row, panel;
  int rows, panels;
};

struct TileRows {
  void* first;       // the tile's first element
  ptrdiff_t stride;  // elements from row to row
  bool is_bf16 = false;

  // The same rows, `columns` columns further to the right.
  TileRows right(ptrdiff_t columns) const {
    return {static_cast<char*>(first) + columns * (is_bf16 ? sizeof(uint16_t) : sizeof(float)), stride, is_bf16};
  }

  template <int MR, int NV>
  INLINE void store(const Floats (&sums)[MR][NV]) const {
    if (is_bf16) store_as<Bf16>(sums);
    else store_as<Fp32>(sums);
  }

 private:
  template <class To, int MR, int NV>
  INLINE void store_as(const Floats (&sums)[MR][NV]) const {
    auto* to = static_cast<typename To::Value*>(first);
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) To::store(to + m * stride + v * kWidth, sums[m][v]);
    }
  }
};

}  // namespace rootgraft
