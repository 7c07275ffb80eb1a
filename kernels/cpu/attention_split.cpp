// Attention of a query tile over one split of its context: scores, online softmax, weighted values, block by block.
#include <algorithm>
#include <limits>

#include "attention.h"
#include "tile.h"

namespace rootgraft {
namespace {

struct Scratch {
  uint32_t queries[kTileQueries * kMaxHeadDim];  // A of the scores
  uint32_t keys[kBlock * kMaxHeadDim];           // B of the scores: [panel of 16 keys][word of the head][key]
  uint32_t values[kBlock * kMaxHeadDim];         // B of the output: [panel of 16 dimensions][word of keys][dimension]
  float scores[kTileQueries * kBlock];           // then, in place, the weights as A of the output
  float totals[kTileQueries * kWidth];           // running sums of weights, lane by lane
  float shrink[kTileQueries];                    // what a new maximum does to older sums
};

const uint32_t kZeros[kMaxHeadDim] = {};

// Where a block's keys lie in a cache, in elements; nowhere for keys that no query of the tile sees.
struct BlockRows {
  static constexpr int64_t kNowhere = -1;

  int64_t offset[kBlock];
  int panels;  // panels of 16 keys in use

  BlockRows(const Attention& op, const QueryTile& tile, int64_t first_key) {
    const int begin = (int)std::max<int64_t>(tile.begin - first_key, 0);
    const int end = (int)std::clamp<int64_t>(tile.end - first_key, 0, kBlock);
    panels = (end + kWidth - 1) / kWidth;
    std::fill_n(offset, begin, kNowhere);
    const int32_t* pages = op.pages(tile.parts->row);
    const int64_t head_size = op.page_size * op.head_dim;
    for (int i = begin; i < end;) {
      const int64_t page = (first_key + i) / op.page_size, cell = (first_key + i) % op.page_size;
      const int64_t at = (pages[page] * op.kv_heads + tile.kv_head) * head_size + cell * op.head_dim;
      const int run = (int)std::min<int64_t>(op.page_size - cell, end - i);
      for (int j = 0; j < run; j++) offset[i + j] = at + j * op.head_dim;
      i += run;
    }
    std::fill_n(offset + end, panels * kWidth - end, kNowhere);
  }

  template <class E>
  const uint32_t* row(const void* cache, int i) const {
    if (offset[i] == kNowhere) return kZeros;
    return reinterpret_cast<const uint32_t*>(static_cast<const typename E::Value*>(cache) + offset[i]);
  }

