// The inner loop of products of bytes with a scale for each row, one instance for each shape of tile.
#include "int8/int8_tile.h"

#include "gemm/tile.h"

namespace rootgraft {
namespace {

constexpr ptrdiff_t kBurstWords = 16;  // words that are multiplied between two bursts of prefetches

template <class To, int MR, int NV>
void run_tile(const ChannelProduct& product) {
  const ChannelProduct p = product;  // a local copy, which no store can change
  const ptrdiff_t bursts = (p.words + kBurstWords - 1) / kBurstWords, burst = (p.ahead_lines + bursts - 1) / bursts;
  const uint32_t *line = p.ahead, *end_line = p.ahead + p.ahead_lines * kWidth;
  Ints sums[MR][NV];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sums[m][v] = broadcast_int(p.row[m].start_low);
  }
  for (ptrdiff_t first = 0; first < p.words; first += kBurstWords) {
    for (ptrdiff_t i = 0; i < burst && line < end_line; i++, line += kWidth) __builtin_prefetch(line, 0, 2);
    const ptrdiff_t end = first + kBurstWords < p.words ? first + kBurstWords : p.words;
#pragma GCC unroll 4
    for (ptrdiff_t i = first; i < end; i++) {
      Words column[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) column[v] = load_words(p.b + v * p.b_stride + i * kWidth);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        const Words row = broadcast_word(p.a[m * p.a_stride + i]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) sums[m][v] = dot_biased(column[v], row, sums[m][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) finish_row<To>(p, m, sums[m]);
}

}  // namespace

void multiply_channel_tile(const ChannelProduct& product, int rows, int panels) {
  with_constant<kChannelRows>(rows, [&](auto mr) {
    with_constant<kChannelPanels>(panels, [&](auto nv) {
      with_types([&](auto to) { run_tile<decltype(to), mr.value, nv.value>(product); }, product.c.is_bf16);
    });
  });
}

}  // namespace rootgraft
