// Arguments of paged attention, and its partition into tiles and splits with bit-identical results on any thread.
//
//   tile     up to kTileQueries query vectors: of one KV head, all heads of its group, then the next token; of few
//            tokens, several KV heads, which lie side by side in a page. The queries are those of one row, or, for a
//            split whose pages several rows share, those of all these rows.
//   block    kBlock keys, from a multiple of kBlock: scored together, one softmax rescaling each.
//   split    kSplit keys, from a multiple of kSplit: starts from nothing and ends in a Partial; partials are merged in
//            order. So a long context can be spread over threads, and a single thread computes the same sums. The
//            result of its first blocks may be copied from rows that share them, and continued.
//
// Blocks and splits lie at fixed positions of the context, never of the batch, and masked keys add exact zeros.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/int8_kv.h"
#include "simd/amx.h"

namespace rootgraft {

constexpr int kTileQueries = 192, kBlock = 64, kSplit = 256;
constexpr float kNothing = -3e38f;  // the reference of no scores: finite, so that nothing minus nothing is 0

// Argument structure packed by Python: fields of 8 bytes in this order.
struct Attention {
  const void *q, *k_cache, *v_cache;
  const int32_t *page_table, *query_start, *context_len;
  void* out;
  int64_t tokens, rows, table_width, num_pages, heads, kv_heads, page_size, head_dim;
  int64_t window;  // keys seen by a token; at least the context where there is no window
  int64_t is_bf16, threads;
  int64_t kv_is_int8;  // the caches are as int8_kv.h says, in pages of whole panels; q and out are of is_bf16
  const float* sinks;  // [heads] or null: a score of each head in every softmax, which has no value
  // Dimensions of a value. Less than head_dim: values are the first dimensions of cells as wide as keys, mostly of the
  // keys themselves, v_cache being k_cache.
  int64_t value_dim;
  int64_t chunk;       // a token sees keys from a multiple of it on; 0 for none
  double scale, soft_cap;  // soft_cap 0: none

  // Bytes of a key or value in its cache, without its scale.
  int64_t cell_bytes() const { return head_dim * (kv_is_int8 ? 1 : is_bf16 ? 2 : 4); }
  // Bytes of a KV head in a page.
  int64_t head_bytes() const { return page_size * (cell_bytes() + (kv_is_int8 ? kScaleBytes : 0)); }

  bool values_are_keys() const { return v_cache == k_cache; }

  int64_t group() const { return heads / kv_heads; }
  int64_t tokens_of(int64_t row) const { return query_start[row + 1] - query_start[row]; }
  int64_t queries(int64_t row) const { return tokens_of(row) * group(); }
  // The position of a query vector of a row: of token query / group.
  int64_t position(int64_t row, int64_t query) const { return context_len[row] - tokens_of(row) + query / group(); }
  // The first key that a token at a position sees.
  int64_t first_key(int64_t position) const {
    return std::max<int64_t>(position - window + 1, chunk ? position / chunk * chunk : 0);
  }
  const int32_t* pages(int64_t row) const { return page_table + row * table_width; }
};

// Query vectors [first, first + count) of a row.
struct Queries {
  int64_t row, first;
  int count;
};

struct QueryTile {
  const Queries* parts;
  int num_parts, count;  // count: queries of each KV head
  int64_t first_head;    // of the KV heads
  int heads;
  int64_t begin, end;  // keys that any of the queries sees, and whose pages, those of the first row, serve them all
  bool cached = false;  // whether the thread has read them for another tile, and has them in a cache

  int vectors() const { return heads * count; }
  int64_t first_split() const { return begin / kSplit; }
  int64_t end_split() const { return (end + kSplit - 1) / kSplit; }
};

// Attention over some of the keys: for each query a reference near its largest score (base 2, see attention_softmax.h),
// the sum of 2^(score - reference), and the sum of the values weighted so. The queries of a tile lie by KV head.
struct Partial {
  float* reference;  // [count]
  float* total;      // [count]
  float* lanes;      // [count][16]: what total is the sum of, by which attention over more keys of the split goes on
  float* values;     // [count][value_dim], and room to the end of a tile of AMX; dimensions maybe as are_unpacked() says

  static constexpr int64_t floats(int64_t count, int64_t value_dim) {
    return values_at(count) + (count > kAmxRows ? round_up(count, kAmxRows) : count) * value_dim;
  }
  static Partial at(float* memory, int64_t count) {
    return {memory, memory + count, memory + 2 * count, memory + values_at(count)};
  }
  Partial from(int64_t query, int64_t value_dim) const {
    return {reference + query, total + query, lanes + query * kWidth, values + query * value_dim};
  }

 private:
  static constexpr int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }
  static constexpr int64_t values_at(int64_t count) { return round_up((2 + kWidth) * count, kWidth); }
};

// A tile over a split; empty without a tile.
struct Stretch {
  const QueryTile* tile;
  int64_t split;
  bool continues = false;  // whether the thread's last stretch was of this tile, so that the queries are laid out
};
constexpr Stretch kNoStretch = {nullptr, 0};

// Memory is prefetched one block ahead, at the end that of `next`, this thread's probable next stretch. If the stretch
// `resumes`, the result already holds that of the earlier blocks of the split.
template <class E>
void attend(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result, bool resumes);

// A call over 8-bit KV, with its queries quantised to bytes.
struct Int8Call : Attention {
  const uint32_t* queries;  // [tokens][heads][words of head_dim]
  const float* factors;     // [tokens][heads]: make scores in base 2, or what the cap takes, of sums times keys' scales
  const int32_t* starts;    // [tokens][heads]: of sums, for keys are biased

  explicit Int8Call(const Attention& op);
};

// attend() for 8-bit KV.
void attend_int8(const Int8Call& op, const Stretch& stretch, const Stretch& next, const Partial& result, bool resumes);

// The first blocks of a split, or all of them, that several rows see whole, through the same pages.
struct SharedSplit {
  int64_t split;
  int blocks;
  std::vector<Queries> parts;  // all queries of each row
  int count;                   // of all queries

  bool is_whole() const { return blocks == kSplit / kBlock; }
};

// In the order of splits, as far as each row shares: of a row only the last may not be whole. No split holds more
// queries than a tile.
std::vector<SharedSplit> find_shared_splits(const Attention& op);

}  // namespace rootgraft
