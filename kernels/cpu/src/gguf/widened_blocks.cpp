#include "gguf/widened_blocks.h"

#include <atomic>
#include <new>
#include <vector>

#include "gemm/deep_product.h"
#include "gemm/epilogue.h"
#include "gemm/gate.h"
#include "gemm/linear.h"
#include "gemm/tile_amx.h"
#include "gguf/block_rows_amx.h"
#include "gguf/widening.h"
#include "simd/parallel.h"
#include "simd/partition.h"

namespace rootgraft {
namespace {

// up to this many rows use a panel once or twice, so it is widened into the first cache
constexpr int64_t kFewRows = 32;
constexpr int64_t kManyPanels = 32;        // panels of a part if many rows use them
// bytes of widened panels for more rows: half of them are used while the other half is widened
constexpr int64_t kRoomBytes = 512 << 10;

// Whether many rows are multiplied in pieces along K.
bool takes_pieces(const QuantisedLinear& op) {
#if ROOTGRAFT_AMX
  const int64_t words = op.width / Bf16::kPerWord;
  return op.is_bf16 && takes_amx(words) && words > kPieceWords;
#else
  return false;
#endif
}

#if ROOTGRAFT_AMX
// Number of pieces along K, and the block of 32 values with which one begins.
int64_t piece_count(const QuantisedLinear& op) {
  constexpr int64_t kBlocks = kPieceWords / kAmxWords;
  return (op.width / kBlockValues + kBlocks - 1) / kBlocks;
}
int64_t piece_edge(const QuantisedLinear& op, int64_t i) { return op.width / kBlockValues * i / piece_count(op); }

constexpr ptrdiff_t kPairSums = 4 * kTileSums;  // sums of two tiles of rows and two panels

// Multiplies one or two tiles of rows with one or two panels. step() is called before each multiplying instruction.
template <int R, int P, AmxReuse kReuse, class Rows, class Step>
void multiply_tiles(const Product& p, const AmxRows& rows, AmxEpilogue<Rows>& epilogue, const Piece<float>& piece,
                    Step step) {
  const uint32_t *a[R], *b = p.b;
  const ptrdiff_t b_stride = p.b_stride;
  a[0] = p.a;
  if constexpr (R == 2) a[1] = p.a + rows.second * p.a_stride;
  PendingRows pending = epilogue.pending;
  begin_piece<R * P>(piece);
  add_by_amx<AmxWords::kBf16, R, P, kReuse>(a, p.a_stride, [=](int i) { return b + i * b_stride; }, p.steps, [&] {
    epilogue.step(pending);
    step();
  });
  epilogue.pending = pending;
  if (piece.to) return end_piece<R * P>(piece);
  float* to = p.c.is_bf16 ? epilogue.begin(p.c, rows.all(), P) : static_cast<float*>(p.c.first);
  const ptrdiff_t stride = p.c.is_bf16 ? kEpilogueStride : p.c.stride;
  for_constants<P>([&](auto i) {
    amx_store<i.value>(to + i.value * kWidth, stride * sizeof(float));
    if constexpr (R == 2) amx_store<P + i.value>(to + rows.second * stride + i.value * kWidth, stride * sizeof(float));
  });
}

template <int P, class Rows, class Step>
INLINE void multiply_rows(const Product& p, const AmxRows& rows, AmxReuse reuse, AmxEpilogue<Rows>& epilogue,
                          const Piece<float>& piece, Step step) {
  if (!rows.second) return multiply_tiles<1, P, AmxReuse::kFirstCache>(p, rows, epilogue, piece, step);
  with_reuse<2>(reuse, [&](auto use) { multiply_tiles<2, P, use.value>(p, rows, epilogue, piece, step); });
}
#endif

// Multiplies some rows with some widened panels. With a gate, a panel stands for two.
template <class E>
struct WidenedPart {
  const QuantisedLinear& op;
  const DeepRows& x;
  const ProductPart& part;
  const int64_t steps = op.width / E::kPerWord, panel_words = steps * kWidth;

  // Number of panels that are widened at a time; `few` if there are few rows.
  int64_t group(int few) const {
    if (part.row_count() <= kFewRows) return few;
    const int64_t room = kRoomBytes / 2 / (panel_words * halves() * (int64_t)sizeof(uint32_t));
    return std::max<int64_t>(few, room / kTilePanels * kTilePanels);
  }

