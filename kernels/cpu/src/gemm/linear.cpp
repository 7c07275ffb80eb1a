// y = x W^T + b, with W packed once in panels of 16 output columns: [N / 16][K / per word][16 words].
#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "simd/partition.h"
#include "gemm/deep_product.h"
#include "gemm/epilogue.h"
#include "gemm/linear.h"
#include "simd/parallel.h"
#include "gemm/tile_amx.h"
#include "gemm/tile_fma.h"

namespace rootgraft {
namespace {

constexpr int kNoMemory = 2;

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct PackLinear {
  const uint32_t* weight;  // [columns][steps] words
  uint32_t* panels;        // [ceil(columns / 16)][steps][16] words, zero after the last column
  int64_t columns, steps, threads;
};

// Several tiles of rows that use the same panels share the prefetch of the next ones, so that reading memory overlaps
// with computation. A single tile reads each panel once, and the hardware's prefetchers are better at that.
template <class E, class Out>
void multiply_block(const Linear& op, const ProductPart& part, Out& out) {
  const int64_t panel_size = op.steps * kWidth, row_count = part.row_count();
  float room[kTileRows * kRoomStride];
  for_tiles(part.row_count(), part.panel_count(), [&](int m, int rows, int p, int panels) {
    const TileSpan tile = {part.row + m, part.panel + p, rows, panels};
    const int64_t next = tile.panel + panels;
    const int64_t lines = row_count > kTileRows ? std::min<int64_t>(kTilePanels, part.panel_end - next) * op.steps : 0;
    const int64_t from = lines * m / row_count, to = lines * (m + rows) / row_count;
    multiply_tile<E>({op.x + tile.row * op.steps, op.steps, op.panels + tile.panel * panel_size, panel_size, op.steps,
                      out.place(room, tile), nullptr, op.panels + next * panel_size + from * kWidth, to - from},
                     rows, panels);
    out.take(part.index, room, tile);
  });
}

#if ROOTGRAFT_AMX
// Likewise by AMX, slice by slice, while the panels of the next slice are prefetched. Few rows use each panel once.
template <class Out>
void multiply_block_amx(const Linear& op, const Cuts& cuts, int64_t index, Out& out) {
  constexpr int64_t kLeastSlice = 4;  // smallest number of panels of a slice
  const ProductPart part = cuts.part(index);
  const int64_t panel_size = op.steps * kWidth;
  const auto streams = [&](int64_t first, int64_t end) {
    return Streams({op.panels + first * panel_size, (end - first) * op.steps});
  };
  const AmxScope scope(amx_shapes(amx_rows(part.row_count()), kAmxWords));
  alignas(64) float room[kMostAmxRows * kRoomStride];
  const AmxReuse reuse = reuse_of(part.row_count(), op.steps);
  AmxEpilogue<RoundedRows> epilogue;
  const TileRows whole = out.place(room, {part.row, part.panel, part.row_count(), part.panel_count()});
  const int some = part.row_count() > kAmxRows ? 2 : kAmxPanels;
  const int most = whole.is_bf16 && reuse == AmxReuse::kSecondCache ? kAmxGroup : some;
  for_amx_slices(cuts, index, op.steps, 2, [&](const PartSlice& slice) {
    for_amx_tiles(part.row_count(), slice.part.panel_count(), [&](int m, const AmxRows& rows, int p, int panels) {
      const TileSpan tile = {part.row + m, slice.part.panel + p, rows.all(), panels};
      Product product = {op.x + tile.row * op.steps, op.steps, op.panels + tile.panel * panel_size, panel_size,
                         op.steps, out.place(room, tile), nullptr};
      if (part.row_count() > kAmxRows) product.ask_for(slice.due(streams, tile));
      if (product.c.is_bf16) multiply_amx(product, rows, panels, reuse, epilogue);
      else multiply_amx<AmxWords::kBf16>(product, rows, panels, reuse);
      out.take(part.index, room, tile);
    }, most);
  }, kLeastSlice);
}
#endif

#if ROOTGRAFT_AMX
// Likewise in blocks along K. Returns false if there is no memory for the sums.
template <class Out>
bool multiply_block_deep(const Linear& op, const DeepRows& x, const Cuts& cuts, int64_t index, Out& out) {
  AmxEpilogue<RoundedRows> epilogue;
  return multiply_deep_amx(op, x, cuts, index, [&](Product& product, const DeepTile& deep) {
    auto* room = static_cast<float*>(deep.room);
    product.c = out.place(room, deep.tile);
    if (product.c.is_bf16) multiply_amx(product, deep.rows, deep.tile.panels, deep.reuse(), epilogue);
    else multiply_amx<AmxWords::kBf16>(product, deep.rows, deep.tile.panels, deep.reuse());
    out.take(index, room, deep.tile);
  });
}
#endif

#if ROOTGRAFT_FMA
// Rows and panels that are widened to fp32 for a part, in memory that the thread keeps.
struct WidenedOperands {
  explicit WidenedOperands(int64_t steps) : row(fma_row_floats(steps)), panel(steps * Bf16::kPerWord * kWidth) {
    const size_t lines = (most_rows() * row + kMostPanels * panel) / kWidth;
    if (memory.size() < lines) memory.resize(lines);
  }

