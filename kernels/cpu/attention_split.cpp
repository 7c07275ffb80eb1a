// Attention of a query tile over one split of its context: scores, online softmax, weighted values, block by block.
#include <algorithm>
#include <limits>

#include "attention_direct.h"

namespace rootgraft {
namespace {

constexpr int kFewQueries = kTileRows;  // up to so many need no panels

struct alignas(64) Scratch {
  uint32_t queries[kTileQueries * kMaxHeadDim];  // A of the scores, by KV head
  uint32_t keys[kBlock * kMaxHeadDim];           // B of the scores: [panel of 16 keys][word of the head][key]
  uint32_t values[kBlock * kMaxHeadDim];         // B of the output: [panel of 16 dimensions][word of keys][dimension]
  float scores[kTileQueries * kBlock];           // of one KV head; then, in place, the weights as A of the output
  float shrink[kTileQueries];                    // of one KV head: what a new maximum does to older sums
};

// What a block is computed from and with, for one KV head of the tile.
template <class E>
struct Block {
  const Attention& op;
  const QueryTile& tile;
  int64_t first_key;
  const BlockRows<E>& rows;
  int head;
  const uint32_t* queries;
  Partial result;
  bool begins;  // the result holds no values yet
  Ahead<E>& ahead;
  Scratch& scratch;

