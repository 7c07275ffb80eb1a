// Tile products by AMX, see tile.h. In bf16, the sums of even and odd K are separate and are added after every 32
// values, so their bits differ from those of vector code; like these, they depend only on row and column. For bytes, A
// is signed, B is unsigned, and C is exact 32-bit integers.
#pragma once

#include "simd/amx.h"
#include "gemm/gate.h"
#include "gemm/prefetches.h"
#include "gemm/tile.h"
#include "simd/partition.h"

namespace rootgraft {

// Whether products with this many steps use AMX. If so, they do for every number of rows, as AMX rounds sums
// differently.
inline bool takes_amx(ptrdiff_t steps) { return steps % kAmxWords == 0 && has_amx(); }

}  // namespace rootgraft

#if ROOTGRAFT_AMX

namespace rootgraft {

// One or two tiles of rows. A tile has at most kAmxRows, and the second may overlap with the first.
struct AmxRows {
  int count;   // rows of each tile
  int second;  // first row of the second tile; 0 if there is none

  int all() const { return second + count; }
};

constexpr int kMostAmxRows = 2 * kAmxRows;  // rows of both tiles
constexpr int kAmxPanels = 4;               // limit of panels whose sums are in registers
constexpr int kAmxGroup = 16;               // limit of panels whose sums are computed in pieces along K

// Types of A and B: bf16; signed and unsigned bytes; unsigned and signed bytes.
enum class AmxWords { kBf16, kBytes, kUnsignedBytes };

// Calls f(Constant<0>{}), ... f(Constant<Count - 1>{}).
template <int Count, class F>
INLINE void for_constants(F f) {
  if constexpr (Count > 0) {
    for_constants<Count - 1>(f);
    f(Constant<Count - 1>{});
  }
}

template <AmxWords Kind, int C, int A, int B>
INLINE void amx_dot() {
  if constexpr (Kind == AmxWords::kBf16) amx_dot_bf16<C, A, B>();
  else if constexpr (Kind == AmxWords::kBytes) amx_dot_signed_unsigned<C, A, B>();
  else amx_dot_unsigned_signed<C, A, B>();
}

// How panels of B are used: by several rows from the first cache; by several rows from the second cache, so that A
// stays in the first; or once, from memory. In the last case lines are prefetched shortly before their use, which is a
// tenth faster than the hardware's prefetch.
enum class AmxReuse { kFirstCache, kSecondCache, kNone };

// Calls f(kReuse) for one tile of rows, or for two.
template <int R, class F>
INLINE void with_reuse(AmxReuse reuse, F f) {
  constexpr AmxReuse kOther = R == 1 ? AmxReuse::kNone : AmxReuse::kSecondCache;
  if (reuse == kOther) f(std::integral_constant<AmxReuse, kOther>{});
  else f(std::integral_constant<AmxReuse, AmxReuse::kFirstCache>{});
}

// Multiplies kAmxWords words of one or two tiles of rows, at `a` and `second`, with P panels; panel(p) is the address
// of a panel. The sums of tile r and panel p are added to those in register r P + p. each.before<i>() runs before the
// i-th multiplying instruction. Loads are placed between products, each directly before its first use.
template <AmxWords Kind, int R, int P, AmxReuse kReuse, int I = 0, class Panel, class Each>
INLINE void amx_products(const uint32_t* a, const uint32_t* second, ptrdiff_t a_bytes, const Panel& panel, ptrdiff_t k,
                         Each& each) {
  static_assert(R <= 2 && R * P <= kAmxSums);
  constexpr int kRow = I / P, kPanel = kRow ? P - 1 - I % P : I, kColumns = kAmxB + kPanel % 2;
  if constexpr (kRow == 0) {
    const uint32_t* columns = panel(kPanel) + k * kWidth;
    for (int line = kAmxWords; kReuse == AmxReuse::kNone && line < 2 * kAmxWords; line++) {
      __builtin_prefetch(columns + line * kWidth, 0, 2);
    }
    if constexpr (kReuse == AmxReuse::kSecondCache) amx_load_passing<kColumns>(columns, kWidth * sizeof(uint32_t));
    else amx_load<kColumns>(columns, kWidth * sizeof(uint32_t));
  }
  if constexpr (I % P == 0) amx_load<kAmxA + kRow>((kRow ? second : a) + k, a_bytes);
  each.template before<I>();
  amx_dot<Kind, kRow * P + kPanel, kAmxA + kRow, kColumns>();
  if constexpr (I + 1 < R * P) amx_products<Kind, R, P, kReuse, I + 1>(a, second, a_bytes, panel, k, each);
}

template <class Each>
struct BeforeProducts {
  Each& each;

