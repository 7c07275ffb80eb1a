// Products of many rows of many words by AMX, in blocks along K: two tiles' rows of a block stay in the first cache while
// panels pass. All rows of a part pass a block of its panels, which stays in the second cache; then come the panels' next
// words. Sums wait in memory as they are, so that their bits are those of one product.
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

constexpr int64_t kDeepPanels = 16, kDeepPairs = 4;  // of a part; of gates and as many of factors

#if ROOTGRAFT_AMX

constexpr int64_t kDeepSteps = 256;                          // words of a block
constexpr int64_t kMostSteps = 1024, kMostGatedSteps = 512;  // that are as fast in one piece, or in short ones

inline bool takes_deep(int64_t rows, int64_t steps, int64_t most) {
  return takes_amx(steps) && rows >= kPartRows && steps > most;
}

// Whether an op of bf16 is made so.
inline bool takes_deep(const Linear& op) { return takes_deep(op.rows, op.steps, kMostSteps); }
inline bool takes_deep(const GatedLinear& op) { return takes_deep(op.rows, op.steps, kMostGatedSteps); }

// Rows of a part: so many that those of its words that pass panels, of a block or all, stay in the second cache.
inline int64_t most_amx_rows(int64_t steps, bool is_deep) {
  constexpr int64_t kDeepRows = 320, kBytes = 1 << 20;
  return is_deep ? kDeepRows : std::max<int64_t>(kPartRows, kBytes / (steps * (int64_t)sizeof(uint32_t)));
}

// Rows [rows][steps] of an op; or in blocks along K, [block][rows][words of the block].
struct DeepRows {
  const uint32_t* words;
  int64_t rows, steps;
  bool is_blocked = false;

  const uint32_t* at(int64_t row, int64_t step, int64_t count) const {
    return is_blocked ? words + rows * step + row * count : words + row * steps + step;
  }
  ptrdiff_t stride(int64_t count) const { return is_blocked ? count : steps; }
};

// Lays out rows in blocks along K where they lie a multiple of 2 KiB apart: those of two tiles then share so few sets of the
// first cache that they do not stay there. The memory is the calling thread's, until its next call.
inline DeepRows deep_rows(const uint32_t* x, int64_t rows, int64_t steps, int threads) try {
  constexpr int64_t kApart = 2 << 10;
  if (steps * (int64_t)sizeof(uint32_t) % kApart) return {x, rows, steps};
  static thread_local std::vector<Words> room;
  room.resize(std::max<size_t>(room.size(), rows * steps / kWidth));
  auto* to = reinterpret_cast<uint32_t*>(room.data());
  parallel_ranges(threads, rows, [&](int64_t row, int64_t end) {
    for (; row < end; row++) {
      for (int64_t step = 0; step < steps; step += kDeepSteps) {
        const int64_t count = std::min(kDeepSteps, steps - step);
        std::memcpy(to + rows * step + row * count, x + row * steps + step, count * sizeof(uint32_t));
      }
    }
  });
  return {to, rows, steps, true};
} catch (const std::bad_alloc&) {
  return {x, rows, steps};
}

// The operands of an op.
struct DeepOperands {
  DeepRows x;
  const uint32_t* panels;
  int64_t steps;
  int tile_panels;     // at most, of a tile
  int weights;         // with a gate two: a panel stands for one of each
  ptrdiff_t b_stride;  // words from a panel of a tile to the next one
  ptrdiff_t apart;     // words to the panels that are asked for beside Streams::kHalf others
  int64_t group;       // panels that are asked for together

  DeepOperands(const Linear& op, const DeepRows& x)
      : x(x), panels(op.panels), steps(op.steps), tile_panels(kAmxPanels), weights(1), b_stride(panel_words()),
        apart(Streams::kHalf * panel_words()), group(2 * Streams::kHalf) {}

  DeepOperands(const GatedLinear& op, const DeepRows& x)
      : x(x), panels(op.panels), steps(op.steps), tile_panels(1), weights(2), b_stride(op.apart()),
        apart(op.apart()), group(Streams::kHalf) {}

