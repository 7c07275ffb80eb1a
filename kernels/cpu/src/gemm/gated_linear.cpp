// y = act(x G^T) * (x U^T): the product with a weight that holds G and U. Its sums are rounded and activated without
// being stored to memory. The bits are those of the product and the activation as two ops.
#include <algorithm>

#include "gemm/deep_product.h"
#include "gemm/gate.h"
#include "gemm/linear.h"
#include "gemm/tile_amx.h"
#include "gemm/tile_fma.h"
#include "simd/parallel.h"
#include "simd/partition.h"

namespace rootgraft {
namespace {

constexpr int kWeights = 2;

// Computes the gates of a tile and then its factors, like `multiply_block` of a linear op.
template <class E, class Act>
void multiply_block(const GatedLinear& op, const ProductPart& part) {
  using Value = typename E::Value;
  const int64_t row_count = part.row_count();
  Value room[kWeights][kTileRows * kTilePanels * kWidth];
  for_tiles(part.row_count(), part.panel_count(), [&](int m, int rows, int p, int panels) {
    const int64_t row = part.row + m, panel = part.panel + p, next = panel + panels;
    const int stride = panels * kWidth;
    const int64_t lines = row_count > kTileRows ? std::min<int64_t>(kTilePanels, part.panel_end - next) * op.steps : 0;
    const int64_t from = lines * m / row_count, to = lines * (m + rows) / row_count;
    for (int i = 0; i < kWeights; i++) {
      const TileRows sums = {room[i], stride, E::kPerWord == Bf16::kPerWord};
      multiply_tile<E>({op.x + row * op.steps, op.steps, op.panel(panel) + i * op.apart(), op.panel_size(), op.steps,
                        sums, nullptr, op.panel(next) + i * op.apart() + from * kWidth, to - from},
                       rows, panels);
    }
    for (int r = 0; r < rows; r++) {
      Value* out = static_cast<Value*>(op.out) + (row + r) * op.width + panel * kWidth;
      for (int i = 0; i < stride; i += kWidth) {
        store_gated<E, Act>(room[0] + r * stride + i, room[1] + r * stride + i, out + i);
      }
    }
  });
}

#if ROOTGRAFT_AMX
// Likewise by AMX, with a panel of gates and the panel of its factors at a time.
template <class Act>
void multiply_block_amx(const GatedLinear& op, const Cuts& cuts, int64_t index) {
  const ProductPart part = cuts.part(index);
  const auto streams = [&](int64_t first, int64_t end) {
    return Streams({op.panel(first), (end - first) * op.steps}, op.apart());
  };
  const AmxScope scope(amx_shapes(amx_rows(part.row_count()), kAmxWords));
  const AmxReuse reuse = reuse_of(part.row_count(), op.steps);
  AmxEpilogue<ActivatedRows<Act>> epilogue;
  for_amx_slices(cuts, index, kWeights * op.steps, 1, [&](const PartSlice& slice) {
    for_amx_tiles(part.row_count(), slice.part.panel_count(), [&](int m, const AmxRows& rows, int p, int) {
      const int64_t row = part.row + m, panel = slice.part.panel + p;
      const TileRows to = {static_cast<uint16_t*>(op.out) + row * op.width + panel * kWidth, op.width, true};
      Product product = {op.x + row * op.steps, op.steps, op.panel(panel), op.apart(), op.steps, to, nullptr};
      if (part.row_count() > kAmxRows) product.ask_for(slice.due(streams, {row, panel, rows.all(), 1}));
      multiply_gated_amx(product, rows, reuse, epilogue);
    }, 1);
  });
}

// Likewise in blocks along K. Returns false if there is no memory for the sums.
template <class Act>
bool multiply_block_deep(const GatedLinear& op, const DeepRows& x, const Cuts& cuts, int64_t index) {
  AmxEpilogue<ActivatedRows<Act>> epilogue;
  return multiply_deep_amx(op, x, cuts, index, [&](Product& product, const DeepTile& deep) {
    const int64_t at = deep.tile.row * op.width + deep.tile.panel * kWidth;
    product.c = {static_cast<uint16_t*>(op.out) + at, op.width, true};
    multiply_gated_amx(product, deep.rows, deep.reuse(), epilogue);
  });
}
#endif

template <class E, class Act>
void run(const GatedLinear& op) {
  if (!op.rows) return;
  const int64_t multiplications = op.rows * op.steps * op.width * kWeights;
  const bool by_amx = E::kPerWord == Bf16::kPerWord && takes_amx(op.steps), is_deep = by_amx && takes_deep(op);
  const Slicing slicing = {op.steps, kWeights, by_amx && !is_deep, is_deep ? kDeepPairs : 0,
                           by_amx ? most_amx_rows(op.steps, is_deep) : 0};
  const Cuts cuts(threads_for(multiplications, kSmallProduct, op.threads), op.rows, op.width, 1, kTileRows,
                  by_amx ? kManyAmxRows : kManyProductRows, slicing);
  const DeepRows x = is_deep ? deep_rows(op, cuts.threads) : DeepRows{};
  parallel_shares(cuts.threads, cuts.count(), [&](int64_t i) {
#if ROOTGRAFT_AMX
    if (is_deep && multiply_block_deep<Act>(op, x, cuts, i)) return;
    if (by_amx) return multiply_block_amx<Act>(op, cuts, i);
#endif
    multiply_block<E, Act>(op, cuts.part(i));
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Whether this op is at least as fast as two ops. Products of bf16 by fp32 multiply-adds exist in the linear op only.
extern "C" int gated_linear_pays(int is_bf16) { return !(is_bf16 && ROOTGRAFT_FMA); }

extern "C" int gated_linear(const GatedLinear* op) {
  with_activation(op->kind, [&](auto act) {
    with_types([&](auto element) { run<decltype(element), decltype(act)>(*op); }, op->is_bf16);
  });
  return 0;
}

extern "C" int64_t gated_linear_size() { return sizeof(GatedLinear); }
