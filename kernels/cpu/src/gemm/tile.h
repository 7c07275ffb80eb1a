// Tile product: a few rows of A times panels of B, the inner loop of all linear ops; and packing of panels.
//
//   A        rows of words, any row stride                        (a word: one fp32 or a pair of bf16 along K)
//   B panel  [steps][16 words]: 16 columns side by side, K downwards; panels start b_stride words apart
//   C        rows of fp32 or bf16, columns in the order of the panels
//
// A sum is added up over K in order, separately from all others, however the product is cut into tiles. So its bits
// depend only on its row of A and its column of B.
#pragma once

#include <type_traits>

#include "gemm/tile_rows.h"
#include "simd/partition.h"

namespace rootgraft {

struct Product {
  const uint32_t* a;
  ptrdiff_t a_stride;  // words
  const uint32_t* b;
  ptrdiff_t b_stride;  // words
  ptrdiff_t steps;     // words along K
  TileRows c;
  const float* c_scale;  // null: C = A B; otherwise, for each row of C in fp32: C = C * c_scale + A B
  // Memory to prefetch meanwhile, for a product that will follow soon.
  const uint32_t* ahead = nullptr;
  ptrdiff_t ahead_lines = 0;  // number of lines of 64 bytes
  // AMX: words from one of Streams to the next, with `ahead_lines` lines in each, and between their halves; 0: one run.
  ptrdiff_t ahead_stream = 0, ahead_apart = 0;
  // AMX: sums to which the product is added, in rows of fp32 start_stride apart; null: none.
  const float* start = nullptr;
  ptrdiff_t start_stride = 0;

  void ask_for(const Streams& lines) {
    ahead = lines.first, ahead_lines = lines.length, ahead_stream = lines.words, ahead_apart = lines.apart;
  }
};

// The largest tile. Its sums, one row of B and a word of A fill the registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTilePanels = 4;  // 24 of 32 registers hold sums
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTilePanels = 1;  // 12 of 16 registers
#elif defined(__aarch64__)
constexpr int kTileRows = 6, kTilePanels = 1;  // 24 of 32 registers
#else
constexpr int kTileRows = 3, kTilePanels = 1;  // 12 of 16 registers
#endif

// Computes one tile, rows <= kTileRows and panels <= kTilePanels. For Bf16 and Fp32.
template <class E>
void multiply_tile(const Product& product, int rows, int panels);

// Factors of the columns of a product for each group of K: C = sum over groups of (A B of the group) * factors.
struct GroupFactors {
  const float* first;  // [panels][groups][16], panels this far apart
  ptrdiff_t stride;
  ptrdiff_t steps;  // words along K of a group
  float unit;       // by which all factors are multiplied
};

// Likewise, into fp32 without c_scale.
template <class E>
void multiply_groups(const Product& product, const GroupFactors& factors, int rows, int panels);

template <int N>
using Constant = std::integral_constant<int, N>;

// Calls f(Constant<count>{}) for 1 <= count <= Most.
template <int Most, class F>
INLINE void with_constant(int count, F f) {
  if constexpr (Most > 1) {
    if (count < Most) return with_constant<Most - 1>(count, f);
  }
  f(Constant<Most>{});
}

// Calls f(first row, rows, first panel, panels) for tiles that cover rows x panels: all rows of some panels before the
// next panels. Both are cut evenly (8 rows into 4 + 4, not 6 + 2), because a small tile waits for its loads.
template <int kMostRows = kTileRows, int kMostPanels = kTilePanels, class F>
INLINE void for_tiles(int rows, int panels, F f) {
  const int row_cuts = (rows + kMostRows - 1) / kMostRows, panel_cuts = (panels + kMostPanels - 1) / kMostPanels;
  const auto edge = [](int count, int cut, int cuts) { return (int)((int64_t)count * cut / cuts); };
  for (int p = 0, panel = 0; p < panel_cuts; p++) {
    const int panel_end = edge(panels, p + 1, panel_cuts);
    for (int r = 0, row = 0; r < row_cuts; r++) {
      const int row_end = edge(rows, r + 1, row_cuts);
      f(row, row_end - row, panel, panel_end - panel);
      row = row_end;
    }
    panel = panel_end;
  }
}

// Multiplies any number of rows and panels into fp32.
template <class E>
INLINE void multiply(const Product& product, int rows, int panels) {
  for_tiles(rows, panels, [&](int row, int row_count, int panel, int panel_count) {
    Product tile = product;
    tile.a += row * product.a_stride;
    tile.b += panel * product.b_stride;
    tile.c.first = static_cast<float*>(product.c.first) + row * product.c.stride + panel * kWidth;
    if (product.c_scale) tile.c_scale += row;
    multiply_tile<E>(tile, row_count, panel_count);
  });
}

#if defined(__AVX512VL__)
constexpr int kColumns = 8;  // columns of a panel in registers

// columns[w] = word w of the 16 rows; row(i) is the address of a row. Words from `present` on are not read and are 0.
template <class Row>
INLINE void load_columns(Row row, Words columns[kColumns], int present = kColumns) {
  const __mmask8 mask = (__mmask8)((1u << present) - 1);
  const auto load = [&](int i) { return _mm256_maskz_loadu_epi32(mask, row(i)); };
  __m512i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {  // rows 0 .. 3 with 4 .. 7, 8 .. 11 with 12 .. 15
    const int low = i + (i & 4);
    a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load(low)), load(low + 4), 1);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  // Now the four 128-bit lanes of a[4 * g + c] hold words c and 4 + c of rows 8 * g .. 8 * g + 3, then those of the
  // next four rows.
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    columns[c].part[0] = (WordPart)_mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    columns[4 + c].part[0] = (WordPart)_mm512_shuffle_i32x4(a[c], a[4 + c], 0xDD);
  }
}
#endif

#if defined(__AVX2__) && !defined(__AVX512VL__)
// out[w * kWidth + r] = rows[r][first + w] for eight rows and words.
INLINE void transpose_eight(const uint32_t* const* rows, int first, uint32_t* out) {
  __m256i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) a[i] = load_as<__m256i>(rows[i] + first);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  // Now the two 128-bit lanes of a[4 * g + c] hold words c and 4 + c of rows 4 * g .. 4 * g + 3.
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  const auto put = [&](int word, const __m256i& value) { std::memcpy(out + word * kWidth, &value, sizeof(value)); };
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    put(c, _mm256_permute2x128_si256(a[c], a[4 + c], 0x20));
    put(4 + c, _mm256_permute2x128_si256(a[c], a[4 + c], 0x31));
  }
}
#endif

// out[w][r] = rows[r][w] for 16 rows of words: the rows become the 16 columns of a B panel.
INLINE void transpose_rows(const uint32_t* const rows[kWidth], int words, uint32_t* out) {
#if defined(__AVX512VL__)
  for (int first = 0; first < words; first += kColumns) {
    const int count = words - first < kColumns ? words - first : kColumns;
    Words columns[kColumns];
    load_columns([&](int i) { return rows[i] + first; }, columns, count);
    for (int i = 0; i < count; i++) store_words(out + (first + i) * kWidth, columns[i]);
  }
#else
  int first = 0;
#if defined(__AVX2__)
  for (; first + kLanes <= words; first += kLanes) {
    for (int half = 0; half < kParts; half++) {
      transpose_eight(rows + half * kLanes, first, out + first * kWidth + half * kLanes);
    }
  }
#endif
  for (int w = first; w < words; w++) {
    for (int r = 0; r < kWidth; r++) out[w * kWidth + r] = rows[r][w];
  }
#endif
}

}  // namespace rootgraft
