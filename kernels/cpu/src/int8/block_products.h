// Products of rows in 8 or 15 bits with weights in blocks of 32, by vectors and by AMX. Sums of products are integers.
#pragma once

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "gemm/epilogue.h"
#include "gguf/super_blocks.h"
#include "int8/int8_amx.h"
#include "int8/quantise.h"
#include "int8/quantised_linear.h"
#include "simd/parallel.h"
#include "simd/partition.h"

namespace rootgraft {

constexpr int64_t kSmallRows = 1 << 13;  // number of values to quantise below which one thread is faster
// number of rows for each thread from which a thread multiplies its rows with all panels
constexpr int64_t kManyRows = 128;

// x in blocks, tile by tile, as operand A of the products: [tiles][blocks][rows of a tile].
template <int kPlanes>
struct BlockRows {
  int64_t blocks, tile_rows;
  std::vector<ByteBlock<kPlanes>> all;

  template <class E>
  void fill(const QuantisedLinear& op, int most_rows) {
    blocks = op.width / kBlockValues;
    const int64_t tiles = (op.rows + most_rows - 1) / most_rows;
    tile_rows = (op.rows + tiles - 1) / tiles;
    all.resize(tiles * blocks * tile_rows);
    const int threads = threads_for(op.rows * op.width, kSmallRows, op.threads);
    parallel_ranges(threads, op.rows, [&](int64_t row, int64_t end) {
      for (; row < end; row++) fill_row<E>(op, row);
    });
  }

  const ByteBlock<kPlanes>* tile(int64_t index) const { return &all[index * blocks * tile_rows]; }

 private:
  // Not inlined, so that the size of a block is a constant in its loops.
  template <class E>
  __attribute__((noinline)) void fill_row(const QuantisedLinear& op, int64_t row) {
    const auto* from = static_cast<const typename E::Value*>(op.x) + row * op.width;
    ByteBlock<kPlanes>* to = &all[row / tile_rows * blocks * tile_rows + row % tile_rows];
    for (int64_t i = 0; i < blocks; i++) fill_block<E>(from + i * kBlockValues, to[i * tile_rows]);
  }