  int64_t panel_words() const { return steps * kWidth; }
  int sum_stride() const { return tile_panels * weights * (int)kWidth; }  // floats from row to row

  // Some words of eight panels after eight: what is due of `part`'s words from `step` on, or, behind its last ones, of the
  // first words of the part after it, while a tile of `part` is multiplied.
  Streams ahead(const ProductPart& part, const ProductPart& after, const TileSpan& tile, int64_t step) const {
    const bool is_other = step == steps;
    const ProductPart& next = is_other ? after : part;
    const int64_t first = is_other ? 0 : step, count = std::min(kDeepSteps, steps - first);
    const int64_t columns = part.panel_count(), all = part.row_count() * columns;
    const int64_t done = (tile.row - part.row) * columns + (tile.panel - part.panel) * tile.rows;
    const int64_t lines = (next.panel_count() + group - 1) / group * count;
    const auto edge = [&](int64_t done) { return lines * std::min(done, all) / all; };
    const int64_t from = edge(done), to = edge(done + tile.rows * tile.panels);
    const int64_t line = from % count, panel = next.panel + from / count * group;
    Streams streams({panels + panel * panel_words() + (first + line) * kWidth, 0});
    streams.length = std::min(to - from, count - line), streams.words = panel_words(), streams.apart = apart;
    return streams;
  }
};

// Multiplies a part; finish(product, rows, tile, reuse, room) makes the last block of a tile, `room` being where its sums
// wait. False: there is no memory for sums, and nothing was done.
template <class F>
bool multiply_deep_amx(const DeepOperands& op, const Cuts& cuts, int64_t index, F finish) try {
  const ProductPart part = cuts.part(index), after = cuts.part(cuts.is_last(index) ? index : index + 1);
  const int64_t tiles = (part.row_count() + kAmxRows - 1) / kAmxRows, size = kMostAmxRows * op.sum_stride();
  const int64_t columns = (part.panel_count() + op.tile_panels - 1) / op.tile_panels;
  static thread_local std::vector<Words> rooms;
  rooms.resize(std::max<size_t>(rooms.size(), (tiles + 1) / 2 * columns * size / kWidth));
  const AmxScope scope(amx_shapes(amx_rows(part.row_count()), kAmxWords));
  for (int64_t step = 0; step < op.steps; step += kDeepSteps) {
    const int64_t steps = std::min(kDeepSteps, op.steps - step);
    auto* room = reinterpret_cast<float*>(rooms.data());
    for_amx_tiles(part.row_count(), part.panel_count(), [&](int m, const AmxRows& rows, int p, int panels) {
      const TileSpan tile = {part.row + m, part.panel + p, rows.all(), panels};
      Product product = {op.x.at(tile.row, step, steps), op.x.stride(steps),
                         op.panels + (tile.panel * op.steps + step) * kWidth, op.b_stride, steps,
                         TileRows{room, op.sum_stride()}, nullptr};
      product.ask_for(op.ahead(part, after, tile, step + steps));
      if (step) product.start = room, product.start_stride = op.sum_stride();
      const AmxReuse reuse = rows.second ? AmxReuse::kSecondCache : AmxReuse::kFirstCache;
      if (step + steps == op.steps) finish(product, rows, tile, reuse, room);
      else multiply_amx<AmxWords::kBf16>(product, rows, panels * op.weights, reuse);
      room += size;
    }, op.tile_panels);
  }
  return true;
} catch (const std::bad_alloc&) {  // which a worker must not throw
  return false;
}

#else

struct DeepRows {};

template <class Op>
constexpr bool takes_deep(const Op&) { return false; }
constexpr DeepRows deep_rows(const uint32_t*, int64_t, int64_t, int) { return {}; }
constexpr int64_t most_amx_rows(int64_t, bool) { return 0; }

#endif

}  // namespace rootgraft
