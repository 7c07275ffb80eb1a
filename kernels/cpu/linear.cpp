// y = x W^T + b, with W laid out once in panels of 16 output columns: [N / 16][K / per word][16 words].
#include <algorithm>
#include <new>

#include "linear_out.h"
#include "parallel.h"
#include "tile_amx.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // multiplications below which one thread is faster
constexpr int kNoMemory = 2;
constexpr int64_t kSlicePanels = 16;         // at least in a slice, where several are cut for a thread
constexpr int64_t kMostSlices = 8;           // for each thread

// The call, as the caller packs it: fields of 8 bytes in this order.
struct Linear {
  const uint32_t* x;       // [rows][steps] words
  const uint32_t* panels;  // [ceil(columns / 16)][steps][16] words
  const void* bias;        // [columns] or null
  void* out;               // [rows][columns], of x's type or fp32; or [rows] fp32, the largest of each row
  int64_t* at;             // null, or the columns of the largest
  int64_t rows, columns, steps, is_bf16, out_is_bf16, threads;
};

struct PackLinear {
  const uint32_t* weight;  // [columns][steps] words
  uint32_t* panels;        // [ceil(columns / 16)][steps][16] words, zero past the last column
  int64_t columns, steps, threads;
};

// Rows [row, row_end) times panels [panel, panel_end). Where several tiles of rows use the same panels, they share the
// asking for the next ones: memory then works while the registers do. (One tile of rows only reads, and the caches'
// own prefetchers do better.)
template <class E, class Out>
void multiply_block(const Linear& op, int64_t part, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end,
                    Out& out) {
  const int64_t panel_size = op.steps * kWidth, row_count = row_end - row;
  float room[kTileRows * kRoomStride];
  for_tiles((int)row_count, (int)(panel_end - panel), [&](int m, int rows, int p, int panels) {
    const int64_t next = panel + p + panels;
    const int64_t lines = row_count > kTileRows ? std::min<int64_t>(kTilePanels, panel_end - next) * op.steps : 0;
    const int64_t from = lines * m / row_count, to = lines * (m + rows) / row_count;
    const TileSpan tile = {row + m, panel + p, rows, panels};
    multiply_tile<E>({op.x + tile.row * op.steps, op.steps, op.panels + tile.panel * panel_size, panel_size, op.steps,
                      out.place(room, tile), nullptr, op.panels + next * panel_size + from * kWidth, to - from},
                     rows, panels);
    out.take(part, room, tile);
  });
}

#if ROOTGRAFT_AMX
// The same by AMX. The first rows fetch the panels for all.
template <class Out>
void multiply_block_amx(const Linear& op, int64_t part, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end,
                        Out& out) {
  const int64_t panel_size = op.steps * kWidth;
  const int row_count = (int)(row_end - row);
  const AmxScope scope(amx_shapes(amx_rows(row_count), kAmxWords));
  alignas(64) float room[kMostAmxRows * kRoomStride];
  for_amx_tiles(row_count, (int)(panel_end - panel), [&](int m, const AmxRows& rows, int p, int panels) {
    const TileSpan tile = {row + m, panel + p, rows.all(), panels};
    const int64_t next = tile.panel + panels, more = std::min<int64_t>(panels, panel_end - next);
    const int64_t lines = m == 0 ? more * op.steps : 0;
    multiply_amx<AmxWords::kBf16>(
        {op.x + tile.row * op.steps, op.steps, op.panels + tile.panel * panel_size, panel_size, op.steps,
         out.place(room, tile), nullptr, op.panels + next * panel_size, lines},
        rows, panels);
    out.take(part, room, tile);
  });
}
#endif

template <class E, class Out>
void run(const Linear& op) {
  if (!op.rows) return;
  const int64_t panels = (op.columns + kWidth - 1) / kWidth;
  const int64_t multiplications = op.rows * op.steps * panels * kWidth;
  const int threads = multiplications < kSmall ? 1 : (int)op.threads;
  // The more slices, the shorter the wait for a thread that came late or lost its core; but each starts with cold
  // caches, and a product with one tile of rows only streams the panels, which is fastest in one piece.
  const int64_t each = op.rows <= kTileRows ? 1 : panels / (kSlicePanels * threads);
  const int64_t slices = threads == 1 ? 1 : threads * std::clamp<int64_t>(each, 1, kMostSlices);
  // Few panels and many rows on many threads: cut the rows too.
  const int64_t wanted = 2 * threads / std::max<int64_t>(1, panels / kTilePanels);
  const int64_t row_cuts = std::max<int64_t>(1, std::min<int64_t>(op.rows / 48, wanted));
  Out out(op, row_cuts * slices);
  parallel_items(threads, row_cuts * slices, [&](int64_t item) {
    const int64_t cut = item / slices, slice = item % slices;
    const int64_t row = op.rows * cut / row_cuts, row_end = op.rows * (cut + 1) / row_cuts;
    const int64_t panel = panels * slice / slices, panel_end = panels * (slice + 1) / slices;
#if ROOTGRAFT_AMX
    if (E::kPerWord == Bf16::kPerWord && takes_amx(op.steps)) {
      return multiply_block_amx(op, item, row, row_end, panel, panel_end, out);
    }
#endif
    multiply_block<E>(op, item, row, row_end, panel, panel_end, out);
  });
  out.finish();
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int pack_linear(const PackLinear* op) {
  const int64_t count = (op->columns + kWidth - 1) / kWidth;
  parallel_ranges((int)op->threads, count, [&](int64_t panel, int64_t end) {
    for (; panel < end; panel++) {
      const uint32_t* rows[kWidth];
      for (int i = 0; i < kWidth; i++) {
        rows[i] = op->weight + std::min(panel * kWidth + i, op->columns - 1) * op->steps;
      }
      uint32_t* out = op->panels + panel * op->steps * kWidth;
      transpose_rows(rows, (int)op->steps, out);
      for (int64_t i = op->columns - panel * kWidth; i < kWidth; i++) {
        for (int64_t k = 0; k < op->steps; k++) out[k * kWidth + i] = 0;
      }
    }
  });
  return 0;
}

extern "C" int64_t pack_linear_size() { return sizeof(PackLinear); }

extern "C" int linear(const Linear* op) try {
  with_types([&](auto element, auto to) {
    using E = decltype(element);
    if (op->at) run<E, Searched<E>>(*op);
    else run<E, Stored<E, decltype(to)>>(*op);
  }, op->is_bf16, op->out_is_bf16);
  return 0;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

extern "C" int64_t linear_size() { return sizeof(Linear); }
