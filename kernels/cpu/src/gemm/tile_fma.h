// Tile products of bf16 by multiply-adds of fp32, for CPUs without an instruction for bf16, see tile.h.
//
// A is widened to fp32 once for all panels of a part, B in registers, where a shift and a mask of its words serve all
// rows of a tile; with registers of 256 bits, whose tiles have few rows, in memory for more rows than a tile has. The products are exact, and a sum runs over K in order and
// alone, so its bits are those of multiply_tile<Bf16>.
//
//   A  tiles of rows, each [steps / kRunSteps][rows][kWidth] fp32: its rows are at constant distances
//   B  panels of words of bf16, or widened, [2 steps][kWidth] fp32
#pragma once

#include <algorithm>

#include "gemm/tile.h"

#define ROOTGRAFT_FMA !ROOTGRAFT_DOT_BF16

namespace rootgraft {

constexpr ptrdiff_t kRunSteps = kWidth / Bf16::kPerWord;  // steps for which A has a vector of each row

// The largest tile, and from how many rows on such tiles are faster than those of multiply_tile<Bf16>. The more rows, the
// less widening for a product; of few rows several panels, for as many sums at least as multiply-adds are under way at
// once.
#if defined(__AVX512F__)
constexpr int kFmaRows = 12, kLeastFmaRows = kTileRows + 1;
constexpr int fma_panels(int) { return 2; }
#elif defined(__AVX2__)
constexpr int kFmaRows = 6, kLeastFmaRows = 1;
constexpr int fma_panels(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#elif defined(__aarch64__)
constexpr int kFmaRows = 5, kLeastFmaRows = 1;
constexpr int fma_panels(int rows) { return rows == 1 ? 2 : 1; }
#else
constexpr int kFmaRows = 3, kLeastFmaRows = 1;
constexpr int fma_panels(int) { return 1; }
#endif

// Whether panels are widened in memory: with 512 bits that made 128 rows slower (0.78 to 0.9 of the speed).
constexpr bool kWidensPanels = kParts > 1;

// Floats of a row of A.
inline ptrdiff_t fma_row_floats(ptrdiff_t steps) { return (steps + kRunSteps - 1) / kRunSteps * kWidth; }

// Lays out rows of words that lie one after another, for the tiles of for_fma_tiles(): tile by tile.
void lay_out_fma_rows(const uint32_t* words, ptrdiff_t steps, int rows, float* out);

// Widens a panel.
void widen_panel(const uint32_t* words, ptrdiff_t steps, float* out);

// One tile into fp32 or bf16, its A laid out; without c_scale. B: Bf16, or Fp32 where panels are widened.
template <class B>
void multiply_fma(const Product& product, int rows, int panels);

// for_tiles() of these shapes.
template <class F>
INLINE void for_fma_tiles(int rows, int panels, F f) {
  const int most = fma_panels(std::min(rows, kFmaRows));
  if (most == 4) for_tiles<kFmaRows, 4>(rows, panels, f);
  else if (most == 2) for_tiles<kFmaRows, 2>(rows, panels, f);
  else for_tiles<kFmaRows, 1>(rows, panels, f);
}

}  // namespace rootgraft
