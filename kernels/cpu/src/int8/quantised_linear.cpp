// y = x W^T + b with W in four or eight bits and x quantised to 8 or 15 on the way in; sums of products are integers.
#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "gguf/block_tile.h"
#include "gguf/widened_blocks.h"
#include "int8/int8_amx.h"
#include "int8/int8_tile.h"
#include "simd/partition.h"
#include "gemm/epilogue.h"
#include "gemm/gate.h"
#include "simd/parallel.h"
#include "int8/quantise.h"
#include "int8/quantised_linear.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmallRows = 1 << 13;  // values to quantise below which one thread is faster
constexpr int64_t kManyRows = 128;       // for a thread: it then multiplies its rows with all panels
constexpr int kNoMemory = 2;

// x in blocks, tile by tile, as A of the products: [tiles][blocks][rows of a tile].
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
  // Not inlined, so that the size of a block is known where its loops are compiled.
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
  }
};

// Several tiles that use a panel share the prefetch of the next one, which overlaps memory with computation. A single tile
// only streams: CPUs with AMX gain a twentieth by asking for what comes shortly after, on others the hardware does better.
template <Format F, int kPlanes, class Out>
void multiply_blocks(const QuantisedLinear& op, const BlockRows<kPlanes>& x, const ProductPart& part, Out& out) {
  const int64_t words = x.blocks * kPanelWords<F>, halves = x.blocks * kPanelScales<F>;
  const int64_t first = part.row / x.tile_rows, count = (part.row_count() + x.tile_rows - 1) / x.tile_rows;
  constexpr int64_t kStreamed = 32;  // lines ahead of a single tile
  const int64_t ahead = count > 1 ? x.blocks : kStreamed / kPanelLines<F>;
  alignas(64) float room[kByteRows * kRoomStride];
  for (int64_t panel = part.panel; panel < part.panel_end; panel++) {
    const bool asks = count > 1 ? panel + 1 < part.panel_end : has_amx();
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
// For some panels; false where there is no memory, for a worker must not throw.
template <Format F>
bool make_room(std::vector<SignedBlock<F>>& unpacked, int64_t blocks) try {
  unpacked.resize(std::max<size_t>(unpacked.size(), blocks));
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

// The same by AMX, of panels that are unpacked once for all tiles: as many at a time as leave room in a core's second
// cache, so that the rows of x, which may be too many for it, are read fewer times. False: there is no memory for them.
template <Format F, int kPlanes, class Out>
bool multiply_blocks_amx(const QuantisedLinear& op, const BlockRows<kPlanes>& x, const ProductPart& part, Out& out) {
  constexpr int64_t kUnpacked = 640 << 10, kMost = 8;  // bytes of panels, and panels
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
        const int64_t row = (first + i) * x.tile_rows, before = panel + p + group - 1;  // of the panel to ask for
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

int64_t channel_words(const QuantisedLinear& op) { return (op.width + kWordBytes - 1) / kWordBytes; }

Lines panels_of(const QuantisedLinear& op, int64_t panel, int64_t panel_end) {
  const int64_t words = channel_words(op);
  return {op.panels + panel * words * kWidth, (panel_end - panel) * words};
}

// With a gate, panels from one half to the other.
int64_t halves_apart(const QuantisedLinear& op) { return op.columns / 2 / kWidth; }

// Panels by AMX; with a gate, those of both halves.
Streams streams_of(const QuantisedLinear& op, int64_t panel, int64_t panel_end) {
  return Streams(panels_of(op, panel, panel_end), op.gate ? halves_apart(op) * channel_words(op) * kWidth : 0);
}

Cuts channel_cuts(const QuantisedLinear& op) {
  return Cuts(op.used_threads(), op.rows, op.out_columns(), 1, kChannelRows, kManyRows,
              {channel_words(op), op.gate ? 2 : 1});
}

// Some rows times the channels of a part; with a gate, a panel stands for two.
struct ChannelPart {
  const QuantisedLinear& op;
  const ChannelRows& x;
  const Cuts& cuts;
  const ProductPart part;
  // What this thread will probably multiply after the part: some of the same op, of the one after it, or nothing.
  const QuantisedLinear* next_op = nullptr;
  ProductPart next = {};

  ChannelPart(const QuantisedLinear& op, const ChannelRows& x, const Cuts& cuts, int64_t index)
      : op(op), x(x), cuts(cuts), part(cuts.part(index)) {
    if (!cuts.is_last(index)) {
      next_op = &op, next = cuts.part(index + 1);
    } else if (op.next && op.next->format == Format::kChannels) {
      const Cuts others = channel_cuts(*op.next);
      next_op = op.next, next = others.part(others.first_of(std::min(cuts.thread_of(index), others.threads - 1)));
    }
  }

  // The product of a tile. With a gate: of half `half` of the weight.
  ChannelProduct product(const TileSpan& tile, const TileRows& c, int half = 0) const {
    const int64_t words = channel_words(op), panel_words = words * kWidth, panel = tile.panel + half * apart();
    return {x.low(tile.row), x.stride, x.row(tile.row), x.outliers(tile.row), x.outlier_stride,
            op.panels + panel * panel_words, panel_words, static_cast<const float*>(op.scales) + panel * kWidth, words,
            c};
  }

  // The same of both halves, a panel of one and a panel of the other.
  ChannelProduct gated_product(const TileSpan& tile, const TileRows& c) const {
    ChannelProduct both = product(tile, c);
    both.gate = op.gate, both.apart = apart();
    return both;
  }

  // Panels of the part to ask for, or some that come after it.
  Streams ahead(int64_t panel, int64_t panel_end, int64_t most) const {
    if (panel < panel_end) return streams_of(op, panel, panel_end);
    if (!next_op) return Streams({op.panels, 0});
    return streams_of(*next_op, next.panel, std::min(next.panel + most, next.panel_end));
  }

  // The panels after those of a tile, as many again.
  Lines behind(const TileSpan& tile) const {
    const int64_t end = tile.panel + tile.panels, left = part.panel_end - end;
    if (left) return panels_of(op, end, end + std::min<int64_t>(tile.panels, left));
    if (!next_op) return {op.panels, 0};
    const Lines lines = panels_of(*next_op, next.panel, next.panel_end);
    return {lines.first, std::min(lines.count, tile.panels * channel_words(op))};
  }

  int64_t apart() const { return halves_apart(op); }
};

// Several tiles of rows share the prefetch of the next panels, as for blocks.
template <class Out>
void multiply_channels(const ChannelPart& all, Out& out) {
  const ProductPart& part = all.part;
  const int row_count = part.row_count();
  alignas(64) float room[kChannelRows * kRoomStride];
  for_tiles<kChannelRows, kChannelPanels>(row_count, part.panel_count(), [&](int m, int rows, int p, int panels) {
    const TileSpan tile = {part.row + m, part.panel + p, rows, panels};
    const Lines none = {all.op.panels, 0};
    const Lines ahead = row_count > kChannelRows ? all.behind(tile).between(m, m + rows, row_count) : none;
    ChannelProduct product = all.product(tile, out.place(room, tile));
    product.ask_for(ahead);
    multiply_channel_tile(product, rows, panels);
    out.take(part.index, room, tile);
  });
}

// The same with a gate: a tile of each half, rounded, and their activation.
template <class E, class Act>
void multiply_gated_channels(const ChannelPart& all) {
  using Value = typename E::Value;
  const ProductPart& part = all.part;
  const int row_count = part.row_count();
  const int64_t columns = all.op.out_columns();
  alignas(64) Value room[2][kChannelRows * kRoomStride];
  for_tiles<kChannelRows, kChannelPanels>(row_count, part.panel_count(), [&](int m, int rows, int p, int panels) {
    const TileSpan tile = {part.row + m, part.panel + p, rows, panels};
    const Lines none = {all.op.panels, 0};
    Lines ahead = row_count > kChannelRows ? all.behind(tile).between(m, m + rows, row_count) : none;
    for (int half = 0; half < 2; half++) {
      const TileRows to = {room[half], kRoomStride, E::kPerWord == Bf16::kPerWord};
      ChannelProduct product = all.product(tile, to, half);
      product.ask_for(ahead);
      multiply_channel_tile(product, rows, panels);
      ahead.first += all.apart() * channel_words(all.op) * kWidth;
    }
    for (int r = 0; r < rows; r++) {
      Value* to = static_cast<Value*>(all.op.out) + (tile.row + r) * columns + tile.panel * kWidth;
      for (int i = 0; i < panels * kWidth; i += kWidth) {
        const int64_t at = r * kRoomStride + i;
        store_gated<E, Act>(room[0] + at, room[1] + at, to + i);
      }
    }
  });
}

#if ROOTGRAFT_AMX
// f(tile, rows, ahead, reuse) by AMX, slice by slice; the panels of the next one come meanwhile.
template <class F>
INLINE void for_channel_tiles(const ChannelPart& all, int most_panels, F f) {
  const ProductPart& part = all.part;
  const int64_t panel_lines = channel_words(all.op) * (all.op.gate ? 2 : 1);
  const AmxReuse reuse = reuse_of(part.row_count(), channel_words(all.op));
  const AmxScope scope(amx_shapes(amx_rows(part.row_count()), kAmxWords));
  for_amx_slices(all.cuts, part.index, panel_lines, most_panels, [&](const PartSlice& slice) {
    for_amx_tiles(part.row_count(), slice.part.panel_count(), [&](int m, const AmxRows& rows, int p, int panels) {
      const TileSpan tile = {part.row + m, slice.part.panel + p, rows.all(), panels};
      const int64_t most = tile.rows == part.row_count() ? panels : slice.part.panel_count();
      const auto streams = [&](int64_t first, int64_t end) { return all.ahead(first, end, most); };
      f(tile, rows, slice.due(streams, tile), reuse);
    }, most_panels);
  });
}

// Whether the output is stored past the caches: one wider than x, which are logits, that the second caches of two cores
// would not hold. Lines are then not read before they are written.
bool passes_caches(const QuantisedLinear& op) {
  constexpr int64_t kCached = 4 << 20;
  constexpr int64_t kLine = kWidth * sizeof(float);
  const bool has_lines = op.columns % kWidth == 0 && reinterpret_cast<uintptr_t>(op.out) % kLine == 0;
  return op.is_bf16 && !op.out_is_bf16 && has_lines && op.rows * op.columns * (int64_t)sizeof(float) > kCached;
}

template <class Out>
void multiply_channels_amx(const ChannelPart& all, Out& out) {
  const bool passing = passes_caches(all.op);
  alignas(64) float room[kMostAmxRows * kRoomStride];
  ChannelFinish finishing;
  for_channel_tiles(all, kAmxPanels, [&](const TileSpan& tile, const AmxRows& rows, const Streams& ahead, auto reuse) {
    const TileRows to = out.place(room, tile);
    ChannelProduct product = all.product(tile, to);
    product.ask_for(ahead);
    product.passes_caches = passing && to.first != room;
    multiply_channel_amx(product, rows, tile.panels, reuse, finishing);
    if (to.first == room) finishing.finish_all();
    out.take(all.part.index, room, tile);
  });
  finishing.finish_all();
  if (passing) _mm_sfence();  // such stores are ordered with no others
}

void multiply_gated_channels_amx(const ChannelPart& all) {
  const QuantisedLinear& op = all.op;
  const TileRows out = {op.out, op.out_columns(), (bool)op.is_bf16};
  ChannelFinish finishing;
  const auto multiply = [&](const TileSpan& tile, const AmxRows& rows, const Streams& ahead, AmxReuse reuse) {
    ChannelProduct both = all.gated_product(tile, out.right(tile.row * op.out_columns() + tile.panel * kWidth));
    both.ask_for(ahead);
    multiply_channel_amx(both, rows, 2 * tile.panels, reuse, finishing);
  };
  for_channel_tiles(all, kAmxPanels / 2, multiply);
}
#endif

template <Format F, int kPlanes, class E, class Out>
void run_blocks(const QuantisedLinear& op) {
  static thread_local BlockRows<kPlanes> x;
  // Few rows are one tile of vectors, which need not unpack the weights into memory first.
  const bool by_amx = op.rows > kByteRows && has_amx();
  x.template fill<E>(op, by_amx ? kAmxRows : kByteRows);
  const BlockRows<kPlanes>& rows = x;  // the caller's, on all threads
  const Cuts cuts(op.used_threads(), op.rows, op.columns, rows.tile_rows, rows.tile_rows, kManyRows,
                  {rows.blocks * kPanelLines<F>});
  Out out(op, cuts.count());
  std::atomic<bool> has_memory{true};
  parallel_shares(cuts.threads, cuts.count(), [&](int64_t i) {
    const ProductPart part = cuts.part(i);
#if ROOTGRAFT_AMX
    if (by_amx) {
      if (!multiply_blocks_amx<F, kPlanes>(op, rows, part, out)) has_memory = false;
      return;
    }
#endif
    multiply_blocks<F, kPlanes>(op, rows, part, out);
  });
  out.finish();
  if (!has_memory) throw std::bad_alloc();
}

// f(part, by_amx) for the parts of a product with channels.
template <class E, class F>
void for_channel_parts(const QuantisedLinear& op, const Cuts& cuts, const F& f) {
  static thread_local ChannelRows x;
  const int threads = threads_for(op.rows * op.width, kSmallRows, op.threads);
  x.fill<E>(static_cast<const typename E::Value*>(op.x), op.rows, op.width, threads);
  const ChannelRows& rows = x;
  const bool by_amx = op.rows > kByteRows && op.width % (kWordBytes * kAmxWords) == 0 && has_amx();
  parallel_shares(cuts.threads, cuts.count(), [&](int64_t i) { f(ChannelPart(op, rows, cuts, i), by_amx); });
}

template <class E, class Out>
void run_channels(const QuantisedLinear& op) {
  const Cuts cuts = channel_cuts(op);
  Out out(op, cuts.count());
  for_channel_parts<E>(op, cuts, [&](const ChannelPart& all, bool by_amx) {
#if ROOTGRAFT_AMX
    if (by_amx) return multiply_channels_amx(all, out);
#endif
    multiply_channels(all, out);
  });
  out.finish();
}

template <class E>
void run_gated_channels(const QuantisedLinear& op) {
  if (!op.rows) return;
  for_channel_parts<E>(op, channel_cuts(op), [&](const ChannelPart& all, bool by_amx) {
#if ROOTGRAFT_AMX
    if (by_amx) return multiply_gated_channels_amx(all);
#endif
    with_activation(op.gate - 1, [&](auto act) { multiply_gated_channels<E, decltype(act)>(all); });
  });
}

template <class E, class Out>
void run(const QuantisedLinear& op) {
  if (!op.rows) return;
  switch (op.format) {
    case Format::kNibbles:
      return op.planes == 1 ? run_blocks<Format::kNibbles, 1, E, Out>(op) : run_blocks<Format::kNibbles, 2, E, Out>(op);
    case Format::kSymmetric:
      return op.planes == 1 ? run_blocks<Format::kSymmetric, 1, E, Out>(op)
                            : run_blocks<Format::kSymmetric, 2, E, Out>(op);
    case Format::kBytes:
      return op.planes == 1 ? run_blocks<Format::kBytes, 1, E, Out>(op) : run_blocks<Format::kBytes, 2, E, Out>(op);
    case Format::kChannels: return run_channels<E, Out>(op);
    default: return;  // widened: not quantised products
  }
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int quantised_linear(const QuantisedLinear* op) try {
  if (!op->planes) {
    multiply_widened_blocks(*op);
    return 0;
  }
  with_types([&](auto element, auto to) {
    if (op->gate) run_gated_channels<decltype(element)>(*op);
    else if (op->at) run<decltype(element), Searched<Fp32>>(*op);
    else run<decltype(element), Stored<Fp32, decltype(to)>>(*op);
  }, op->is_bf16, op->out_is_bf16);
  return 0;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

extern "C" int64_t quantised_linear_size() { return sizeof(QuantisedLinear); }
