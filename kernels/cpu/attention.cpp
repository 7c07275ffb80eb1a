// Paged causal attention of a ragged batch: checks, the plan of tiles and splits, the merging of partials.
#include "attention.h"

#include <algorithm>
#include <new>
#include <vector>

#include "parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 17;          // multiplications below which one thread is faster
constexpr int64_t kMostPartials = 1 << 24;   // floats of partials held at once

// Whether every index that the call leads to lies inside its table.
bool in_bounds(const Attention& op) {
  if (op.query_start[0] != 0 || op.query_start[op.rows] != op.tokens) return false;
  for (int64_t row = 0; row < op.rows; row++) {
    const int64_t queries = (int64_t)op.query_start[row + 1] - op.query_start[row], context = op.context_len[row];
    const int64_t pages = (context + op.page_size - 1) / op.page_size;
    if (queries < 0 || context < queries || pages > op.table_width) return false;
    const int32_t* page = op.page_table + row * op.table_width;
    for (int64_t i = 0; i < pages; i++) {
      if (page[i] < 0 || page[i] >= op.num_pages) return false;
    }
  }
  return true;
}

std::vector<QueryTile> plan_tiles(const Attention& op) {
  std::vector<QueryTile> tiles;
  for (int64_t row = 0; row < op.rows; row++) {
    const int64_t queries = (op.query_start[row + 1] - op.query_start[row]) * op.group();
    for (int64_t head = 0; head < op.kv_heads; head++) {
      for (int64_t first = 0; first < queries; first += kTileQueries) {
        tiles.push_back({row, head, first, (int)std::min<int64_t>(kTileQueries, queries - first)});
      }
    }
  }
  return tiles;
}

// Adds the keys of `part` to those of `whole`.
void merge(const Partial& whole, const Partial& part, int count, int64_t head_dim) {
  for (int m = 0; m < count; m++) {
    const float top = std::max(whole.largest[m], part.largest[m]);
    const Floats keep = exp2(broadcast(whole.largest[m] - top)), add = exp2(broadcast(part.largest[m] - top));
    whole.largest[m] = top;
    whole.total[m] = first_lane(fma(broadcast(part.total[m]), add, broadcast(whole.total[m]) * keep));
    float* values = whole.values + m * head_dim;
    for (int64_t d = 0; d < head_dim; d += kWidth) {
      store(values + d, fma(load(part.values + m * head_dim + d), add, load(values + d) * keep));
    }
  }
}

template <class E>
void write_out(const Attention& op, const QueryTile& tile, const Partial& whole) {
  const int64_t group = op.group();
  for (int m = 0; m < tile.count; m++) {
    const int64_t query = tile.first + m, token = op.query_start[tile.row] + query / group;
    const int64_t head = tile.kv_head * group + query % group;
    auto* out = static_cast<typename E::Value*>(op.out) + (token * op.heads + head) * op.head_dim;
    const Floats share = broadcast(1.0f / whole.total[m]);
    for (int64_t d = 0; d < op.head_dim; d += kWidth) {
      E::store(out + d, load(whole.values + m * op.head_dim + d) * share);
    }
  }
}

struct PartialMemory {
  float whole[kTileQueries * (kMaxHeadDim + 2)], part[kTileQueries * (kMaxHeadDim + 2)];
};
thread_local PartialMemory memory;

// A thread takes a tile and walks its splits.
template <class E>
void run_by_tile(const Attention& op, const std::vector<QueryTile>& tiles, int threads) {
  parallel_items(threads, (int64_t)tiles.size(), [&](int64_t i) {
    const QueryTile& tile = tiles[i];
    const Partial whole = Partial::at(memory.whole, tile.count), part = Partial::at(memory.part, tile.count);
    const int64_t first = tile.first_split(op), end = tile.end_split(op);
    attend_split<E>(op, tile, first, whole);
    for (int64_t split = first + 1; split < end; split++) {
      attend_split<E>(op, tile, split, part);
      merge(whole, part, tile.count, op.head_dim);
    }
    write_out<E>(op, tile, whole);
  });
}

struct SplitItem {
  const QueryTile* tile;
  int64_t split;
  Partial result;
};

// A thread takes one split of one tile: for few tiles with long contexts.
template <class E>
void run_by_split(const Attention& op, const std::vector<QueryTile>& tiles, int64_t floats, int threads) {
  std::vector<float> partials(floats);
  std::vector<SplitItem> items;
  float* free = partials.data();
  for (const QueryTile& tile : tiles) {
    for (int64_t split = tile.first_split(op); split < tile.end_split(op); split++) {
      items.push_back({&tile, split, Partial::at(free, tile.count)});
      free += Partial::floats(tile.count, op.head_dim);
    }
  }
  parallel_items(threads, (int64_t)items.size(), [&](int64_t i) {
    attend_split<E>(op, *items[i].tile, items[i].split, items[i].result);
  });
  for (size_t i = 0; i < items.size();) {
    const SplitItem& head = items[i];
    for (i++; i < items.size() && items[i].tile == head.tile; i++) {
      merge(head.result, items[i].result, head.tile->count, op.head_dim);
    }
    write_out<E>(op, *head.tile, head.result);
  }
}

template <class E>
void run(const Attention& op) {
  const std::vector<QueryTile> tiles = plan_tiles(op);
  int64_t work = 0, floats = 0;
  for (const QueryTile& tile : tiles) {
    const int64_t splits = tile.end_split(op) - tile.first_split(op);
    work += tile.count * (tile.last_position(op) - tile.first_key(op) + 1) * op.head_dim;
    floats += splits * Partial::floats(tile.count, op.head_dim);
  }
  const int threads = work < kSmall ? 1 : (int)op.threads;
  const bool few = threads > 1 && (int64_t)tiles.size() < 4 * threads;
  if (few && floats <= kMostPartials) run_by_split<E>(op, tiles, floats, threads);
  else run_by_tile<E>(op, tiles, threads);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// 0, or 1: an index leads outside its table, or 2: no memory.
extern "C" int attention(const Attention* op) {
  if (!in_bounds(*op)) return 1;
  try {
    if (op->is_bf16) run<Bf16>(*op);
    else run<Fp32>(*op);
  } catch (const std::bad_alloc&) {
    return 2;
  }
  return 0;
}

extern "C" int64_t attention_size() { return sizeof(Attention); }
