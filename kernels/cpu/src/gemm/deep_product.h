// Products of many rows of many words by AMX, in blocks along K. All rows pass a block of panels that stays in the second
// cache; then come the panels' next words. Sums wait in memory as they are, so that their bits are those of one product.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "gemm/epilogue.h"
#include "gemm/linear.h"
#include "gemm/tile_amx.h"
#include "simd/partition.h"

namespace rootgraft {

constexpr int64_t kDeepPanels = 16;  // of a part

#if ROOTGRAFT_AMX

constexpr int64_t kDeepSteps = 512;  // words of a block

// Whether an op of bf16 is made so. Rows of fewer words are as fast in one piece.
inline bool takes_deep(const Linear& op) {
  return takes_amx(op.steps) && op.rows >= kPartRows && op.steps > 2 * kDeepSteps;
}

// The words along K that come next, of eight panels at a time, shared among tiles.
inline Streams deep_streams(const Linear& op, const ProductPart& part, const ProductPart& after, const TileSpan& tile,
                            int64_t step) {
  constexpr int64_t kPanels = 2 * Streams::kHalf;
  const bool is_other = step == op.steps;  // the first words of the part after
  const ProductPart& next = is_other ? after : part;
  const int64_t first = is_other ? 0 : step, count = std::min(kDeepSteps, op.steps - first), panel = op.steps * kWidth;
  const int64_t panels = part.panel_count(), all = part.row_count() * panels;
  const int64_t done = (tile.row - part.row) * panels + (tile.panel - part.panel) * tile.rows;
  const int64_t lines = (next.panel_count() + kPanels - 1) / kPanels * count;
  const auto edge = [&](int64_t done) { return lines * std::min(done, all) / all; };
  const int64_t from = edge(done), to = edge(done + tile.rows * tile.panels);
  const int64_t group = from / count, line = from % count;
  Streams streams({op.panels + (next.panel + group * kPanels) * panel + (first + line) * kWidth, 0});
  streams.length = std::min(to - from, count - line), streams.words = panel, streams.apart = Streams::kHalf * panel;
  return streams;
}

// A part of such an op. False: there is no memory for its sums.
template <class Out>
bool multiply_deep_amx(const Linear& op, const Cuts& cuts, int64_t index, Out& out) try {
  constexpr int64_t kRoom = kMostAmxRows * kRoomStride;
  const ProductPart part = cuts.part(index), after = cuts.part(cuts.is_last(index) ? index : index + 1);
  const int64_t tiles = (part.row_count() + kAmxRows - 1) / kAmxRows;
  const int64_t groups = (part.panel_count() + kAmxPanels - 1) / kAmxPanels;
  static thread_local std::vector<Words> rooms;
  rooms.resize(std::max<size_t>(rooms.size(), (tiles + 1) / 2 * groups * kRoom / kWidth));
  const AmxScope scope(amx_shapes(amx_rows(part.row_count()), kAmxWords));
  AmxEpilogue<RoundedRows> epilogue;
  for (int64_t step = 0; step < op.steps; step += kDeepSteps) {
    const int64_t steps = std::min(kDeepSteps, op.steps - step);
    auto* room = reinterpret_cast<float*>(rooms.data());
    for_amx_tiles(part.row_count(), part.panel_count(), [&](int m, const AmxRows& rows, int p, int panels) {
      const TileSpan tile = {part.row + m, part.panel + p, rows.all(), panels};
      const bool is_last = step + steps == op.steps;
      const TileRows c = is_last ? out.place(room, tile) : TileRows{room, kRoomStride};
      Product product = {op.x + tile.row * op.steps + step, op.steps,
                         op.panels + (tile.panel * op.steps + step) * kWidth, op.steps * kWidth, steps, c, nullptr};
      product.ask_for(deep_streams(op, part, after, tile, step + steps));
      if (step) product.start = room, product.start_stride = kRoomStride;
      if (c.is_bf16) multiply_amx(product, rows, panels, AmxReuse::kFirstCache, epilogue);
      else multiply_amx<AmxWords::kBf16>(product, rows, panels);
      if (is_last) out.take(part.index, room, tile);
      room += kRoom;
    });
  }
  return true;
} catch (const std::bad_alloc&) {  // which a worker must not throw
  return false;
}

#else

constexpr bool takes_deep(const Linear&) { return false; }

#endif

}  // namespace rootgraft
