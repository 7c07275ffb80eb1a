// Products of bytes with a scale for each row, by AMX: a group is one instruction, for sixteen rows and columns.
#include "amx.h"
#include "channel_tile.h"
#include "tile.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

static_assert(kGroupWords == kAmxWords);

constexpr int kAhead = 2;  // groups that are multiplied while the sums of one are taken
constexpr int kSums = 4;   // registers 0 .. 3, and rooms; then two each of rows and columns

// A group's exact sums, on their way through memory to the registers that scale them.
struct alignas(64) Room {
  int32_t sums[kAmxRows * kWidth];
};

template <int I>
INLINE void multiply_group(const uint32_t* a, ptrdiff_t a_stride, const uint32_t* b, Room& room) {
  constexpr int kRow = kSums + I % 2, kColumn = kRow + 2;
  amx_load<kRow>(a, a_stride * sizeof(uint32_t));
  amx_load<kColumn>(b, kWidth * sizeof(uint32_t));
  amx_zero<I>();
  amx_dot_signed_unsigned<I, kRow, kColumn>();
  amx_store<I>(room.sums, kWidth * sizeof(int32_t));
}

// Panels follow each other, and so do their groups.
template <int MR>
void run_tiles(const ChannelProduct& p, int panels) {
  const ptrdiff_t groups = p.groups(), steps = panels * groups, burst = (p.ahead_lines + steps - 1) / steps;
  const ptrdiff_t a_stride = p.a_stride;
  const uint32_t *a = p.a, *b = p.b, *line = p.ahead, *end_line = p.ahead + p.ahead_lines * kWidth;
  const ptrdiff_t group_rows = p.group_rows;
  const ChannelGroup* all = p.group;
  Room rooms[kSums];
  ptrdiff_t begun = 0, group_begun = 0;
  const auto begin = [&] {
    for (ptrdiff_t i = 0; i < burst && line < end_line; i++, line += kWidth) __builtin_prefetch(line, 0, 2);
    const uint32_t *rows = a + group_begun * kGroupWords, *columns = b + begun * kGroupWords * kWidth;
    switch (begun % kSums) {
      case 0: multiply_group<0>(rows, a_stride, columns, rooms[0]); break;
      case 1: multiply_group<1>(rows, a_stride, columns, rooms[1]); break;
      case 2: multiply_group<2>(rows, a_stride, columns, rooms[2]); break;
      case 3: multiply_group<3>(rows, a_stride, columns, rooms[3]); break;
    }
    begun++;
    if (++group_begun == groups) group_begun = 0;
  };
  while (begun < kAhead && begun < steps) begin();
  TileRows c = p.c;
  ptrdiff_t step = 0;
  for (int panel = 0; panel < panels; panel++) {
    Floats sums[MR][1];
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) sums[m][0] = broadcast(0.0f);
    for (ptrdiff_t g = 0; g < groups; g++, step++) {
      if (begun < steps) begin();
      const int32_t* dots = rooms[step % kSums].sums;
      const ChannelGroup* of_rows = all + g * group_rows;
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const Ints total = load_ints(dots + m * kWidth) + broadcast_int(of_rows[m].start);
        sums[m][0] = fma(to_floats(total), broadcast(of_rows[m].scale), sums[m][0]);
      }
    }
    const Floats scale = load(p.b_scale + panel * kWidth);
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) sums[m][0] = sums[m][0] * scale;
    c.store(sums);
    c = c.right(kWidth);
  }
}

}  // namespace

AmxShapes channel_shapes(int rows) {
  AmxShapes shapes;
  for (int i = 0; i < kSums; i++) shapes.set(i, rows, kWidth);
  for (int i = 0; i < 2; i++) {
    shapes.set(kSums + i, rows, kGroupWords);
    shapes.set(kSums + 2 + i, kGroupWords, kWidth);
  }
  return shapes;
}

void multiply_channel_amx(const ChannelProduct& product, int rows, int panels) {
  with_constant<kAmxRows>(rows, [&](auto mr) { run_tiles<mr.value>(product, panels); });
}

}  // namespace rootgraft

#endif
