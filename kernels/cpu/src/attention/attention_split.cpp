// Attention of a query tile over one split of its context, in the type of the caches.
#include "attention/attention_direct.h"
#include "attention/attention_panels.h"

namespace rootgraft {
namespace {

constexpr int kFewQueries = kTileRows;  // up to this number, queries need no panels

// Weights for the block's keys, which are laid out in panels first.
template <class E>
void weigh_panels(const Block<E>& block) {
  using W = typename Operands<E>::Type;
  const int words = (int)(block.op.head_dim / W::kPerWord);
  lay_out_keys(block);
  if (kBlockFits && block.plain) {
    return for_tiles<kTileRows, 1>(block.tile.count, 1, [&](int m, int rows, int, int) {
      with_constant<kTileRows>(rows, [&](auto count) { score_and_weigh<E, count.value>(block, m); });
    });
  }
  multiply<W>({block.queries, words, block.scratch.keys, words * kWidth, words, {block.scratch.scores, kBlock}, nullptr},
              block.tile.count, block.rows.panels);
  for (int m = 0; m < block.tile.count; m++) weigh<E, W>(block, m);
}

// Adds values of `steps` words of keys, times the weights, to MR queries' sums of kTilePanels panels, like multiply().
// The loop has no prefetches, as with them the compiler would store all sums.
template <class W, int MR>
__attribute__((noinline)) void add_value_tile(const Product& p) {
  Floats sums[MR][kTilePanels];
  float* to = static_cast<float*>(p.c.first);
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < kTilePanels; v++) {
      sums[m][v] = p.c_scale ? load(to + m * p.c.stride + v * kWidth) * broadcast(p.c_scale[m]) : broadcast(0.0f);
    }
  }
  const uint32_t *a = p.a, *b = p.b;
  const ptrdiff_t a_stride = p.a_stride, b_stride = p.b_stride, steps = p.steps;
#pragma GCC unroll 2
  for (ptrdiff_t k = 0; k < steps; k++) {
    Words column[kTilePanels];
#pragma GCC unroll 4
    for (int v = 0; v < kTilePanels; v++) column[v] = load_words(b + v * b_stride + k * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      const Words weight = broadcast_word(a[m * a_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kTilePanels; v++) sums[m][v] = W::dot(weight, column[v], sums[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < kTilePanels; v++) store(to + m * p.c.stride + v * kWidth, sums[m][v]);
  }
}

template <class E>
void add_value_panels(const Block<E>& block) {
  using W = typename Operands<E>::Type;
  constexpr int64_t kWords = kBlock / W::kPerWord;
  const Attention& op = block.op;
  const int keys = block.rows.panels * kWidth;
  lay_out_values(block);
  const int panels = (int)(op.value_dim / kWidth);
  const Product product = {reinterpret_cast<const uint32_t*>(block.scratch.scores), kBlock, block.scratch.values,
                           kWords * kWidth, keys / W::kPerWord, {block.result.values, op.value_dim}, block.shrink()};
  if (!kBlockFits || panels % kTilePanels) return multiply<W>(product, block.tile.count, panels);
  for_tiles(block.tile.count, panels, [&](int m, int rows, int panel, int) {
    Product tile = product;
    tile.a += m * product.a_stride;
    tile.b += panel * product.b_stride;
    tile.c = {block.result.values + m * op.value_dim + panel * kWidth, op.value_dim};
    if (product.c_scale) tile.c_scale += m;
    with_constant<kTileRows>(rows, [&](auto count) { add_value_tile<W, count.value>(tile); });
  });
}

template <class E, int N>
void weigh_few(const Block<E>& block) {
  constexpr int kMost = N <= 4 ? 2 : 1;  // number of panels whose columns and sums fit in the registers
  const int words = (int)(block.op.head_dim / E::kPerWord);
  const BlockRows& rows = block.rows;
  for_tiles<N, kMost>(N, rows.panels, [&](int, int, int panel, int count) {
    const auto score = [&](auto key) {
      with_constant<kMost>(count, [&](auto panels) {
        score_rows<E, N, panels.value>(block.queries, words, key, block.scratch.scores + panel * kWidth,
                                       block.scratch.keys, block.ahead);
      });
    };
    const void* cache = block.op.k_cache;
    if (rows.whole) {
      const uint32_t* first = rows.panel(cache, block.head, panel);
      const uint32_t* second = rows.panel(cache, block.head, panel + count - 1);
      score([=](int i) { return (i < kWidth ? first : second) + i % kWidth * words; });
    } else {
      score([&](int i) { return rows.row(cache, block.head, panel * kWidth + i); });
    }
  });
  for (int m = 0; m < N; m++) weigh(block, m);
}

template <class E, int N>
void add_values_of_few(const Block<E>& block) {
  for_tiles(N, (int)(block.op.value_dim / kWidth), [&](int, int, int panel, int count) {
    with_constant<kTilePanels>(count, [&](auto panels) {
      add_value_rows<E, N, panels.value>(block.op, block.rows, block.head, panel * kWidth,
                                         reinterpret_cast<const uint32_t*>(block.scratch.scores),
                                         block.shrink(), block.result.values, block.ahead);
    });
  });
}

template <class E>
void attend_block(const Block<E>& block) {
  if (block.tile.count > kFewQueries) {
    weigh_panels(block);
    return add_value_panels(block);
  }
  with_constant<kFewQueries>(block.tile.count, [&](auto count) {
    weigh_few<E, count.value>(block);
    add_values_of_few<E, count.value>(block);
  });
}

}  // namespace

template <class E>
void attend(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result, bool resumes) {
  thread_local Scratch scratch;
#if ROOTGRAFT_AMX
  if constexpr (E::kPerWord == Bf16::kPerWord) {
    if (attends_by_amx(op)) return attend_by_amx(op, stretch, next, result, resumes, scratch);
  }
#endif
  using W = typename Operands<E>::Type;
  const QueryTile& tile = *stretch.tile;
  const bool few = tile.count <= kFewQueries;
  const int64_t words = op.head_dim / (few ? E::kPerWord : W::kPerWord);
  if (few && !stretch.continues) gather_queries<E>(op, tile, scratch);
  if (!few && !stretch.continues) gather_queries<E, W>(op, tile, scratch);
  walk_blocks(op, stretch, next, result, resumes, scratch.end, [&](const BlockWork& work) {
    for (int head = 0; head < tile.heads; head++) {
      const int first = head * tile.count;
      attend_block<E>({work, head, result.from(first, op.value_dim), scratch.queries + first * words, scratch});
    }
  });
}

template void attend<Bf16>(const Attention&, const Stretch&, const Stretch&, const Partial&, bool);
template void attend<Fp32>(const Attention&, const Stretch&, const Stretch&, const Partial&, bool);

}  // namespace rootgraft
