// y = x W^T + b with W in four or eight bits, and x quantised to 8 or 15 bits first. Sums of products are integers.
#include <algorithm>
#include <new>

#include "gguf/widened_blocks.h"
#include "int8/block_products.h"
#include "int8/int8_amx.h"
#include "int8/int8_tile.h"
#include "simd/partition.h"
#include "gemm/deep_product.h"
#include "gemm/epilogue.h"
#include "gemm/gate.h"
#include "simd/parallel.h"
#include "int8/quantised_linear.h"

namespace rootgraft {
namespace {

constexpr int kNoMemory = 2;

int64_t channel_words(const QuantisedLinear& op) { return (op.width + kWordBytes - 1) / kWordBytes; }

Lines panels_of(const QuantisedLinear& op, int64_t panel, int64_t panel_end) {
  const int64_t words = channel_words(op);
  return {op.panels + panel * words * kWidth, (panel_end - panel) * words};
}

// With a gate: number of panels from one half of the weight to the other.
int64_t halves_apart(const QuantisedLinear& op) { return op.columns / 2 / kWidth; }

// Panels for AMX; with a gate, those of both halves.
Streams streams_of(const QuantisedLinear& op, int64_t panel, int64_t panel_end) {
  return Streams(panels_of(op, panel, panel_end), op.gate ? halves_apart(op) * channel_words(op) * kWidth : 0);
}

// Whether AMX computes a product in blocks along K. Not with a gate, as its rows take longer to finish.
bool is_deep(const QuantisedLinear& op) { return !op.gate && takes_deep(op.rows, channel_words(op)); }

Cuts channel_cuts(const QuantisedLinear& op) {
  Slicing slicing = {channel_words(op), op.gate ? 2 : 1};
  if (is_deep(op)) slicing.at_once = kDeepPanels;
  if (takes_amx(channel_words(op))) slicing.most_rows = most_amx_rows(channel_words(op), is_deep(op));
  return Cuts(op.used_threads(), op.rows, op.out_columns(), 1, kChannelRows, kManyRows, slicing);
}

// Some rows times the channels of a part; with a gate, a panel stands for two.
struct ChannelPart {
  const QuantisedLinear& op;
  const ChannelRows& x;
  const Cuts& cuts;
  const ProductPart part;
  // The op that this thread will probably multiply after the part: the same op, the one after it, or none.
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

  // The product of a tile; with a gate, that of half `half` of the weight.
  ChannelProduct product(const TileSpan& tile, const TileRows& c, int half = 0) const {
    const int64_t words = channel_words(op), panel_words = words * kWidth, panel = tile.panel + half * apart();
    return {x.low(tile.row), x.stride, x.row(tile.row), x.outliers(tile.row), x.outlier_stride,
            op.panels + panel * panel_words, panel_words, static_cast<const float*>(op.scales) + panel * kWidth, words,
            c};
  }

  // The product of both halves, with a panel of one and a panel of the other in turn.
  ChannelProduct gated_product(const TileSpan& tile, const TileRows& c) const {
    ChannelProduct both = product(tile, c);
    both.gate = op.gate, both.apart = apart();
    return both;
  }

  // Panels of the part to prefetch, or some that come after the part.
  Streams ahead(int64_t panel, int64_t panel_end, int64_t most) const {
    if (panel < panel_end) return streams_of(op, panel, panel_end);
    if (!next_op) return Streams({op.panels, 0});
    return streams_of(*next_op, next.panel, std::min(next.panel + most, next.panel_end));
  }

  // The panels after those of a tile, the same number of them.
  Lines behind(const TileSpan& tile) const {
    const int64_t end = tile.panel + tile.panels, left = part.panel_end - end;
    if (left) return panels_of(op, end, end + std::min<int64_t>(tile.panels, left));
    if (!next_op) return {op.panels, 0};
    const Lines lines = panels_of(*next_op, next.panel, next.panel_end);
    return {lines.first, std::min(lines.count, tile.panels * channel_words(op))};
  }

