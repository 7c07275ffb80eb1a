// Products of many rows with many words by AMX, in blocks along K. In each block, the rows of two tiles stay in the
// first cache while the panels are read from the second. All rows of a part are multiplied with a block of its panels,
// then with the panels' next words. Unfinished sums are kept in memory unrounded, so their bits are those of one
// product.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "gemm/epilogue.h"
#include "gemm/linear.h"
#include "gemm/tile_amx.h"
#include "simd/partition.h"

namespace rootgraft {

constexpr int64_t kDeepPanels = 16, kDeepPairs = 4;  // limit of panels of a part; with a gate, of pairs of panels
constexpr int64_t kDeepRows = 320;                   // limit of rows of a part

// Rows [rows][steps] of an op in bf16, or in blocks along K: [block][rows][words of the block].
struct DeepRows {
  const uint32_t* words;
  int64_t rows, steps;
  bool is_blocked = false;

  const uint32_t* at(int64_t row, int64_t step, int64_t count) const {
    return is_blocked ? words + rows * step + row * count : words + row * steps + step;
  }
  ptrdiff_t stride(int64_t count) const { return is_blocked ? count : steps; }
};

#if ROOTGRAFT_AMX

constexpr int64_t kDeepSteps = 256;                          // limit of the words of a block
// up to this many words, a product is as fast without blocks
constexpr int64_t kMostSteps = 1024, kMostGatedSteps = 512;

// Whether a product of this many rows and words is computed in blocks.
inline bool takes_deep(int64_t rows, int64_t steps, int64_t most = kMostSteps) {
  return takes_amx(steps) && rows >= kPartRows && steps > most;
}
inline bool takes_deep(const Linear& op) { return takes_deep(op.rows, op.steps); }
inline bool takes_deep(const GatedLinear& op) { return takes_deep(op.rows, op.steps, kMostGatedSteps); }

// Rows of a part: their words that are multiplied with a set of panels (those of a block, or all) fit in the second
// cache.
inline int64_t most_amx_rows(int64_t steps, bool is_deep) {
  constexpr int64_t kBytes = 1 << 20;
  return is_deep ? kDeepRows : std::max<int64_t>(kPartRows, kBytes / (steps * (int64_t)sizeof(uint32_t)));
}

// The panels of an op, with `steps` words along K, and the number of panels of a tile.
struct DeepPanels {
  const uint32_t* panels;
  int64_t steps;
  int tile_panels;  // largest number of panels of a tile
  int weights;      // 2 with a gate: each panel then stands for one of the gate and one of its factor
  ptrdiff_t apart;  // with a gate: words from a panel of the gate to the panel of its factor

  int64_t panel_words() const { return steps * kWidth; }
  int sum_stride() const { return tile_panels * weights * (int)kWidth; }  // floats from row to row

  // Words of a block. Only the last block may be shorter.
  int64_t block() const {
    const int64_t words = steps / kAmxWords, blocks = (steps + kDeepSteps - 1) / kDeepSteps;
    return (words + blocks - 1) / blocks * kAmxWords;
  }

  // Memory to prefetch while a tile of `part` is multiplied: words from `step` on, of eight panels and the eight after
  // them. After the part's last words, the first words of the following part are prefetched, if that is another one.
  Streams ahead(const ProductPart& part, const ProductPart& after, const TileSpan& tile, int64_t step) const {
    const bool is_other = step == steps;
    if (is_other && after.index == part.index) return Streams({panels, 0});
    const ProductPart& next = is_other ? after : part;
    const int64_t first = is_other ? 0 : step, count = std::min(block(), steps - first);
    const int64_t columns = part.panel_count(), all = part.row_count() * columns;
    const int64_t done = (tile.row - part.row) * columns + (tile.panel - part.panel) * tile.rows;
    const int64_t group = 2 * Streams::kHalf / weights, lines = (next.panel_count() + group - 1) / group * count;
    const auto edge = [&](int64_t done) { return lines * std::min(done, all) / all; };
    const int64_t from = edge(done), to = edge(done + tile.rows * tile.panels);
    const int64_t line = from % count, panel = next.panel + from / count * group;
    Streams streams({panels + panel * panel_words() + (first + line) * kWidth, 0});
    streams.length = std::min(to - from, count - line), streams.words = panel_words();
    streams.apart = weights > 1 ? apart : Streams::kHalf * panel_words();
    return streams;
  }
};

// A tile of a part, with some of its words along K.
struct DeepTile {
  TileSpan tile;
  AmxRows rows;
  int64_t step, count;
  bool is_last;   // whether these are the last words
  // memory for the tile's sums: they are read from it unless these are the first words, and written unless the last
  void* room;
  Streams ahead;  // memory to prefetch meanwhile