  // number of AMX tiles: steps for each block
  int row_tiles() const { return (part.row_count() + kAmxRows - 1) / kAmxRows; }
  int halves() const { return op.gate ? 2 : 1; }
  int64_t apart() const { return op.gate ? op.columns / 2 / kWidth : 0; }

  Product product(const TileSpan& tile, const uint32_t* b, const TileRows& c) const {
    return {static_cast<const uint32_t*>(op.x) + tile.row * steps, steps, b, panel_words, steps, c, nullptr};
  }

  // Returns memory for this many words that the thread keeps, in whole cache lines.
  static uint32_t* room_of(int64_t words) {
    static thread_local std::vector<Words> rooms;
    if ((int64_t)rooms.size() * kWidth < words) rooms.resize((words + kWidth - 1) / kWidth);
    return reinterpret_cast<uint32_t*>(rooms.data());
  }

  // Calls f(widened, panel, count, step) for groups of panels; step() widens a part of the next group.
  template <class Fn>
  INLINE void for_groups(int64_t group, Fn f) const {
    const int64_t room = group * halves() * panel_words;
    uint32_t *now = room_of(2 * room), *next = now + room;
    Widening<E> widening;
    const auto begin = [&](int64_t panel, uint32_t* to) {
      const int64_t count = std::min(group, part.panel_end - panel);
      if (count > 0) widening.begin(op, {panel, count, apart(), 0, op.width / kBlockValues}, 1, to);
    };
    begin(part.panel, now);
    for (int64_t panel = part.panel; panel < part.panel_end; panel += group) {
      widening.finish();
      begin(panel + group, next);
      f(now, panel, (int)std::min(group, part.panel_end - panel), [&] { widening.step_now(); });
      std::swap(now, next);
    }
  }

  // Multiplies with widened panels; `panel` is the number of the first one.
  template <class Out>
  void multiply(const uint32_t* widened, int64_t panel, int count, Out& out) const {
    alignas(64) float room[kTileRows * kRoomStride];
    for_tiles(part.row_count(), count, [&](int m, int rows, int p, int panels) {
      const TileSpan tile = {part.row + m, panel + p, rows, panels};
      multiply_tile<E>(product(tile, widened + p * panel_words, out.place(room, tile)), rows, panels);
      out.take(part.index, room, tile);
    });
  }

  // Likewise with a gate: the panels of its factor follow the widened panels of the gate.
  template <class Act>
  void multiply_gated(const uint32_t* widened, int64_t panel, int count) const {
    using Value = typename E::Value;
    alignas(64) Value room[2][kTileRows * kRoomStride];
    for_tiles(part.row_count(), count, [&](int m, int rows, int p, int panels) {
      const TileSpan tile = {part.row + m, panel + p, rows, panels};
      for (int half = 0; half < 2; half++) {
        const TileRows to = {room[half], kRoomStride, E::kPerWord == Bf16::kPerWord};
        multiply_tile<E>(product(tile, widened + (half * count + p) * panel_words, to), rows, panels);
      }
      for (int r = 0; r < rows; r++) {
        Value* to = static_cast<Value*>(op.out) + (tile.row + r) * op.out_columns() + tile.panel * kWidth;
        for (int i = 0; i < panels * kWidth; i += kWidth) {
          const int at = r * kRoomStride + i;
          store_gated<E, Act>(room[0] + at, room[1] + at, to + i);
        }
      }
    });
  }

#if ROOTGRAFT_AMX
  // Likewise by AMX, with step() before each multiplying instruction.
  template <class Out, class Step>
  void multiply_amx(const uint32_t* widened, int64_t panel, int count, Out& out, AmxEpilogue<RoundedRows>& epilogue,
                    Step step) const {
    alignas(64) float room[kMostAmxRows * kRoomStride];
    const AmxReuse reuse = reuse_of(part.row_count(), steps);
    const auto multiply = [&](int m, const AmxRows& rows, int p, int panels) {
      const TileSpan tile = {part.row + m, panel + p, rows.all(), panels};
      const Product one = product(tile, widened + p * panel_words, out.place(room, tile));
      with_constant<2>(panels, [&](auto pair) { multiply_rows<pair.value>(one, rows, reuse, epilogue, {}, step); });
      out.take(part.index, room, tile);
    };
    for_amx_tiles(part.row_count(), count, multiply, 2);
  }