  int64_t most_rows() const { return std::max<int64_t>(kFloats / row, kFmaRows); }
  float* rows_at(int64_t i) const { return memory.data()->floats + i * row; }
  float* panels() const { return rows_at(most_rows()); }

  const int64_t row, panel;  // floats, in whole cache lines

 private:
  static constexpr int64_t kFloats = 64 << 10;  // floats of rows that fit in a core's second cache
  static constexpr int kMostPanels = kWidensPanels ? fma_panels(kFmaRows) : 0;

  // A cache line. Aligned, so that no load of a panel crosses two lines.
  struct alignas(64) Line {
    float floats[kWidth];
  };
  static thread_local inline std::vector<Line> memory;
};

// Likewise for bf16 by fp32 multiply-adds: as many rows as fit are widened and multiplied, then the next ones. Returns
// false if there is not enough memory.
template <class Out>
bool multiply_block_fma(const Linear& op, const ProductPart& part, Out& out) try {
  const WidenedOperands wide(op.steps);
  const int64_t panel_size = op.steps * kWidth, rows = part.row_count();
  const int64_t blocks = (rows + wide.most_rows() - 1) / wide.most_rows();
  float room[kFmaRows * kRoomStride];
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t first = rows * block / blocks;
    const int count = (int)(rows * (block + 1) / blocks - first);
    const bool is_first = block == 0 && count > kFmaRows, widens = kWidensPanels && count > kFmaRows;
    lay_out_fma_rows(op.x + (part.row + first) * op.steps, op.steps, count, wide.rows_at(0));
    for_fma_tiles(count, part.panel_count(), [&](int m, int tile_rows, int p, int panels) {
      const TileSpan tile = {part.row + first + m, part.panel + p, tile_rows, panels};
      const uint32_t* words = op.panels + tile.panel * panel_size;
      for (int i = 0; widens && m == 0 && i < panels; i++) {
        widen_panel(words + i * panel_size, op.steps, wide.panels() + i * wide.panel);
      }
      const int64_t next = tile.panel + panels;
      const int64_t lines = is_first ? std::min<int64_t>(panels, part.panel_end - next) * op.steps : 0;
      const int64_t from = lines * m / count, to = lines * (m + tile_rows) / count;
      Product product = {reinterpret_cast<const uint32_t*>(wide.rows_at(m)), 0, words, panel_size, op.steps,
                         out.place(room, tile), nullptr, op.panels + next * panel_size + from * kWidth, to - from};
      if (widens) {
        product.b = reinterpret_cast<const uint32_t*>(wide.panels()), product.b_stride = wide.panel;
        multiply_fma<Fp32>(product, tile_rows, panels);
      } else {
        multiply_fma<Bf16>(product, tile_rows, panels);
      }
      out.take(part.index, room, tile);
    });
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}
#endif

template <class E, class Out>
void run(const Linear& op) {
  if (!op.rows) return;
  constexpr bool kByFma = ROOTGRAFT_FMA && E::kPerWord == Bf16::kPerWord;
  const int64_t multiplications = op.rows * op.steps * op.columns;
  const bool by_amx = E::kPerWord == Bf16::kPerWord && takes_amx(op.steps), is_deep = by_amx && takes_deep(op);
  const Slicing slicing = {op.steps, 1, by_amx && !is_deep, is_deep ? kDeepPanels : 0,
                           by_amx ? most_amx_rows(op.steps, is_deep) : 0};
  const Cuts cuts(threads_for(multiplications, kSmallProduct, op.threads), op.rows, op.columns, 1,
                  kByFma ? kFmaRows : kTileRows, by_amx ? kManyAmxRows : kManyProductRows, slicing);
  Out out(op, cuts.count());
  std::atomic<bool> has_memory{true};
  const DeepRows x = is_deep ? deep_rows(op, cuts.threads) : DeepRows{};
  parallel_shares(cuts.threads, cuts.count(), [&](int64_t i) {
#if ROOTGRAFT_AMX
    if (is_deep && multiply_block_deep(op, x, cuts, i, out)) return;
    if (by_amx) return multiply_block_amx(op, cuts, i, out);
#endif
#if ROOTGRAFT_FMA
    if constexpr (kByFma) {
      if (cuts.part(i).row_count() >= kLeastFmaRows) {
        if (!multiply_block_fma(op, cuts.part(i), out)) has_memory = false;
        return;
      }
    }
#endif
    multiply_block<E>(op, cuts.part(i), out);
  });
  out.finish();
  if (!has_memory) throw std::bad_alloc();
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