  template <int>
  INLINE void before() const {
    each();
  }
};

// Likewise over `steps` words; each() runs before every multiplying instruction.
template <AmxWords Kind, int R, int P, AmxReuse kReuse = AmxReuse::kFirstCache, class Panel, class Each>
INLINE void add_by_amx(const uint32_t* const (&a)[R], ptrdiff_t a_stride, Panel panel, ptrdiff_t steps, Each each) {
  const BeforeProducts<Each> before = {each};
  for (ptrdiff_t k = 0; k < steps; k += kAmxWords) {
    amx_products<Kind, R, P, kReuse>(a[0], a[R - 1], a_stride * sizeof(uint32_t), panel, k, before);
  }
}

// Likewise, with sums that start at zero.
template <AmxWords Kind, int R, int P, AmxReuse kReuse = AmxReuse::kFirstCache, class Panel, class Each>
INLINE void sum_by_amx(const uint32_t* const (&a)[R], ptrdiff_t a_stride, Panel panel, ptrdiff_t steps, Each each) {
  for_constants<R * P>([](auto i) { amx_zero<i.value>(); });
  add_by_amx<Kind, R, P, kReuse>(a, a_stride, panel, steps, each);
}

// Number of words up to which two tiles' rows stay in the first cache while panels are read. Longer rows are multiplied
// in pieces along K, and the sums of a group of panels go through memory. Shorter pieces leave room for these sums in
// the cache.
constexpr ptrdiff_t kPieceWords = 18 * kAmxWords, kShortPieceWords = 12 * kAmxWords;
constexpr ptrdiff_t kTileSums = kAmxRows * kWidth;

// Memory of the sums of R tiles of rows and P panels, tile after tile. `from`: where they are read, null for zeros.
// `to`: where they are written, null for the target of the product.
template <class T>
struct Piece {
  const T* from;
  T* to;
};

template <int Count, class T>
INLINE void begin_piece(const Piece<T>& piece) {
  constexpr ptrdiff_t kLine = kWidth * sizeof(T);
  if (piece.from) for_constants<Count>([&](auto i) { amx_load<i.value>(piece.from + i.value * kTileSums, kLine); });
  else for_constants<Count>([](auto i) { amx_zero<i.value>(); });
}

template <int Count, class T>
INLINE void end_piece(const Piece<T>& piece) {
  for_constants<Count>([&](auto i) { amx_store<i.value>(piece.to + i.value * kTileSums, kWidth * sizeof(T)); });
}

// Rounds rows of sums, of one panel or two, to as many columns of bf16.
struct RoundedRows {
  static constexpr int kRows = 1;      // rows at a time
  static constexpr int kProducts = 1;  // number of products beside which a row is finished

  INLINE void operator()(const float* sums, int panels, uint16_t* to, ptrdiff_t, int) const {
    if (panels == 2) Bf16::store_two(to, load(sums), load(sums + kWidth));
    else Bf16::store(to, load(sums));
  }
};

// Converts rows of sums, of a panel of the gate and one of its factor, to one panel's columns: act(gate) * up, both
// rounded first.
struct GatedRows {
  static constexpr int kRows = 2;

  void (*store)(const float* sums, uint16_t* to, ptrdiff_t stride, int rows);

  INLINE void operator()(const float* sums, int, uint16_t* to, ptrdiff_t stride, int rows) const {
    store(sums, to, stride, rows);
  }
};

// The row function for an activation's kind.
GatedRows gated_rows(int64_t kind);

// The same for an activation that is known at compile time.
template <class Act>
struct ActivatedRows {
  static constexpr int kRows = 1;
  static constexpr int kProducts = 2;

  INLINE void operator()(const float* sums, int, uint16_t* to, ptrdiff_t, int) const {
    alignas(64) uint16_t rounded[2 * kWidth];
    Bf16::store_two(rounded, load(sums), load(sums + kWidth));
    store_gated<Bf16, Act>(rounded, rounded + kWidth, to);
  }
};

constexpr int kEpilogueStride = 2 * kWidth;  // floats from row to row of sums

// Sums that are still to be finished. In a local copy, the compiler keeps it in registers.
struct PendingRows {
  const float* from = nullptr;
  uint16_t* to = nullptr;
  ptrdiff_t stride = 0;
  int left = 0, panels = 0, wait = 0;

  template <class Rows>
  INLINE void finish_some(const Rows& rows) {
    const int count = left < Rows::kRows ? left : Rows::kRows;
    rows(from, panels, to, stride, count);
    to += count * stride, from += count * kEpilogueStride, left -= count;
  }
};

// Finishes sums, some rows at a time, while the next product is computed, which leaves the vector units idle.
template <class Rows>
class AmxEpilogue {
 public:
  explicit AmxEpilogue(Rows rows = {}) : rows_(rows) {}
  ~AmxEpilogue() { finish(pending); }