  // Calls f(product of a tile, its rows, tile, sums, step) for many rows, which are multiplied with some panels in
  // pieces along K: two tiles' rows stay in the first cache, the widened panels of this piece and the next one in the
  // second, and sums are kept in memory.
  template <class F>
  INLINE void for_pieces(F f) const {
    constexpr int64_t kPanels = 16;
    const int64_t pieces = piece_count(op);
    const int64_t group = kPanels / halves(), room = kPanels * kPieceWords * kWidth;
    const int64_t all_sums = (row_tiles() + 1) / 2 * (kPanels / 2) * kPairSums;
    uint32_t *now = room_of(2 * room + all_sums), *next = now + room;
    float* sums = reinterpret_cast<float*>(now + 2 * room);
    Widening<E> widening;
    const auto span = [&](int64_t panel, int64_t i) {
      const int64_t from = piece_edge(op, i);
      return WidenedSpan{panel, std::min(group, part.panel_end - panel), apart(), from, piece_edge(op, i + 1) - from};
    };
    widening.begin(op, span(part.panel, 0), row_tiles(), now);
    for (int64_t panel = part.panel; panel < part.panel_end; panel += group) {
      for (int64_t i = 0; i < pieces; i++) {
        const WidenedSpan here = span(panel, i);
        const int64_t words = here.blocks * kAmxWords;
        const bool is_last = i + 1 == pieces;
        widening.finish();
        if (!is_last) widening.begin(op, span(panel, i + 1), row_tiles(), next);
        else if (panel + group < part.panel_end) widening.begin(op, span(panel + group, 0), row_tiles(), next);
        float* kept = sums;
        for_amx_tiles(part.row_count(), (int)here.panels, [&](int m, const AmxRows& rows, int p, int panels) {
          const TileSpan tile = {part.row + m, panel + p, rows.all(), panels};
          Product one = product(tile, now + p * words * kWidth, {});
          one.a = x.at(tile.row, here.block * kAmxWords, words), one.a_stride = x.stride(words), one.steps = words;
          one.b_stride = (op.gate ? here.panels : 1) * words * kWidth;
          f(one, rows, tile, Piece<float>{i ? kept : nullptr, is_last ? nullptr : kept}, [&] { widening.step(); });
          kept += kPairSums;
        }, 2 / halves());
        std::swap(now, next);
      }
    }
  }

  template <class Out>
  void multiply_many_amx(Out& out, AmxEpilogue<RoundedRows>& epilogue) const {
    alignas(64) float room[kMostAmxRows * kRoomStride];
    for_pieces([&](Product& one, const AmxRows& rows, const TileSpan& tile, const Piece<float>& piece, auto step) {
      if (!piece.to) one.c = out.place(room, tile);
      with_constant<2>(tile.panels, [&](auto pair) {
        multiply_rows<pair.value>(one, rows, AmxReuse::kSecondCache, epilogue, piece, step);
      });
      if (!piece.to) out.take(part.index, room, tile);
    });
  }

  void multiply_many_gated_amx(AmxEpilogue<GatedRows>& epilogue) const {
    const TileRows out = {op.out, op.out_columns(), true};
    for_pieces([&](Product& both, const AmxRows& rows, const TileSpan& tile, const Piece<float>& piece, auto step) {
      both.c = out.right(tile.row * op.out_columns() + tile.panel * kWidth);
      multiply_rows<2>(both, rows, AmxReuse::kSecondCache, epilogue, piece, step);
    });
  }

