// The inner loop of products of bytes with a scale for each row, one instance for each shape of tile.
#include "channel_tile.h"

#include "tile.h"

namespace rootgraft {
namespace {

template <int MR, int NV>
void run_tile(const ChannelProduct& product) {
  const ChannelProduct p = product;  // where no store can change it
  const ptrdiff_t groups = p.groups(), burst = (p.ahead_lines + groups - 1) / groups;
  const uint32_t *line = p.ahead, *end_line = p.ahead + p.ahead_lines * kWidth;
  Floats sums[MR][NV];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sums[m][v] = broadcast(0.0f);
  }
  for (ptrdiff_t g = 0; g < groups; g++) {
    for (ptrdiff_t i = 0; i < burst && line < end_line; i++, line += kWidth) __builtin_prefetch(line, 0, 2);
    const ptrdiff_t first = g * kGroupWords, end = first + kGroupWords < p.words ? first + kGroupWords : p.words;
    Ints dots[MR][NV];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) dots[m][v] = broadcast_int(p.group[g * p.group_rows + m].start);
    }
#pragma GCC unroll 4
    for (ptrdiff_t i = first; i < end; i++) {
      Words column[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) column[v] = load_words(p.b + v * p.b_stride + i * kWidth);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        const Words row = broadcast_word(p.a[m * p.a_stride + i]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) dots[m][v] = dot_biased(column[v], row, dots[m][v]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      const Floats scale = broadcast(p.group[g * p.group_rows + m].scale);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) sums[m][v] = fma(to_floats(dots[m][v]), scale, sums[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sums[m][v] = sums[m][v] * load(p.b_scale + v * kWidth);
  }
  p.c.store(sums);
}

}  // namespace

void multiply_channel_tile(const ChannelProduct& product, int rows, int panels) {
  with_constant<kChannelRows>(rows, [&](auto mr) {
    with_constant<kChannelPanels>(panels, [&](auto nv) { run_tile<mr.value, nv.value>(product); });
  });
}

}  // namespace rootgraft
