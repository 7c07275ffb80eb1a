// Paged causal attention of a ragged batch: checks, the plan of tiles and splits, the merging of partials.
#include "attention_walk.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "parallel.h"
#include "tile.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 17;          // multiplications below which one thread is faster
constexpr int64_t kPartsOfThread = 4;        // so many parts of all tiles for each thread
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

// What a row has from a shared split: its queries start at `query` of `count`, in the partials of each KV head.
struct Share {
  float* partials;  // [kv_heads] partials
  int count;
  int64_t query;

  Partial at(int64_t head, int64_t head_dim) const {
    return Partial::at(partials + head * Partial::floats(count, head_dim), count).from(query, head_dim);
  }
};

// What a row has from others' company.
struct Shared {
  std::vector<Share> whole;  // of splits, in order
  Share begun;               // of the first blocks of the next split, if there are any
  bool has_begun = false;
  int64_t keys = 0;
};

// Floats for partials, kept from call to call: fresh memory of this size would come from the operating system, zeroed.
class Room {
 public:
  float* take(int64_t floats) {
    if (size_ < floats) {
      memory_.reset(new float[floats]);
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<float[]> memory_;
  int64_t size_ = 0;
};
thread_local Room shared_room, split_room;

const std::vector<SharedSplit> kNoneShared;

struct Plan {
  const std::vector<SharedSplit>* shared = &kNoneShared;
  float* shared_partials;  // [kv_heads] partials for each
  std::vector<Shared> of_rows;             // empty where nothing is shared
  std::vector<Queries> queries;            // what the tiles' parts point to
  std::vector<QueryTile> tiles;            // over what no other row shares; maybe over nothing
};

void plan_shared(const Attention& op, Plan& plan) {
  const std::vector<SharedSplit>& found = find_shared_splits(op);
  int64_t floats = 0;
  for (const SharedSplit& shared : found) floats += op.kv_heads * Partial::floats(shared.count, op.head_dim);
  if (found.empty() || floats > kMostPartials) return;
  plan.shared = &found;
  plan.shared_partials = shared_room.take(floats);
  plan.of_rows.resize(op.rows);
  float* free = plan.shared_partials;
  for (const SharedSplit& shared : *plan.shared) {
    int64_t query = 0;
    for (const Queries& part : shared.parts) {
      Shared& mine = plan.of_rows[part.row];
      const Share share = {free, shared.count, query};
      if (shared.is_whole()) mine.whole.push_back(share);
      else mine.begun = share, mine.has_begun = true;
      mine.keys += shared.blocks * kBlock;
      query += part.count;
    }
    free += op.kv_heads * Partial::floats(shared.count, op.head_dim);
  }
}

// KV heads of a tile of these queries. The heads of few queries stay together, where that leaves enough tiles for the
// threads: memory is then read in longer pieces.
int heads_together(const Attention& op, const Queries& part, int64_t parts) {
  if (part.count > kTileRows || parts < 4 * op.threads) return 1;
  return (int)std::min<int64_t>(op.kv_heads, kTileQueries / part.count);
}

void plan_tiles(const Attention& op, Plan& plan) {
  for (int64_t row = 0; row < op.rows; row++) {
    for (int64_t first = 0; first < op.queries(row); first += kTileQueries) {
      plan.queries.push_back({row, first, (int)std::min<int64_t>(kTileQueries, op.queries(row) - first)});
    }
  }
  for (const Queries& part : plan.queries) {
    const int64_t shared = plan.of_rows.empty() ? 0 : plan.of_rows[part.row].keys;
    const int64_t begin = op.first_key(op.position(part.row, part.first));
    const int64_t end = op.position(part.row, part.first + part.count - 1) + 1;
    const int heads = heads_together(op, part, (int64_t)plan.queries.size());
    for (int64_t head = 0; head < op.kv_heads; head += heads) {
      const int count = (int)std::min<int64_t>(heads, op.kv_heads - head);
      plan.tiles.push_back({&part, 1, part.count, head, count, std::max(begin, shared), end});
    }
  }
}

// Adds the keys of `part` to those of `whole`.
void merge(const Partial& whole, const Partial& part, int count, int64_t head_dim) {
  alignas(64) float keep[kWidth], add[kWidth];
  for (int first = 0; first < count; first += kWidth) {
    const int queries = std::min(kWidth, count - first);
    float *reference = whole.reference + first, *total = whole.total + first;
    const Floats before = load_first(reference, queries), other = load_first(part.reference + first, queries);
    const Floats top = max(other, before), kept = exp2(before - top), added = exp2(other - top);
    store_first(reference, top, queries);
    store_first(total, fma(load_first(part.total + first, queries), added, load_first(total, queries) * kept), queries);
    store(keep, kept);
    store(add, added);
    float* values = whole.values + first * head_dim;
    const float* others = part.values + first * head_dim;
    for (int i = 0; i < queries; i++) {
      const Floats keeping = broadcast(keep[i]), adding = broadcast(add[i]);
      for (int64_t d = 0; d < head_dim; d += kWidth, values += kWidth, others += kWidth) {
        store(values, fma(load(others), adding, load(values) * keeping));
      }
    }
  }
}

void copy(const Partial& to, const Partial& from, int count, int64_t head_dim) {
  std::copy_n(from.reference, count, to.reference);
  std::copy_n(from.total, count, to.total);
  std::copy_n(from.lanes, count * kWidth, to.lanes);
  std::copy_n(from.values, count * head_dim, to.values);
}

template <class E>
void write_out(const Attention& op, const QueryTile& tile, const Partial& whole) {
  const int64_t group = op.group();
  for (int m = 0; m < tile.vectors(); m++) {
    const int64_t query = tile.parts->first + m % tile.count, kv_head = tile.first_head + m / tile.count;
    const int64_t token = op.query_start[tile.parts->row] + query / group, head = kv_head * group + query % group;
    auto* out = static_cast<typename E::Value*>(op.out) + (token * op.heads + head) * op.head_dim;
    const Floats share = broadcast(1.0f / whole.total[m]);
    for (int64_t d = 0; d < op.head_dim; d += kWidth) {
      E::store(out + d, load(whole.values + m * op.head_dim + d) * share);
    }
  }
}

// One tile over one split, and where the result goes.
struct Item {
  Stretch stretch;
  Partial result;
  bool resumes;
};

template <class E>
void attend_in(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result, bool resumes) {
  attend<E>(op, stretch, next, result, resumes);
}

template <class E>
void attend_in(const Int8Call& op, const Stretch& stretch, const Stretch& next, const Partial& result, bool resumes) {
  attend_int8(op, stretch, next, result, resumes);
}

template <class E, class Call>
void attend_to_items(const Call& op, const std::vector<Item>& items, int threads) {
  parallel_items(threads, (int64_t)items.size(), [&](int64_t i) {
    const bool more = i + threads < (int64_t)items.size();  // what this thread will probably take next
    prefetch_stretch(op, items[i].stretch);
    const Stretch& next = more ? items[i + threads].stretch : kNoStretch;
    attend_in<E>(op, items[i].stretch, next, items[i].result, items[i].resumes);
  });
}

// The queries of all rows over the splits that they share.
template <class E, class Call>
void run_shared(const Call& op, Plan& plan, int threads) {
  std::vector<QueryTile> tiles;
  for (const SharedSplit& shared : *plan.shared) {
    for (int64_t head = 0; head < op.kv_heads; head++) {
      const int64_t begin = shared.split * kSplit, end = begin + shared.blocks * kBlock;
      tiles.push_back({shared.parts.data(), (int)shared.parts.size(), shared.count, head, 1, begin, end});
    }
  }
  std::vector<Item> items;
  float* free = plan.shared_partials;
  for (const QueryTile& tile : tiles) {
    items.push_back({{&tile, tile.first_split()}, Partial::at(free, tile.count), false});
    free += Partial::floats(tile.count, op.head_dim);
  }
  attend_to_items<E>(op, items, threads);
}

// Starts `whole` from the shared splits of the tile's row; false where it has none.
bool start_from_shares(const Attention& op, const Plan& plan, const QueryTile& tile, const Partial& whole) {
  if (plan.of_rows.empty() || plan.of_rows[tile.parts->row].whole.empty()) return false;
  const std::vector<Share>& shares = plan.of_rows[tile.parts->row].whole;
  for (int head = 0; head < tile.heads; head++) {
    const Partial started = whole.from(head * tile.count, op.head_dim);
    for (const Share& share : shares) {
      const Partial part = share.at(tile.first_head + head, op.head_dim);
      if (&share == &shares[0]) copy(started, part, tile.count, op.head_dim);
      else merge(started, part, tile.count, op.head_dim);
    }
  }
  return true;
}

// Puts the shared blocks of a split into its result, which goes on from there; false where there are none.
bool resume(const Attention& op, const Plan& plan, const Stretch& stretch, const Partial& result) {
  const QueryTile& tile = *stretch.tile;
  if (plan.of_rows.empty() || stretch.split != tile.first_split()) return false;
  const Shared& mine = plan.of_rows[tile.parts->row];
  if (!mine.has_begun) return false;
  for (int head = 0; head < tile.heads; head++) {
    const Partial part = mine.begun.at(tile.first_head + head, op.head_dim);
    copy(result.from(head * tile.count, op.head_dim), part, tile.count, op.head_dim);
  }
  return true;
}

struct alignas(64) PartialMemory {
  float whole[Partial::floats(kTileQueries, kMaxHeadDim)], part[Partial::floats(kTileQueries, kMaxHeadDim)];
};
thread_local PartialMemory memory;

// Tiles [first, end), one after the other; this thread will probably go on with tile `then`.
template <class E, class Call>
void walk_tiles(const Call& op, const Plan& plan, int64_t first, int64_t end, int64_t then) {
  const auto start = [&](int64_t i) {
    return i < (int64_t)plan.tiles.size() ? Stretch{&plan.tiles[i], plan.tiles[i].first_split()} : kNoStretch;
  };
  prefetch_stretch(op, start(first));
  for (int64_t i = first; i < end; i++) {
    const QueryTile& tile = plan.tiles[i];
    const int vectors = tile.vectors();
    const Partial whole = Partial::at(memory.whole, vectors), part = Partial::at(memory.part, vectors);
    bool started = start_from_shares(op, plan, tile, whole);
    for (int64_t split = tile.first_split(); split < tile.end_split(); split++, started = true) {
      const int64_t next_tile = i + 1 < end ? i + 1 : then;
      const Stretch next = split + 1 < tile.end_split() ? Stretch{&tile, split + 1} : start(next_tile);
      const Partial& result = started ? part : whole;
      attend_in<E>(op, {&tile, split}, next, result, resume(op, plan, {&tile, split}, result));
      if (started) merge(whole, part, vectors, op.head_dim);
    }
    write_out<E>(op, tile, whole);
  }
}

// So that no thread begins with a large one when the others are about to end.
void put_largest_first(std::vector<QueryTile>& tiles) {
  const auto work = [](const QueryTile& tile) { return tile.vectors() * (tile.end - tile.begin); };
  std::stable_sort(tiles.begin(), tiles.end(),
                   [&](const QueryTile& a, const QueryTile& b) { return work(a) > work(b); });
}

// A thread takes some tiles, or a large one, and walks their splits.
template <class E, class Call>
void run_by_tile(const Call& op, Plan& plan, int threads) {
  const int64_t tiles = (int64_t)plan.tiles.size();
  const auto is_small = [](const QueryTile& tile) { return tile.count <= kTileRows; };
  const bool small = std::all_of(plan.tiles.begin(), plan.tiles.end(), is_small);
  if (!small) put_largest_first(plan.tiles);
  const int64_t parts = small ? std::min<int64_t>(tiles, kPartsOfThread * threads) : tiles;
  const auto edge = [&](int64_t part) { return part < parts ? tiles * part / parts : tiles; };
  parallel_items(threads, parts, [&](int64_t i) { walk_tiles<E>(op, plan, edge(i), edge(i + 1), edge(i + threads)); });
}

// A thread takes one split of one tile: for few tiles with long contexts.
template <class E, class Call>
void run_by_split(const Call& op, const Plan& plan, int64_t floats, int threads) {
  std::vector<Item> items;
  float* free = split_room.take(floats);
  for (const QueryTile& tile : plan.tiles) {
    for (int64_t split = tile.first_split(); split < tile.end_split(); split++) {
      const Partial result = Partial::at(free, tile.vectors());
      items.push_back({{&tile, split}, result, resume(op, plan, {&tile, split}, result)});
      free += Partial::floats(tile.vectors(), op.head_dim);
    }
  }
  attend_to_items<E>(op, items, threads);
  size_t i = 0;
  for (const QueryTile& tile : plan.tiles) {
    const Partial whole = Partial::at(memory.whole, tile.vectors());
    bool started = start_from_shares(op, plan, tile, whole);
    for (; i < items.size() && items[i].stretch.tile == &tile; i++, started = true) {
      if (started) merge(whole, items[i].result, tile.vectors(), op.head_dim);
      else copy(whole, items[i].result, tile.vectors(), op.head_dim);
    }
    write_out<E>(op, tile, whole);
  }
}

template <class E, class Call>
void run(const Call& op) {
  Plan plan;
  plan_shared(op, plan);
  plan_tiles(op, plan);
  int64_t work = 0, floats = 0;
  for (const QueryTile& tile : plan.tiles) {
    work += tile.vectors() * (tile.end - tile.begin) * op.head_dim;
    floats += (tile.end_split() - tile.first_split()) * Partial::floats(tile.vectors(), op.head_dim);
  }
  const int threads = work < kSmall && plan.shared->empty() ? 1 : (int)op.threads;
  run_shared<E>(op, plan, threads);
  const bool few = threads > 1 && (int64_t)plan.tiles.size() < 4 * threads;
  if (few && floats <= kMostPartials) run_by_split<E>(op, plan, floats, threads);
  else run_by_tile<E>(op, plan, threads);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// 0, or 1: an index leads outside its table, or 2: no memory.
extern "C" int attention(const Attention* op) {
  if (!in_bounds(*op)) return 1;
  try {
    with_types([&](auto element) {
      if (op->kv_is_int8) run<decltype(element)>(Int8Call(*op));
      else run<decltype(element)>(*op);
    }, op->is_bf16);
  } catch (const std::bad_alloc&) {
    return 2;
  }
  return 0;
}

extern "C" int64_t attention_size() { return sizeof(Attention); }