  // Returns memory for the sums of two tiles of rows and two panels. From the next product on, they are written to `c`.
  float* begin(const TileRows& c, int rows, int panels) {
    finish(pending);
    pending = {sums_, static_cast<uint16_t*>(c.first), c.stride, rows, panels, 0};
    return sums_;
  }

  // Called before a multiplying instruction. Finishes one row at each call, or several at as many pairs of calls.
  INLINE void step(PendingRows& left) const {
    if (!left.left) return;
    if constexpr (Rows::kRows > 1) {
      if (++left.wait % (2 * Rows::kRows)) return;
    }
    left.finish_some(rows_);
  }

  void finish(PendingRows& left) const {
    while (left.left) left.finish_some(rows_);
  }

  const Rows& rows() const { return rows_; }

  PendingRows pending;

 private:
  alignas(64) float sums_[2 * kAmxRows * kEpilogueStride];
  Rows rows_;
};

// Computes a product without c_scale for which takes_amx() is true, in an AmxScope of amx_shapes(rows, kAmxWords). One
// tile of rows may use panels once; two tiles may take them from the second cache.
template <AmxWords Kind>
void multiply_amx(const Product& product, const AmxRows& rows, int panels, AmxReuse reuse = AmxReuse::kFirstCache);

// Likewise from bf16 to bf16, for at most kAmxGroup panels. Results are stored when the epilogue continues or ends.
void multiply_amx(const Product& product, const AmxRows& rows, int panels, AmxReuse reuse,
                  AmxEpilogue<RoundedRows>& epilogue);

// Likewise for a panel of the gate and one of its factor, b_stride apart, to one panel's columns.
template <class Act>
void multiply_gated_amx(const Product& product, const AmxRows& rows, AmxReuse reuse,
                        AmxEpilogue<ActivatedRows<Act>>& epilogue);

// How this many rows of this many words use panels. The rows of two tiles stay in the first cache; with many rows, a
// piece of them along K does, and sums go through memory.
inline AmxReuse reuse_of(int rows, int64_t words) {
  // bytes of two tiles' rows that stay in the first cache while panels are read
  constexpr int64_t kFirstCache = 40 << 10;
  constexpr int kMany = 128;                 // number of rows from which pieces are faster
  if (rows <= kAmxRows) return AmxReuse::kNone;
  const bool rows_stay = kMostAmxRows * words * (int64_t)sizeof(uint32_t) <= kFirstCache;
  return rows >= kMany || (rows_stay && rows > kMostAmxRows) ? AmxReuse::kSecondCache : AmxReuse::kFirstCache;
}

// Calls f(slice) for slices of an op's part. With many rows, a slice, the next slice and the rows fit in the second
// cache; reading the rows again takes little time compared with the products. `panel_lines`: lines of 64 bytes of a
// panel; `pair`: number of panels that are multiplied together; `least`: smallest number of panels of a slice, unless
// they are very long.
template <class F>
INLINE void for_amx_slices(const Cuts& cuts, int64_t index, int64_t panel_lines, int64_t pair, F f, int64_t least = 6) {
  // approximate lines of a slice; limit of lines for the smallest number of panels
  constexpr int64_t kLines = 2304, kMostLines = 6 << 10;
  const ProductPart part = cuts.part(index);
  const int64_t most = std::max({pair, kLines / panel_lines, std::min(least, kMostLines / panel_lines)});
  for_slices(cuts, index, part.row_count() > kMostAmxRows ? most / pair * pair : part.panel_count(), f);
}

// Number of rows of each tile if `count` rows are cut into equal ones.
inline int amx_rows(int count) {
  const int tiles = (count + kAmxRows - 1) / kAmxRows;
  return (count + tiles - 1) / tiles;
}

// Calls f(first row, rows, first panel, panels) for products that cover count x panels: all panels of some rows before
// the next rows. So rows stay in the first cache, and panels are read from the second cache in memory order.
template <class F>
INLINE void for_amx_tiles(int count, int panels, F f, int most = kAmxPanels) {
  const int each = amx_rows(count);
  const auto clipped = [&](int row) { return row < count - each ? row : count - each; };
  for (int row = 0; row < count; row += 2 * each) {
    const int first = clipped(row), second = row + each < count ? clipped(row + each) - first : 0;
    for (int panel = 0; panel < panels; panel += most) {
      f(first, AmxRows{each, second}, panel, panels - panel < most ? panels - panel : most);
    }
  }
}

}  // namespace rootgraft

#endif
