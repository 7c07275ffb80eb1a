// Loop of a query tile over the blocks of one split, shared by all block kernels.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/attention_block.h"

namespace rootgraft {

// A block for all KV heads of the tile.
struct BlockWork {
  const Attention& op;
  const QueryTile& tile;
  int64_t first_key;
  const BlockRows& rows;
  Partial result;
  bool begins;  // whether the result holds no values yet
  bool plain;   // whether every query sees every key, and scores have no cap
  Ahead& ahead;
};

// Calls f(m, count, row, token of the row, head of the group) for the queries of a tile in order: `count` queries of
// one token from m on.
template <class F>
INLINE void for_tokens(const Attention& op, const QueryTile& tile, F f) {
  const int64_t group = op.group();
  int m = 0;
  for (int p = 0; p < tile.num_parts; p++) {
    const Queries& part = tile.parts[p];
    int64_t token = part.first / group, head = part.first % group;
    for (const int end = m + part.count; m < end; token++, head = 0) {
      const int count = (int)std::min<int64_t>(group - head, end - m);
      f(m, count, part.row, token, head);
      m += count;
    }
  }
}

// The first key of a stretch's first block.
inline int64_t first_key(const Stretch& stretch) {
  return stretch.tile ? std::max(stretch.split * kSplit, stretch.tile->begin / kBlock * kBlock) : 0;
}

// Prefetches the stretch's first block.
inline void prefetch_stretch(const Attention& op, const Stretch& stretch) {
  const BlockRows rows(op, stretch.tile, first_key(stretch));
  Ahead(op, rows, 1).finish();
}

// The loop of attend(); `attend_block` adds each block to the result. `ends`, [queries of a KV head], receives the end
// of the keys that each query sees.
template <class F>
INLINE void walk_blocks(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result,
                        bool resumes, int64_t* ends, F attend_block) {
  const QueryTile& tile = *stretch.tile;
  const int vectors = tile.vectors();
  if (!resumes) {
    std::fill_n(result.reference, vectors, kNothing);
    std::fill_n(result.lanes, vectors * kWidth, 0.0f);
  }
  int64_t least = std::numeric_limits<int64_t>::max(), most = 0;
  for_tokens(op, tile, [&](int m, int count, int64_t row, int64_t token, int64_t) {
    const int64_t end = op.context_len[row] - op.tokens_of(row) + token + 1;
    std::fill_n(ends + m, count, end);
    least = std::min(least, end), most = std::max(most, end);
  });
  const int64_t end = std::min((stretch.split + 1) * kSplit, tile.end);
  int64_t key = first_key(stretch);
  bool begins = !resumes;
  for (BlockRows rows(op, &tile, key); key < end; key += kBlock, begins = false) {
    const bool last = key + kBlock >= end;
    const BlockRows ahead_rows(op, last ? next.tile : &tile, last ? first_key(next) : key + kBlock);
    Ahead ahead(op, ahead_rows, tile.heads * rows.panels);
    const bool plain = !op.soft_cap && key + kBlock <= least && op.first_key(most - 1) <= key;
    attend_block({op, tile, key, rows, result, begins, plain, ahead});
    ahead.finish();
    rows = ahead_rows;
  }
  for (int m = 0; m < vectors; m++) result.total[m] = sum(load(result.lanes + m * kWidth));
}

}  // namespace rootgraft
