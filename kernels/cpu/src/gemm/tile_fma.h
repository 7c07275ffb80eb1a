// Tile products of bf16 by multiply-adds of fp32, for CPUs without an instruction for bf16, see tile.h.
//
// A is widened to fp32 once for all panels of a part. B is widened in registers, where one shift and one mask of its
// words serve all rows of a tile. With registers of 256 bits, tiles have few rows, so B is widened in memory if there
// are more rows than a tile has. The products are exact, and a sum is added up over K in order and separately from
// others. So its bits are those of multiply_tile<Bf16>.
//
//   A  tiles of rows, each [steps / kRunSteps][rows][kWidth] fp32: its rows are a constant distance apart
//   B  panels of words of bf16, or widened, [2 steps][kWidth] fp32
#pragma once

#include <algorithm>

#include "gemm/tile.h"

#define ROOTGRAFT_FMA !ROOTGRAFT_DOT_BF16

namespace rootgraft {

constexpr ptrdiff_t kRunSteps = kWidth / Bf16::kPerWord;  // steps for which A has one vector of each row

// The largest tile, and the number of rows from which such tiles are faster than those of multiply_tile<Bf16>. The more
// rows, the less widening for each product. Tiles of few rows have several panels, so that there are at least as many
// sums as multiply-adds are in flight at a time.
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

// Whether panels are widened in memory. With registers of 512 bits this made 128 rows slower (0.78 to 0.9 of the
// speed).
constexpr bool kWidensPanels = kParts > 1;

// Floats of a row of A.
inline ptrdiff_t fma_row_floats(ptrdiff_t steps) { return (steps + kRunSteps - 1) / kRunSteps * kWidth; }

// Lays out rows of words, which are one after another, for the tiles of for_fma_tiles(), tile by tile.
void lay_out_fma_rows(const uint32_t* words, ptrdiff_t steps, int rows, float* out);

// Widens a panel.
void widen_panel(const uint32_t* words, ptrdiff_t steps, float* out);

// Computes one tile into fp32 or bf16, with A laid out and without c_scale. B: Bf16, or Fp32 if panels are widened.
template <class B>
void multiply_fma(const Product& product, int rows, int panels);

// for_tiles() with the shapes of these tiles.
template <class F>
INLINE void for_fma_tiles(int rows, int panels, F f) {
  const int most = fma_panels(std::min(rows, kFmaRows));
  if (most == 4) for_tiles<kFmaRows, 4>(rows, panels, f);
  else if (most == 2) for_tiles<kFmaRows, 2>(rows, panels, f);
  else for_tiles<kFmaRows, 1>(rows, panels, f);
}

}  // namespace rootgraft
