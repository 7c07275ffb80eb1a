// Arguments of paged attention, and its partition into tiles and splits. Results are bit-identical for any number of
// threads.
//
//   tile     up to kTileQueries query vectors: of one KV head, first all heads of its group, then the next token; or,
// for            few tokens, of several KV heads, which are neighbours in a page. The queries belong to one row, or,
// for a            split whose pages several rows share, to all these rows.   block    kBlock keys, starting at a
// multiple of kBlock. They are scored together and rescaled at most once.   split    kSplit keys, starting at a
// multiple of kSplit. Its computation starts without keys and ends in a Partial;            partials are merged in
// order. So a long context can be spread over threads, and a single thread computes            the same sums. The
// result of its first blocks may be copied from rows that share them, and continued.
//
// Blocks and splits start at fixed positions of the context, whatever the batch is, and masked keys add exact zeros.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/int8_kv.h"
#include "simd/amx.h"

namespace rootgraft {

constexpr int kTileQueries = 192, kBlock = 64, kSplit = 256;
// the reference if there are no scores: finite, so that it can be subtracted from itself
constexpr float kNothing = -3e38f;

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct Attention {
  const void *q, *k_cache, *v_cache;
  const int32_t *page_table, *query_start, *context_len;
  void* out;
  int64_t tokens, rows, table_width, num_pages, heads, kv_heads, page_size, head_dim;
  int64_t window;  // number of keys that a token sees; at least the context length if there is no window
  int64_t is_bf16, threads;
  // the caches have the layout of int8_kv.h, in pages of whole panels; q and out have the type of is_bf16
  int64_t kv_is_int8;
  const float* sinks;  // [heads] or null: a score for each head that is part of every softmax, but has no value
  // Dimensions of a value. If smaller than head_dim, a value is the first dimensions of a cell as wide as a key, mostly
  // of the key itself (v_cache is then k_cache).
  int64_t value_dim;
  int64_t chunk;       // a token sees keys from the last multiple of this position on; 0 for no limit
  double scale, soft_cap;  // soft_cap 0: no cap

  // Bytes of a key or value in its cache, without its scale.
  int64_t cell_bytes() const { return head_dim * (kv_is_int8 ? 1 : is_bf16 ? 2 : 4); }
  // Bytes of a KV head in a page.
  int64_t head_bytes() const { return page_size * (cell_bytes() + (kv_is_int8 ? kScaleBytes : 0)); }

  bool values_are_keys() const { return v_cache == k_cache; }

  int64_t group() const { return heads / kv_heads; }
  int64_t tokens_of(int64_t row) const { return query_start[row + 1] - query_start[row]; }
  int64_t queries(int64_t row) const { return tokens_of(row) * group(); }
  // The position of a query vector of a row, which belongs to token query / group.
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
  int num_parts, count;  // count: number of queries of each KV head
  int64_t first_head;    // first of the KV heads
  int heads;
  int64_t begin, end;  // keys that any of the queries sees. The pages of the first row hold them for all rows.
  bool cached = false;  // whether the thread has read these keys for another tile, so that they are in a cache

  int vectors() const { return heads * count; }
  int64_t first_split() const { return begin / kSplit; }
  int64_t end_split() const { return (end + kSplit - 1) / kSplit; }
};

// The result of attention over some of the keys. For each query: a reference near its largest score (base 2, see
// attention_softmax.h), the sum of 2^(score - reference), and the sum of the values with these weights. The queries of
// a tile are ordered by KV head.
struct Partial {
  float* reference;  // [count]
  float* total;      // [count]
  float* lanes;  // [count][16]: total is their sum. Attention over more keys of the split continues with these lanes.
  // [count][value_dim], with room to the end of a tile of AMX; are_unpacked() gives the order of the dimensions
  float* values;

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

// A tile over a split. Empty if there is no tile.
struct Stretch {
  const QueryTile* tile;
  int64_t split;
  // whether the thread's last stretch was of this tile, so that the queries are already laid out
  bool continues = false;
};
constexpr Stretch kNoStretch = {nullptr, 0};

// Attention of a tile over a split. Memory is prefetched one block ahead; in the last block, that of `next`, which is
// this thread's probable next stretch. If the stretch `resumes`, the result already covers the earlier blocks of the
// split.
template <class E>
void attend(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result, bool resumes);

// A call over 8-bit KV, with its queries quantised to bytes.
struct Int8Call : Attention {
  const uint32_t* queries;  // [tokens][heads][words of head_dim]
  // [tokens][heads]: turn (sum * the key's scale) into a score in base 2, or into the input of the cap
  const float* factors;
  const int32_t* starts;    // [tokens][heads]: start values of sums, as the bytes of keys are biased

  explicit Int8Call(const Attention& op);
};

// attend() for 8-bit KV.
void attend_int8(const Int8Call& op, const Stretch& stretch, const Stretch& next, const Partial& result, bool resumes);

// The first blocks of a split, or all its blocks, if several rows see all their keys through the same pages.
struct SharedSplit {
  int64_t split;
  int blocks;
  std::vector<Queries> parts;  // all queries of each row
  int count;                   // number of queries of all rows

  bool is_whole() const { return blocks == kSplit / kBlock; }
};

// Returns the shared splits in their order, for each row as far as it shares. Only the last one of a row may cover a
// part of a split. No shared split has more queries than a tile.
std::vector<SharedSplit> find_shared_splits(const Attention& op);

}  // namespace rootgraft
