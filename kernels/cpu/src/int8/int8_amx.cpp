// Products of bytes with a scale for each row, by AMX.
#include "int8/int8_tile.h"
#include "gemm/tile.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

template <class To, int P>
void run(const ChannelProduct& product, const AmxRows& rows) {
  const ChannelProduct p = product;  // where no store can change it
  constexpr int kStride = P * kWidth;
  alignas(64) int32_t sums[kMostAmxRows * kStride];
  multiply_amx<AmxWords::kBytes>(
      {p.a, p.a_stride, p.b, p.b_stride, p.words, {sums, kStride}, nullptr, p.ahead, p.ahead_lines}, rows, P);
  for (int m = 0; m < rows.all(); m++) {
    Ints low[P];
    for (int v = 0; v < P; v++) {
      low[v] = load_ints(sums + m * kStride + v * kWidth) + broadcast_int(p.row[m].start_low);
    }
    finish_row<To>(p, m, low);
  }
}

}  // namespace

void multiply_channel_amx(const ChannelProduct& product, const AmxRows& rows, int panels) {
  with_constant<kAmxPanels>(panels, [&](auto count) {
    with_types([&](auto to) { run<decltype(to), count.value>(product, rows); }, product.c.is_bf16);
  });
}

}  // namespace rootgraft

#endif