  int64_t apart() const { return halves_apart(op); }
};

// Several tiles of rows share the prefetch of the next panels, as in block_products.h.
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

// Likewise with a gate: computes a tile of each half, rounds them, and applies the activation.
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
// Calls f(tile, rows, ahead, reuse, piece) for AMX, in blocks along K or slice by slice, while the next panels are
// prefetched.
template <class F>
INLINE void for_channel_tiles(const ChannelPart& all, int most_panels, F f) {
  const ProductPart& part = all.part;
  const int64_t words = channel_words(all.op), weights = all.op.gate ? 2 : 1, panel_lines = words * weights;
  const DeepPanels panels = {all.op.panels, words, most_panels, (int)weights, all.apart() * words * kWidth};
  const auto one = [&](const DeepTile& deep) {
    auto* room = static_cast<int32_t*>(deep.room);
    const ChannelPiece piece = {deep.step, deep.count, deep.step ? room : nullptr, deep.is_last ? nullptr : room};
    f(deep.tile, deep.rows, deep.ahead, deep.reuse(), piece);
  };
  if (is_deep(all.op) && for_deep_tiles(panels, all.cuts, part.index, one)) return;
  const AmxReuse reuse = reuse_of(part.row_count(), words);
  const ChannelPiece whole = {0, words, nullptr, nullptr};
  const AmxScope scope(amx_shapes(amx_rows(part.row_count()), kAmxWords));
  for_amx_slices(all.cuts, part.index, panel_lines, most_panels, [&](const PartSlice& slice) {
    for_amx_tiles(part.row_count(), slice.part.panel_count(), [&](int m, const AmxRows& rows, int p, int panels) {
      const TileSpan tile = {part.row + m, slice.part.panel + p, rows.all(), panels};
      const int64_t most = tile.rows == part.row_count() ? panels : slice.part.panel_count();
      const auto streams = [&](int64_t first, int64_t end) { return all.ahead(first, end, most); };
      f(tile, rows, slice.due(streams, tile), reuse, whole);
    }, most_panels);
  });
}

// Whether the output is stored past the caches, so that its lines are not read before they are written. This is done if
// it is wider than x, as logits are, and does not fit in the second caches of two cores.
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
  const auto multiply = [&](const TileSpan& tile, const AmxRows& rows, const Streams& ahead, AmxReuse reuse,
                            const ChannelPiece& piece) {
    const TileRows to = out.place(room, tile);
    ChannelProduct product = all.product(tile, to);
    product.ask_for(ahead);
    product.passes_caches = passing && to.first != room;
    multiply_channel_amx(product, rows, tile.panels, reuse, finishing, piece);
    if (piece.to) return;
    if (to.first == room) finishing.finish_all();
    out.take(all.part.index, room, tile);
  };
  for_channel_tiles(all, kAmxPanels, multiply);
  finishing.finish_all();
  if (passing) _mm_sfence();  // such stores are not ordered with any others
}

void multiply_gated_channels_amx(const ChannelPart& all) {
  const QuantisedLinear& op = all.op;
  const TileRows out = {op.out, op.out_columns(), (bool)op.is_bf16};
  ChannelFinish finishing;
  const auto multiply = [&](const TileSpan& tile, const AmxRows& rows, const Streams& ahead, AmxReuse reuse,
                            const ChannelPiece& piece) {
    ChannelProduct both = all.gated_product(tile, out.right(tile.row * op.out_columns() + tile.panel * kWidth));
    both.ask_for(ahead);
    multiply_channel_amx(both, rows, 2 * tile.panels, reuse, finishing, piece);
  };
  for_channel_tiles(all, kAmxPanels / 2, multiply);
}
#endif

// Calls f(part, by_amx) for the parts of a product with channels.
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
    case Format::kSuperNibbles: return run_blocks<Format::kSuperNibbles, 1, E, Out>(op);
    case Format::kSuper6Bits: return run_blocks<Format::kSuper6Bits, 1, E, Out>(op);
    case Format::kSuper5Bits: return run_blocks<Format::kSuper5Bits, 1, E, Out>(op);
    case Format::kSuper3Bits: return run_blocks<Format::kSuper3Bits, 1, E, Out>(op);
    case Format::kSuper2Bits: return run_blocks<Format::kSuper2Bits, 1, E, Out>(op);
    case Format::kSuperTable: return run_blocks<Format::kSuperTable, 1, E, Out>(op);
    case Format::k5Bits: return run_blocks<Format::k5Bits, 1, E, Out>(op);
    case Format::kSymmetric5Bits: return run_blocks<Format::kSymmetric5Bits, 1, E, Out>(op);
    case Format::kChannels: return run_channels<E, Out>(op);
    default: return;  // widened formats are not quantised products
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
