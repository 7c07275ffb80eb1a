// y = x W^T + b, with W laid out once in panels of 16 output columns: [N / 16][K / per word][16 words].
#include <algorithm>

#include "parallel.h"
#include "tile.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // multiplications below which one thread is faster

// The call, as the caller packs it: fields of 8 bytes in this order.
struct Linear {
  const uint32_t* x;       // [rows][steps] words
  const uint32_t* panels;  // [ceil(columns / 16)][steps][16] words
  const void* bias;        // [columns] or null
  void* out;               // [rows][columns]
  int64_t rows, columns, steps, is_bf16, threads;
};

struct PackLinear {
  const uint32_t* weight;  // [columns][steps] words
  uint32_t* panels;        // [ceil(columns / 16)][steps][16] words, zero past the last column
  int64_t columns, steps, threads;
};

// Rounds a tile of sums into the output.
template <class E>
void store_tile(const Linear& op, const float* sums, int64_t row, int rows, int64_t column, int columns) {
  using Value = typename E::Value;
  const Value* bias = static_cast<const Value*>(op.bias);
  for (int m = 0; m < rows; m++, sums += kTilePanels * kWidth) {
    Value* out = static_cast<Value*>(op.out) + (row + m) * op.columns + column;
    int i = 0;
    for (; i + kWidth <= columns; i += kWidth) {
      const Floats sum = load(sums + i);
      E::store(out + i, bias ? sum + E::load(bias + column + i) : sum);
    }
    for (; i < columns; i++) out[i] = E::narrow(bias ? sums[i] + E::widen(bias[column + i]) : sums[i]);
  }
}

// Rows [row, row_end) times panels [panel, panel_end). Where several tiles of rows use the same panels, they share the
// asking for the next ones: memory then works while the registers do. (One tile of rows only reads, and the caches'
// own prefetchers do better.)
template <class E>
void multiply_block(const Linear& op, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
  const int64_t panel_size = op.steps * kWidth, row_count = row_end - row;
  float sums[kTileRows * kTilePanels * kWidth];
  for_tiles((int)row_count, (int)(panel_end - panel), [&](int m, int rows, int p, int panels) {
    const int64_t next = panel + p + panels;
    const int64_t lines = row_count > kTileRows ? std::min<int64_t>(kTilePanels, panel_end - next) * op.steps : 0;
    const int64_t from = lines * m / row_count, to = lines * (m + rows) / row_count;
    multiply_tile<E>({op.x + (row + m) * op.steps, op.steps, op.panels + (panel + p) * panel_size, panel_size, op.steps,
                      sums, kTilePanels * kWidth, nullptr, op.panels + next * panel_size + from * kWidth, to - from},
                     rows, panels);
    const int64_t column = (panel + p) * kWidth;
    store_tile<E>(op, sums, row + m, rows, column, (int)std::min<int64_t>(panels * kWidth, op.columns - column));
  });
}

template <class E>
void run(const Linear& op) {
  const int64_t panels = (op.columns + kWidth - 1) / kWidth;
  const int64_t multiplications = op.rows * op.steps * panels * kWidth;
  parallel(multiplications < kSmall ? 1 : (int)op.threads, [&](int thread, int count) {
    // Few panels and many rows on many threads: cut the rows too.
    const int64_t wanted = 2 * count / std::max<int64_t>(1, panels / kTilePanels);
    const int64_t row_cuts = std::max<int64_t>(1, std::min<int64_t>(op.rows / 48, wanted));
    const int64_t tasks = row_cuts * count;
    for (int64_t task = thread; task < tasks; task += count) {
      const int64_t cut = task / count, slice = task % count;
      multiply_block<E>(op, op.rows * cut / row_cuts, op.rows * (cut + 1) / row_cuts, panels * slice / count,
                  panels * (slice + 1) / count);
    }
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int pack_linear(const PackLinear* op) {
  const int64_t count = (op->columns + kWidth - 1) / kWidth;
  parallel((int)op->threads, [&](int thread, int team) {
    for (int64_t panel = count * thread / team; panel < count * (thread + 1) / team; panel++) {
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

extern "C" int linear(const Linear* op) {
  if (op->is_bf16) run<Bf16>(*op);
  else run<Fp32>(*op);
  return 0;
}

extern "C" int64_t linear_size() { return sizeof(Linear); }