  const float* shrink() const { return begins ? nullptr : scratch.shrink; }
};

// f(m, row, query) for the queries of a tile in order.
template <class F>
INLINE void for_queries(const QueryTile& tile, F f) {
  int m = 0;
  for (int p = 0; p < tile.num_parts; p++) {
    const Queries& part = tile.parts[p];
    for (int i = 0; i < part.count; i++) f(m++, part.row, part.first + i);
  }
}

template <class E>
void gather_queries(const Attention& op, const QueryTile& tile, Scratch& scratch) {
  using Value = typename E::Value;
  const int64_t group = op.group(), words = op.head_dim / E::kPerWord;
  for (int head = 0; head < tile.heads; head++) {
    for_queries(tile, [&](int m, int64_t row, int64_t query) {
      const int64_t token = op.query_start[row] + query / group;
      const int64_t from = token * op.heads + (tile.first_head + head) * group + query % group;
      std::memcpy(scratch.queries + (head * tile.count + m) * words,
                  static_cast<const Value*>(op.q) + from * op.head_dim, op.head_dim * sizeof(Value));
    });
  }
}

template <class E>
void score_panels(const Block<E>& block) {
  const int words = (int)(block.op.head_dim / E::kPerWord), panels = block.rows.panels;
  uint32_t* out = block.scratch.keys;
  for (int panel = 0; panel < panels; panel++) {
    const uint32_t* keys[kWidth];
    for (int i = 0; i < kWidth; i++) keys[i] = block.rows.row(block.op.k_cache, block.head, panel * kWidth + i);
    block.ahead.step(kWidth);
    transpose_rows(keys, words, out + panel * words * kWidth);
  }
  multiply<E>({block.queries, words, out, words * kWidth, words, {block.scratch.scores, kBlock}, nullptr},
              block.tile.count, panels);
}

template <class E>
void add_value_panels(const Block<E>& block) {
  constexpr int64_t kWords = kBlock / E::kPerWord;
  const Attention& op = block.op;
  const int keys = block.rows.panels * kWidth;
  for (int key = 0; key < keys; key += E::kPerWord) {
    uint32_t* out = block.scratch.values + key / E::kPerWord * kWidth;
    const uint32_t* first = block.rows.row(op.v_cache, block.head, key);
    const uint32_t* second = block.rows.row(op.v_cache, block.head, key + E::kPerWord - 1);
    block.ahead.step(E::kPerWord);
    for (int64_t d = 0; d < op.head_dim; d += kWidth, out += kWords * kWidth) {
      store_words(out, value_words<E>(first, second, d));
    }
  }
  multiply<E>({reinterpret_cast<const uint32_t*>(block.scratch.scores), kBlock, block.scratch.values, kWords * kWidth,
               keys / E::kPerWord, {block.result.values, op.head_dim}, block.shrink()},
              block.tile.count, (int)(op.head_dim / kWidth));
}

template <class E, int N>
void score_few(const Block<E>& block) {
  constexpr int kMost = N <= 4 ? 2 : 1;  // panels whose columns and sums fit the registers
  const int words = (int)(block.op.head_dim / E::kPerWord);
  const BlockRows<E>& rows = block.rows;
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
}

template <class E, int N>
void add_values_of_few(const Block<E>& block) {
  for_tiles(N, (int)(block.op.head_dim / kWidth), [&](int, int, int panel, int count) {
    with_constant<kTilePanels>(count, [&](auto panels) {
      add_value_rows<E, N, panels.value>(block.op, block.rows, block.head, panel * kWidth,
                                         reinterpret_cast<const uint32_t*>(block.scratch.scores),
                                         block.shrink(), block.result.values, block.ahead);
    });
  });
}

// The scores of a block, in base 2: capped, and -infinity outside keys [begin, end).
void cap_and_mask(float* scores, int panels, int64_t begin, int64_t end, const Attention& op) {
  const float scale = (float)op.scale, soft_cap = (float)op.soft_cap;
  for (int v = 0; v < panels; v++) {
    Floats score = load(scores + v * kWidth);
    if (soft_cap) {  // cap * tanh(s / cap), with tanh(x) = 2 sigmoid(2 x) - 1
      const Floats tanh = fma(sigmoid(score * broadcast(2.0f * scale / soft_cap)), broadcast(2.0f), broadcast(-1.0f));
      score = tanh * broadcast(soft_cap * kLog2E);
    }
    const auto lane = [&](int64_t i) { return (int)std::clamp<int64_t>(i - v * kWidth, 0, kWidth); };
    store(scores + v * kWidth, keep_lanes(score, lane(begin), lane(end), -std::numeric_limits<float>::infinity()));
  }
}

// The scores of one query against a block become weights 2^(score - largest), [begin, end) being the keys it sees;
// older sums shrink when the largest score grows.
template <class E>
void weigh(const Block<E>& block, int m, int64_t begin, int64_t end) {
  const Attention& op = block.op;
  const int panels = block.rows.panels;
  float *scores = block.scratch.scores + m * kBlock, *lanes = block.result.lanes + m * kWidth;
  if (op.soft_cap || begin > 0 || end < panels * kWidth) cap_and_mask(scores, panels, begin, end, op);
  const float factor = op.soft_cap ? 1.0f : (float)op.scale * kLog2E;
  Floats best = load(scores);
  for (int v = 1; v < panels; v++) best = max(best, load(scores + v * kWidth));
  const float before = block.result.largest[m], now = std::max(before, largest(best) * factor);
  block.result.largest[m] = now;
  const bool grows = now != before;  // seldom after a few blocks
  const Floats shrink = grows ? exp2(broadcast(before - now)) : broadcast(1.0f), shift = broadcast(-now);
  Floats total = load(lanes) * shrink;
  auto* weights = reinterpret_cast<typename E::Value*>(scores);
  for (int v = 0; v < panels; v++) {
    const Floats weight = E::weight_exp2(fma(load(scores + v * kWidth), broadcast(factor), shift));
    total = total + weight;
    E::store(weights + v * kWidth, weight);
  }
  store(lanes, total);
  block.scratch.shrink[m] = first_lane(shrink);
}

template <class E>
void attend_block(const Block<E>& block) {
  const bool few = block.tile.count <= kFewQueries;
  const auto with_count = [&](auto f) { with_constant<kFewQueries>(block.tile.count, f); };
  if (few) with_count([&](auto count) { score_few<E, count.value>(block); });
  else score_panels<E>(block);
  for_queries(block.tile, [&](int m, int64_t row, int64_t query) {
    const int64_t end = block.op.position(row, query) + 1 - block.first_key;
    weigh<E>(block, m, end - block.op.window, end);
  });
  if (few) with_count([&](auto count) { add_values_of_few<E, count.value>(block); });
  else add_value_panels<E>(block);
}

// The first key of a stretch's first block.
int64_t first_key(const Stretch& stretch) {
  return stretch.tile ? std::max(stretch.split * kSplit, stretch.tile->begin / kBlock * kBlock) : 0;
}

}  // namespace

template <class E>
void prefetch_stretch(const Attention& op, const Stretch& stretch) {
  const BlockRows<E> rows(op, stretch.tile, first_key(stretch));
  Ahead<E>(op, rows, 1).finish();
}

template <class E>
void attend(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result, bool resumes) {
  thread_local Scratch scratch;
  const QueryTile& tile = *stretch.tile;
  const int vectors = tile.vectors();
  const int64_t words = op.head_dim / E::kPerWord;
  if (!resumes) {
    std::fill_n(result.largest, vectors, kNothing);
    std::fill_n(result.lanes, vectors * kWidth, 0.0f);
  }
  gather_queries<E>(op, tile, scratch);
  const int64_t end = std::min((stretch.split + 1) * kSplit, tile.end);
  int64_t key = first_key(stretch);
  bool begins = !resumes;
  for (BlockRows<E> rows(op, &tile, key); key < end; key += kBlock, begins = false) {
    const bool last = key + kBlock >= end;
    const BlockRows<E> ahead_rows(op, last ? next.tile : &tile, last ? first_key(next) : key + kBlock);
    Ahead<E> ahead(op, ahead_rows, tile.heads * rows.panels);
    for (int head = 0; head < tile.heads; head++) {
      const int first = head * tile.count;
      attend_block<E>({op, tile, key, rows, head, scratch.queries + first * words,
                       result.from(first, op.head_dim), begins, ahead, scratch});
    }
    ahead.finish();
    rows = ahead_rows;
  }
  for (int m = 0; m < vectors; m++) result.total[m] = sum(load(result.lanes + m * kWidth));
}

template void prefetch_stretch<Bf16>(const Attention&, const Stretch&);
template void prefetch_stretch<Fp32>(const Attention&, const Stretch&);
template void attend<Bf16>(const Attention&, const Stretch&, const Stretch&, const Partial&, bool);
template void attend<Fp32>(const Attention&, const Stretch&, const Stretch&, const Partial&, bool);

}  // namespace rootgraft