  template <class E>
  static INLINE void fill_block(const typename E::Value* from, ByteBlock<kPlanes>& to) {
    int8_t* bytes[kPlanes];
    for (int i = 0; i < kPlanes; i++) bytes[i] = reinterpret_cast<int8_t*>(to.words[i]);
    int32_t totals[kPlanes], total = 0;
    to.scale = quantise_block<E, kPlanes>(from, kBlockValues, bytes, totals);
    for (int i = 0; i < kPlanes; i++) {
      to.starts[i] = kBiasedStart * totals[i];
      total = total * (1 << kPlaneBits) + totals[i];
    }
    to.offset = to.scale * (float)total;
    int32_t first_total = 0;
    for (int i = 0; i < kPlanes; i++) {
      int32_t first = 0;
      for (int value = 0; value < kBlockValues / 2; value++) first += bytes[i][value];
      to.first_starts[i] = kBiasedStart * first;
      first_total = first_total * (1 << kPlaneBits) + first;
    }
    to.half_offsets[0] = to.scale * (float)first_total;
    to.half_offsets[1] = to.scale * (float)(total - first_total);
  }
};

// Several tiles that use a panel share the prefetch of the next one, so that reading memory overlaps with computation.
// A single tile reads each panel once. CPUs with AMX then gain a twentieth from prefetches shortly ahead. On other CPUs
// the hardware's prefetcher is better, except for blocks of five lines, which it does not follow: they take twice as
// long.
template <Format F, int kPlanes, class Out>
void multiply_blocks(const QuantisedLinear& op, const BlockRows<kPlanes>& x, const ProductPart& part, Out& out) {
  const int64_t words = x.blocks * kPanelWords<F>, halves = scale_halves<F>(x.blocks);
  const int64_t first = part.row / x.tile_rows, count = (part.row_count() + x.tile_rows - 1) / x.tile_rows;
  constexpr int64_t kStreamed = 32;  // number of lines that a single tile prefetches ahead
  const int64_t ahead = count > 1 ? x.blocks : kStreamed / kPanelLines<F>;
  alignas(64) float room[kByteRows * kRoomStride];
  for (int64_t panel = part.panel; panel < part.panel_end; panel++) {
    const bool asks = count > 1 ? panel + 1 < part.panel_end : has_amx() || kIsPlanes<F>;
    const int64_t lines = asks ? kPanelLines<F> : 0;
    const auto* b_scale = static_cast<const uint16_t*>(op.scales) + panel * halves;
    for (int64_t i = 0; i < count; i++) {
      const int64_t row = (first + i) * x.tile_rows;
      const TileSpan tile = {row, panel, (int)std::min(x.tile_rows, op.rows - row), 1};
      multiply_byte_tile<F, kPlanes>({x.tile(first + i), x.tile_rows, op.panels + panel * words, b_scale, x.blocks,
                                      out.place(room, tile), lines * i / count, lines * (i + 1) / count, ahead},
                                     tile.rows);
      out.take(part.index, room, tile);
    }
  }
}

#if ROOTGRAFT_AMX
// Multiplies some panels. Returns false if there is not enough memory, as a worker must not throw.
template <Format F>
bool make_room(std::vector<SignedBlock<F>>& unpacked, int64_t blocks) try {
  unpacked.resize(std::max<size_t>(unpacked.size(), blocks));
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

// Likewise by AMX, for panels that are unpacked once for all tiles. As many are unpacked at a time as leave room in a
// core's second cache, so that the rows of x, which may not fit in it, are read fewer times. Returns false if there is
// no memory.
template <Format F, int kPlanes, class Out>
bool multiply_blocks_amx(const QuantisedLinear& op, const BlockRows<kPlanes>& x, const ProductPart& part, Out& out) {
  constexpr int64_t kUnpacked = 640 << 10, kMost = 8;  // kUnpacked: bytes of panels; kMost: limit of panels
  const int64_t words = x.blocks * kPanelWords<F>, halves = x.blocks * kPanelScales<F>;
  const int64_t first = part.row / x.tile_rows, count = (part.row_count() + x.tile_rows - 1) / x.tile_rows;
  const int64_t room_for = kUnpacked / (x.blocks * (int64_t)sizeof(SignedBlock<F>));
  const int64_t group = count > 2 ? std::clamp<int64_t>(room_for, 1, kMost) : 1;
  static thread_local std::vector<SignedBlock<F>> unpacked;
  if (!make_room(unpacked, group * x.blocks)) return false;
  const AmxScope scope(amx_shapes((int)x.tile_rows, kBlockWords));
  alignas(64) float room[kAmxRows * kRoomStride];
  for (int64_t panel = part.panel; panel < part.panel_end; panel += group) {
    const int64_t panels = std::min(group, part.panel_end - panel);
    const auto* scales = static_cast<const uint16_t*>(op.scales);
    for (int64_t p = 0; p < panels; p++) {
      unpack_panel<F>(op.panels + (panel + p) * words, scales + (panel + p) * halves, x.blocks, &unpacked[p * x.blocks]);
    }
    for (int64_t i = 0; i < count; i++) {
      for (int64_t p = 0; p < panels; p++) {
        const int64_t row = (first + i) * x.tile_rows, before = panel + p + group - 1;  // before: the panel to prefetch
        const int64_t lines = before + 1 < part.panel_end ? kPanelLines<F> : 0;
        const TileSpan tile = {row, panel + p, (int)std::min(x.tile_rows, op.rows - row), 1};
        multiply_byte_amx<F, kPlanes>({x.tile(first + i), x.tile_rows, op.panels + before * words,
                                       scales + before * halves, x.blocks, out.place(room, tile), lines * i / count,
                                       lines * (i + 1) / count, x.blocks},
                                      &unpacked[p * x.blocks], tile.rows);
        out.take(part.index, room, tile);
      }
    }
  }
  return true;
}
#endif

template <Format F, int kPlanes, class E, class Out>
void run_blocks(const QuantisedLinear& op) {
  static thread_local BlockRows<kPlanes> x;
  // Few rows are one tile for the vector code, for which the weights need not be unpacked to memory.
  const bool by_amx = kTakesAmx<F> && op.rows > kByteRows && has_amx();
  x.template fill<E>(op, by_amx ? kAmxRows : kByteRows);
  const BlockRows<kPlanes>& rows = x;  // the caller's variable, on all threads
  const Cuts cuts(op.used_threads(), op.rows, op.columns, rows.tile_rows, rows.tile_rows, kManyRows,
                  {rows.blocks * kPanelLines<F>});
  Out out(op, cuts.count());
  std::atomic<bool> has_memory{true};
  parallel_shares(cuts.threads, cuts.count(), [&](int64_t i) {
    const ProductPart part = cuts.part(i);
#if ROOTGRAFT_AMX
    if constexpr (kTakesAmx<F>) {
      if (by_amx) {
        if (!multiply_blocks_amx<F, kPlanes>(op, rows, part, out)) has_memory = false;
        return;
      }
    }
#endif
    multiply_blocks<F, kPlanes>(op, rows, part, out);
  });
  out.finish();
  if (!has_memory) throw std::bad_alloc();
}

}  // namespace rootgraft