  // Asks for rows [first, end): into the second-level cache, because a block would crowd the first one.
  template <class E>
  INLINE void prefetch(const Attention& op, const void* cache, int first, int end) const {
    for (int i = first; i < end; i++) {
      const uint32_t* words = row<E>(cache, i);
      for (int64_t w = 0; w < op.head_dim / E::kPerWord; w += kWidth) __builtin_prefetch(words + w, 0, 2);
    }
  }
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
  for_queries(tile, [&](int m, int64_t row, int64_t query) {
    const int64_t token = op.query_start[row] + query / group, head = tile.kv_head * group + query % group;
    const Value* from = static_cast<const Value*>(op.q) + (token * op.heads + head) * op.head_dim;
    std::memcpy(scratch.queries + m * words, from, op.head_dim * sizeof(Value));
  });
}

// The rows of the next block are asked for a few at a time while those of this one are laid out: the caches' own
// prefetchers lose the trail from page to page.
template <class E>
void lay_out_keys(const Attention& op, const BlockRows& rows, const BlockRows& next, Scratch& scratch) {
  const int words = (int)(op.head_dim / E::kPerWord);
  for (int panel = 0; panel < rows.panels; panel++) {
    const uint32_t* keys[kWidth];
    for (int i = 0; i < kWidth; i++) keys[i] = rows.row<E>(op.k_cache, panel * kWidth + i);
    if (panel < next.panels) next.prefetch<E>(op, op.k_cache, panel * kWidth, (panel + 1) * kWidth);
    transpose_rows(keys, words, scratch.keys + panel * words * kWidth);
  }
}

// A word of the output's B is a dimension of one key (fp32) or of two neighbouring keys (bf16).
template <class E>
void lay_out_values(const Attention& op, const BlockRows& rows, const BlockRows& next, Scratch& scratch) {
  const int64_t words = kBlock / E::kPerWord, dims = op.head_dim;
  for (int key = 0; key < rows.panels * kWidth; key += E::kPerWord) {
    uint32_t* out = scratch.values + key / E::kPerWord * kWidth;
    const uint32_t* first = rows.row<E>(op.v_cache, key);
    if (key < next.panels * kWidth) next.prefetch<E>(op, op.v_cache, key, key + E::kPerWord);
    if constexpr (E::kPerWord == 1) {
      for (int64_t d = 0; d < dims; d += kWidth, out += words * kWidth) std::memcpy(out, first + d, kWidth * 4);
    } else {
      const auto* low = reinterpret_cast<const uint16_t*>(first);
      const auto* high = reinterpret_cast<const uint16_t*>(rows.row<E>(op.v_cache, key + 1));
      for (int64_t d = 0; d < dims; d += kWidth, out += words * kWidth) E::interleave(low + d, high + d, out);
    }
  }
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
void weigh(const Attention& op, int m, int panels, int64_t begin, int64_t end, float& largest_score, Scratch& scratch) {
  float* scores = scratch.scores + m * kBlock;
  if (op.soft_cap || begin > 0 || end < panels * kWidth) cap_and_mask(scores, panels, begin, end, op);
  const float factor = op.soft_cap ? 1.0f : (float)op.scale * kLog2E;
  Floats best = load(scores);
  for (int v = 1; v < panels; v++) best = max(best, load(scores + v * kWidth));
  const float before = largest_score;
  largest_score = std::max(before, largest(best) * factor);
  const Floats shrink = exp2(broadcast(before - largest_score)), shift = broadcast(-largest_score);
  Floats total = load(scratch.totals + m * kWidth) * shrink;
  auto* weights = reinterpret_cast<typename E::Value*>(scores);
  for (int v = 0; v < panels; v++) {
    const Floats weight = E::weight_exp2(fma(load(scores + v * kWidth), broadcast(factor), shift));
    total = total + weight;
    E::store(weights + v * kWidth, weight);
  }
  store(scratch.totals + m * kWidth, total);
  scratch.shrink[m] = first_lane(shrink);
}

template <class E>
void attend_block(const Attention& op, const QueryTile& tile, int64_t first_key, const BlockRows& rows,
                  const BlockRows& next, const Partial& result, Scratch& scratch) {
  const int64_t words = op.head_dim / E::kPerWord;
  lay_out_keys<E>(op, rows, next, scratch);
  multiply<E>({scratch.queries, words, scratch.keys, words * kWidth, words, scratch.scores, kBlock, nullptr},
              tile.count, rows.panels);
  for_queries(tile, [&](int m, int64_t row, int64_t query) {
    const int64_t end = op.position(row, query) + 1 - first_key;
    weigh<E>(op, m, rows.panels, end - op.window, end, result.largest[m], scratch);
  });
  lay_out_values<E>(op, rows, next, scratch);
  multiply<E>({reinterpret_cast<const uint32_t*>(scratch.scores), kBlock, scratch.values,
               kBlock / E::kPerWord * kWidth, rows.panels * kWidth / E::kPerWord, result.values, op.head_dim,
               scratch.shrink},
              tile.count, (int)(op.head_dim / kWidth));
}

}  // namespace

template <class E>
void attend_split(const Attention& op, const QueryTile& tile, int64_t split, const Partial& result) {
  thread_local Scratch scratch;
  std::fill_n(result.largest, tile.count, kNothing);
  std::fill_n(result.values, tile.count * op.head_dim, 0.0f);
  std::fill_n(scratch.totals, tile.count * kWidth, 0.0f);
  gather_queries<E>(op, tile, scratch);
  const int64_t begin = std::max(split * kSplit, tile.begin / kBlock * kBlock);
  const int64_t end = std::min((split + 1) * kSplit, tile.end);
  BlockRows rows(op, tile, begin);
  rows.prefetch<E>(op, op.k_cache, 0, rows.panels * kWidth);
  rows.prefetch<E>(op, op.v_cache, 0, rows.panels * kWidth);
  for (int64_t key = begin; key < end; key += kBlock) {
    const BlockRows next(op, tile, key + kBlock);  // perhaps of the next split; without panels at the context's end
    attend_block<E>(op, tile, key, rows, next, result, scratch);
    rows = next;
  }
  for (int m = 0; m < tile.count; m++) result.total[m] = sum(load(scratch.totals + m * kWidth));
}

template void attend_split<Bf16>(const Attention&, const QueryTile&, int64_t, const Partial&);
template void attend_split<Fp32>(const Attention&, const QueryTile&, int64_t, const Partial&);

}  // namespace rootgraft