  template <class Step>
  void multiply_gated_amx(const uint32_t* widened, int64_t panel, int count, AmxEpilogue<GatedRows>& epilogue,
                          Step step) const {
    const AmxReuse reuse = reuse_of(part.row_count(), steps);
    const TileRows out = {op.out, op.out_columns(), true};
    const auto multiply = [&](int m, const AmxRows& rows, int p, int) {
      const TileSpan tile = {part.row + m, panel + p, rows.all(), 1};
      const TileRows to = out.right(tile.row * op.out_columns() + tile.panel * kWidth);
      Product both = product(tile, widened + p * panel_words, to);
      both.b_stride = count * panel_words;
      multiply_rows<2>(both, rows, reuse, epilogue, {}, step);
    };
    for_amx_tiles(part.row_count(), count, multiply, 1);
  }
#endif
};

template <class E, class Out>
void multiply_part(const QuantisedLinear& op, const DeepRows& x, const ProductPart& part, Out& out) {
  const WidenedPart<E> all = {op, x, part};
#if ROOTGRAFT_AMX
  if (BlockRowsPart::takes(op, part)) return BlockRowsPart(op, part).multiply(out);
  if (E::kPerWord == Bf16::kPerWord && takes_amx(all.steps)) {
    const AmxScope scope(amx_shapes(amx_rows(part.row_count()), kAmxWords));
    AmxEpilogue<RoundedRows> epilogue;
    if (part.row_count() >= kPartRows && takes_pieces(op)) return all.multiply_many_amx(out, epilogue);
    return all.for_groups(all.group(2), [&](const uint32_t* widened, int64_t panel, int count, auto step) {
      all.multiply_amx(widened, panel, count, out, epilogue, step);
    });
  }
#endif
  all.for_groups(all.group(kTilePanels), [&](const uint32_t* widened, int64_t panel, int count, auto) {
    all.multiply(widened, panel, count, out);
  });
}

template <class E>
void multiply_gated_part(const QuantisedLinear& op, const DeepRows& x, const ProductPart& part) {
  const WidenedPart<E> all = {op, x, part};
#if ROOTGRAFT_AMX
  if (BlockRowsPart::takes(op, part)) {
    return with_activation(op.gate - 1, [&](auto act) { BlockRowsPart(op, part).multiply_gated<decltype(act)>(); });
  }
  if (E::kPerWord == Bf16::kPerWord && takes_amx(all.steps)) {
    const AmxScope scope(amx_shapes(amx_rows(part.row_count()), kAmxWords));
    AmxEpilogue<GatedRows> epilogue(gated_rows(op.gate - 1));
    if (part.row_count() >= kPartRows && takes_pieces(op)) return all.multiply_many_gated_amx(epilogue);
    return all.for_groups(all.group(1), [&](const uint32_t* widened, int64_t panel, int count, auto step) {
      all.multiply_gated_amx(widened, panel, count, epilogue, step);
    });
  }
#endif
  with_activation(op.gate - 1, [&](auto act) {
    all.for_groups(all.group(kTilePanels), [&](const uint32_t* widened, int64_t panel, int count, auto) {
      all.template multiply_gated<decltype(act)>(widened, panel, count);
    });
  });
}

// Lays out x for pieces along K.
DeepRows rows_of(const QuantisedLinear& op, int threads) {
  const DeepRows x = {static_cast<const uint32_t*>(op.x), op.rows, op.width / Bf16::kPerWord};
#if ROOTGRAFT_AMX
  if (op.rows >= kPartRows && takes_pieces(op)) {
    return deep_rows(x, piece_count(op), [&](int64_t i) { return piece_edge(op, i) * kAmxWords; }, threads);
  }
#endif
  return x;
}

// Calls f(x, part) on all threads. Throws std::bad_alloc if one of the threads does.
template <class F>
void for_parts(const QuantisedLinear& op, const Cuts& cuts, F f) {
  const DeepRows x = rows_of(op, cuts.threads);
  std::atomic<bool> has_memory{true};
  parallel_shares(cuts.threads, cuts.count(), [&](int64_t i) {
    try {
      f(x, cuts.part(i));
    } catch (const std::bad_alloc&) {
      has_memory = false;
    }
  });
  if (!has_memory) throw std::bad_alloc();
}

Cuts cuts_of(const QuantisedLinear& op) {
  return Cuts(op.used_threads(), op.rows, op.out_columns(), 1, kTileRows, kManyProductRows,
              {op.width / 2, op.gate ? 2 : 1, false, takes_pieces(op) ? kManyPanels / (op.gate ? 2 : 1) : 0});
}

template <class E, class Out>
void run(const QuantisedLinear& op) {
  const Cuts cuts = cuts_of(op);
  Out out(op, cuts.count());
  for_parts(op, cuts, [&](const DeepRows& x, const ProductPart& part) { multiply_part<E>(op, x, part, out); });
  out.finish();
}

}  // namespace

void multiply_widened_blocks(const QuantisedLinear& op) {
  if (!op.rows) return;
  with_types([&](auto element, auto to) {
    using E = decltype(element);
    const auto gated = [&](const DeepRows& x, const ProductPart& part) { multiply_gated_part<E>(op, x, part); };
    if (op.gate) for_parts(op, cuts_of(op), gated);
    else if (op.at) run<E, Searched<Fp32>>(op);
    else run<E, Stored<Fp32, decltype(to)>>(op);
  }, op.is_bf16, op.out_is_bf16);
}

}  // namespace rootgraft
