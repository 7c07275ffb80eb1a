// What an attention call is given, and how it is cut into parts whose results have the same bits wherever they run.
//
//   tile     up to kTileQueries query vectors of one row that share a KV head: all heads of its group, then the next
//            token. Keys and values are laid out for a whole tile at once.
//   block    kBlock keys, from a multiple of kBlock: scored together, one softmax rescaling each.
//   split    kSplit keys, from a multiple of kSplit: starts from nothing and ends in a Partial; partials are merged in
//            order. So a long context can be spread over threads, and one thread that walks it does the same sums.
//
// Blocks and splits lie at fixed positions of the context, never of the batch, and masked keys add exact zeros.
#pragma once

#include <cstdint>

#include "vec.h"

namespace rootgraft {

constexpr int kTileQueries = 96, kBlock = 64, kSplit = 256, kMaxHeadDim = 256;
constexpr float kNothing = -3e38f;  // the maximum of no scores: finite, so that nothing minus nothing is 0

// The call, as the caller packs it: fields of 8 bytes in this order.
struct Attention {
  const void *q, *k_cache, *v_cache;
  const int32_t *page_table, *query_start, *context_len;
  void* out;
  int64_t tokens, rows, table_width, num_pages, heads, kv_heads, page_size, head_dim;
  int64_t window;  // keys seen by a token; at least the context where there is no window
  int64_t is_bf16, threads;
  double scale, soft_cap;  // soft_cap 0: none

  int64_t group() const { return heads / kv_heads; }
};

struct QueryTile {
  int64_t row, kv_head;
  int64_t first;  // query vector of the row: token first / group, head first % group of the KV head
  int count;

  // Positions of the first and the last query vector.
  int64_t first_position(const Attention& op) const { return position(op, first); }
  int64_t last_position(const Attention& op) const { return position(op, first + count - 1); }
  int64_t position(const Attention& op, int64_t query) const {
    const int64_t tokens = op.query_start[row + 1] - op.query_start[row];
    return op.context_len[row] - tokens + query / op.group();
  }
  // Splits [first, end) with keys that any of its queries sees.
  int64_t first_split(const Attention& op) const { return first_key(op) / kSplit; }
  int64_t end_split(const Attention& op) const { return last_position(op) / kSplit + 1; }
  int64_t first_key(const Attention& op) const {
    const int64_t key = first_position(op) - op.window + 1;
    return key > 0 ? key : 0;
  }
};

// Attention over some of the keys: for each query the largest score (base 2), the sum of 2^(score - largest), and the
// sum of the values weighted so.
struct Partial {
  float* largest;  // [count]
  float* total;    // [count]
  float* values;   // [count][head_dim]

  static int64_t floats(int64_t count, int64_t head_dim) { return count * (head_dim + 2); }
  static Partial at(float* memory, int64_t count) { return {memory, memory + count, memory + 2 * count}; }
};

// One tile over one split.
template <class E>
void attend_split(const Attention& op, const QueryTile& tile, int64_t split, const Partial& result);

}  // namespace rootgraft