  AmxReuse reuse() const { return rows.second ? AmxReuse::kSecondCache : AmxReuse::kFirstCache; }
};

// Returns memory for this many words of sums, which the thread keeps.
inline uint32_t* deep_rooms(int64_t words) {
  static thread_local std::vector<Words> rooms;
  rooms.resize(std::max<size_t>(rooms.size(), words / kWidth));
  return reinterpret_cast<uint32_t*>(rooms.data());
}

// Calls f(DeepTile) for a part, block after block. Returns false if there is no memory for sums; nothing was done then.
template <class F>
bool for_deep_tiles(const DeepPanels& op, const Cuts& cuts, int64_t index, F f) try {
  const ProductPart part = cuts.part(index), after = cuts.part(cuts.is_last(index) ? index : index + 1);
  const int64_t tiles = (part.row_count() + kAmxRows - 1) / kAmxRows, size = kMostAmxRows * op.sum_stride();
  const int64_t columns = (part.panel_count() + op.tile_panels - 1) / op.tile_panels, block = op.block();
  uint32_t* const rooms = deep_rooms((tiles + 1) / 2 * columns * size);
  const AmxScope scope(amx_shapes(amx_rows(part.row_count()), kAmxWords));
  for (int64_t step = 0; step < op.steps; step += block) {
    const int64_t count = std::min(block, op.steps - step);
    uint32_t* room = rooms;
    for_amx_tiles(part.row_count(), part.panel_count(), [&](int m, const AmxRows& rows, int p, int panels) {
      const TileSpan tile = {part.row + m, part.panel + p, rows.all(), panels};
      f(DeepTile{tile, rows, step, count, step + count == op.steps, room,
                 op.ahead(part, after, tile, step + count)});
      room += size;
    }, op.tile_panels);
  }
  return true;
} catch (const std::bad_alloc&) {  // a worker must not throw it
  return false;
}

inline DeepPanels deep_panels(const Linear& op) { return {op.panels, op.steps, kAmxPanels, 1, 0}; }
inline DeepPanels deep_panels(const GatedLinear& op) { return {op.panels, op.steps, 1, 2, op.apart()}; }

// Lays out rows in blocks along K; the i-th begins at word edge(i). Without this, rows are often a multiple of 2 KiB
// apart: those of two tiles then share so few sets of the first cache that they evict each other. The memory belongs to
// the calling thread, until its next call.
template <class Edge>
DeepRows deep_rows(const DeepRows& x, int64_t blocks, const Edge& edge, int threads) try {
  constexpr int64_t kApart = 2 << 10;
  if (x.steps * (int64_t)sizeof(uint32_t) % kApart) return x;
  static thread_local std::vector<Words> room;
  room.resize(std::max<size_t>(room.size(), x.rows * x.steps / kWidth));
  auto* to = reinterpret_cast<uint32_t*>(room.data());
  parallel_ranges(threads, x.rows, [&](int64_t row, int64_t end) {
    for (; row < end; row++) {
      for (int64_t i = 0; i < blocks; i++) {
        const int64_t step = edge(i), count = edge(i + 1) - step;
        std::memcpy(to + x.rows * step + row * count, x.words + row * x.steps + step, count * sizeof(uint32_t));
      }
    }
  });
  return {to, x.rows, x.steps, true};
} catch (const std::bad_alloc&) {
  return x;
}

template <class Op>
DeepRows deep_rows(const Op& op, int threads) {
  const int64_t steps = op.steps, block = deep_panels(op).block();
  const auto edge = [=](int64_t i) { return std::min(i * block, steps); };
  return deep_rows({op.x, op.rows, steps}, (steps + block - 1) / block, edge, threads);
}

// Multiplies a part in bf16; finish(product, deep) computes the last block of a tile. Returns false like
// for_deep_tiles.
template <class Op, class F>
bool multiply_deep_amx(const Op& op, const DeepRows& x, const Cuts& cuts, int64_t index, F finish) {
  const DeepPanels all = deep_panels(op);
  return for_deep_tiles(all, cuts, index, [&](const DeepTile& deep) {
    const TileSpan& tile = deep.tile;
    Product product = {x.at(tile.row, deep.step, deep.count), x.stride(deep.count),
                       op.panels + (tile.panel * op.steps + deep.step) * kWidth,
                       all.weights > 1 ? all.apart : all.panel_words(), deep.count,
                       TileRows{deep.room, all.sum_stride()}, nullptr};
    product.ask_for(deep.ahead);
    if (deep.step) product.start = static_cast<float*>(deep.room), product.start_stride = all.sum_stride();
    if (deep.is_last) finish(product, deep);
    else multiply_amx<AmxWords::kBf16>(product, deep.rows, tile.panels * all.weights, deep.reuse());
  });
}

#else

template <class Op>
constexpr bool takes_deep(const Op&) { return false; }
constexpr bool takes_deep(int64_t, int64_t) { return false; }
template <class Op>
constexpr DeepRows deep_rows(const Op&, int) { return {}; }
constexpr int64_t most_amx_rows(int64_t, bool) { return 0; }

#endif

}  // namespace rootgraft
