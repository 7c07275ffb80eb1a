// The inner loop of products of bytes with a scale for each row, one instance for each shape of tile.
#include "channel_tile.h"

#include "tile.h"

namespace rootgraft {
namespace {

template <int MR, int NV>
void run_tile(const ChannelProduct& p) {
  Ints sums[MR][NV];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sums[m][v] = broadcast_int(p.start[m]);
  }
  const uint32_t *a = p.a, *b = p.b;
  const ptrdiff_t a_stride = p.a_stride, b_stride = p.b_stride, words = p.words;
#pragma GCC unroll 8
  for (ptrdiff_t i = 0; i < words; i++) {
    Words column[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) column[v] = load_words(b + v * b_stride + i * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      const Words row = broadcast_word(a[m * a_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) sums[m][v] = dot_biased(column[v], row, sums[m][v]);
    }
  }
  for (int m = 0; m < MR; m++) {
    for (int v = 0; v < NV; v++) {
      const Floats scale = load(p.b_scale + v * kWidth) * broadcast(p.a_scale[m]);
      store(p.c + m * p.c_stride + v * kWidth, to_floats(sums[m][v]) * scale);
    }
  }
}

}  // namespace

void multiply_channel_tile(const ChannelProduct& product, int rows, int panels) {
  with_constant<kChannelRows>(rows, [&](auto mr) {
    with_constant<kChannelPanels>(panels, [&](auto nv) { run_tile<mr.value, nv.value>(product); });
  });
}

}  // namespace rootgraft
