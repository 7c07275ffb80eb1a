// Paged causal attention of a ragged batch: distribution over threads, and merging of partials.
#include "attention/attention_plan.h"
#include "attention/attention_panels.h"

#include <algorithm>
#include <new>
#include <vector>

#include "simd/parallel.h"
#include "gemm/tile.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 17;    // number of multiplications below which one thread is faster
constexpr int64_t kSmallMerge = 1 << 14;  // number of floats of partials below which one thread merges them faster
// number of parts for each thread, if tiles are small: each part is several tiles
constexpr int64_t kPartsOfThread = 4;
constexpr int64_t kRunsOfThread = 16;  // number of runs of splits for each thread, if threads share tiles

thread_local Room split_room;

// Adds the result over the keys of `part` to the result over those of `whole`.
void merge(const Partial& whole, const Partial& part, int count, int64_t value_dim) {
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
    float* values = whole.values + first * value_dim;
    const float* others = part.values + first * value_dim;
    for (int i = 0; i < queries; i++) {
      const Floats keeping = broadcast(keep[i]), adding = broadcast(add[i]);
      for (int64_t d = 0; d < value_dim; d += kWidth, values += kWidth, others += kWidth) {
        store(values, fma(load(others), adding, load(values) * keeping));
      }
    }
  }
}

void copy(const Partial& to, const Partial& from, int count, int64_t value_dim) {
  std::copy_n(from.reference, count, to.reference);
  std::copy_n(from.total, count, to.total);
  std::copy_n(from.lanes, count * kWidth, to.lanes);
  std::copy_n(from.values, count * value_dim, to.values);
}

// The part of a tile's results that belongs to one KV head.
template <class E>
void write_out(const Attention& op, const QueryTile& tile, int kv_head_of_tile, const Partial& whole) {
  const int64_t group = op.group(), kv_head = tile.first_head + kv_head_of_tile;
  const bool unpacked = are_unpacked(op);
  const Queries& queries = *tile.parts;
  int64_t token = op.query_start[queries.row] + queries.first / group, member = queries.first % group;
  for (int m = 0; m < tile.count; m++) {
    const int64_t head = kv_head * group + member;
    auto* out = static_cast<typename E::Value*>(op.out) + (token * op.heads + head) * op.value_dim;
    const float sink = op.sinks ? first_lane(exp2(broadcast(op.sinks[head] * kLog2E - whole.reference[m]))) : 0.0f;
    const Floats share = broadcast(1.0f / (whole.total[m] + sink));
    const float* values = whole.values + m * op.value_dim;
    for (int64_t d = 0; unpacked && d < op.value_dim; d += 2 * kWidth) {
      Floats first = load(values + d), second = load(values + d + kWidth);
      repack_sums(first, second);
      E::store_two(out + d, first * share, second * share);
    }
    for (int64_t d = 0; !unpacked && d < op.value_dim; d += kWidth) E::store(out + d, load(values + d) * share);
    if (++member == group) member = 0, token++;
  }
}

// One tile over one split, and the place of its result.
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

// A thread takes several items in a row. Except at the last one, it knows which block comes next.
template <class E, class Call>
void attend_to_items(const Call& op, const std::vector<Item>& items, int threads) {
  const int64_t count = (int64_t)items.size(), runs = std::min<int64_t>(count, kRunsOfThread * threads);
  const auto start = [&](int64_t run) { return run < runs ? items[count * run / runs].stretch : kNoStretch; };
  parallel_items(threads, runs, [&](int64_t run) {
    const int64_t end = count * (run + 1) / runs;
    prefetch_stretch(op, start(run));
    for (int64_t i = count * run / runs; i < end; i++) {
      const Stretch next = i + 1 < end ? items[i + 1].stretch : start(run + threads);
      attend_in<E>(op, items[i].stretch, next, items[i].result, items[i].resumes);
    }
  });
}

struct alignas(64) PartialMemory {
  float whole[Partial::floats(kTileQueries, kMaxHeadDim)], part[Partial::floats(kTileQueries, kMaxHeadDim)];
};
thread_local PartialMemory memory;

// Attention of the queries of all rows over the splits that these rows share.
template <class E, class Call>
void run_shared(const Call& op, const Plan& plan) {
  const int64_t count = (int64_t)plan.shared_tiles.size();
  const auto start = [&](int64_t i) {
    return i < count ? Stretch{&plan.shared_tiles[i].tile, plan.shared_tiles[i].tile.first_split()} : kNoStretch;
  };
  parallel_items((int)op.threads, count, [&](int64_t i) {
    const QueryTile& tile = plan.shared_tiles[i].tile;
    const Partial whole = Partial::at(plan.shared_tiles[i].partial, tile.count);
    const Partial part = Partial::at(memory.part, tile.count);
    prefetch_stretch(op, start(i));
    for (int64_t split = tile.first_split(); split < tile.end_split(); split++) {
      const Stretch next = split + 1 < tile.end_split() ? Stretch{&tile, split + 1} : start(i + op.threads);
      const bool is_first = split == tile.first_split();
      attend_in<E>(op, {&tile, split, !is_first}, next, is_first ? whole : part, false);
      if (!is_first) merge(whole, part, tile.count, op.value_dim);
    }
  });
}

// Merges the results over the shared splits of the tile's row into a KV head's `whole`; false if the row shares none.
bool start_from_shares(const Attention& op, const Plan& plan, const QueryTile& tile, int head, const Partial& whole) {
  if (plan.of_rows.empty() || plan.of_rows[tile.parts->row].whole.empty()) return false;
  bool is_first = true;
  for (const Share& share : plan.of_rows[tile.parts->row].whole) {
    if (!share.has(tile.first_head + head)) continue;
    const Partial part = share.at(tile.first_head + head, op.value_dim);
    if (is_first) copy(whole, part, tile.count, op.value_dim);
    else merge(whole, part, tile.count, op.value_dim);
    is_first = false;
  }
  return true;
}

// Copies the result over the shared blocks to a split, which continues from it; false if there are none.
bool resume(const Attention& op, const Plan& plan, const Stretch& stretch, const Partial& result) {
  const QueryTile& tile = *stretch.tile;
  if (plan.of_rows.empty() || stretch.split != tile.first_split()) return false;
  const Shared& mine = plan.of_rows[tile.parts->row];
  if (!mine.has_begun) return false;
  for (int head = 0; head < tile.heads; head++) {
    const Partial part = mine.begun.at(tile.first_head + head, op.value_dim);
    copy(result.from(head * tile.count, op.value_dim), part, tile.count, op.value_dim);
  }
  return true;
}

// Computes tiles [first, end) one after the other. `then` is the tile with which this thread will probably continue.
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
    bool started = false;
    for (int head = 0; head < tile.heads; head++) {
      started = start_from_shares(op, plan, tile, head, whole.from(head * tile.count, op.value_dim));
    }
    for (int64_t split = tile.first_split(); split < tile.end_split(); split++, started = true) {
      const int64_t next_tile = i + 1 < end ? i + 1 : then;
      const Stretch next = split + 1 < tile.end_split() ? Stretch{&tile, split + 1} : start(next_tile);
      const Partial& result = started ? part : whole;
      const Stretch stretch = {&tile, split, split > tile.first_split()};
      attend_in<E>(op, stretch, next, result, resume(op, plan, stretch, result));
      if (started) merge(whole, part, vectors, op.value_dim);
    }
    for (int head = 0; head < tile.heads; head++) {
      write_out<E>(op, tile, head, whole.from(head * tile.count, op.value_dim));
    }
  }
}

// Each thread starts with its own tiles, one by one. Threads have different numbers of tiles, so parts of a share may
// be empty.
template <class E, class Call>
void run_by_owner(const Call& op, const Plan& plan, int threads) {
  int64_t most = 1;
  for (int i = 0; i < threads; i++) most = std::max(most, plan.of_threads[i + 1] - plan.of_threads[i]);
  parallel_shares(threads, threads * most, [&](int64_t i) {
    const int64_t first = plan.of_threads[i / most], count = plan.of_threads[i / most + 1] - first, part = i % most;
    const int64_t end = first + count * (part + 1) / most;
    walk_tiles<E>(op, plan, first + count * part / most, end, end);
  });
}

// A thread takes some tiles, or a large one, and computes all their splits.
template <class E, class Call>
void run_by_tile(const Call& op, const Plan& plan, int threads) {
  const int64_t tiles = (int64_t)plan.tiles.size();
  if (threads == (int64_t)plan.of_threads.size() - 1) return run_by_owner<E>(op, plan, threads);
  const int64_t parts = plan.are_small ? std::min<int64_t>(tiles, kPartsOfThread * threads) : tiles;
  const auto edge = [&](int64_t part) { return part < parts ? tiles * part / parts : tiles; };
  parallel_items(threads, parts, [&](int64_t i) { walk_tiles<E>(op, plan, edge(i), edge(i + 1), edge(i + threads)); });
}

// A thread takes one split of one tile. Used for few tiles with long contexts.
template <class E, class Call>
void run_by_split(const Call& op, const Plan& plan, int threads) {
  struct Merged {
    const QueryTile* tile;
    int head;
    size_t first, end;  // range of the tile's items
  };
  std::vector<Item> items;
  std::vector<Merged> merged;
  float* free = split_room.take(plan.floats);
  for (const QueryTile& tile : plan.tiles) {
    const size_t first = items.size();
    for (int64_t split = tile.first_split(); split < tile.end_split(); split++) {
      const Partial result = Partial::at(free, tile.vectors());
      items.push_back({{&tile, split}, result, resume(op, plan, {&tile, split}, result)});
      free += Partial::floats(tile.vectors(), op.value_dim);
    }
    for (int head = 0; head < tile.heads; head++) merged.push_back({&tile, head, first, items.size()});
  }
  attend_to_items<E>(op, items, threads);
  parallel_items(threads_for(plan.floats, kSmallMerge, threads), (int64_t)merged.size(), [&](int64_t i) {
    const auto& [tile, head, first, end] = merged[i];
    const Partial whole = Partial::at(memory.whole, tile->count);
    bool started = start_from_shares(op, plan, *tile, head, whole);
    for (size_t item = first; item < end; item++, started = true) {
      const Partial part = items[item].result.from(head * tile->count, op.value_dim);
      if (started) merge(whole, part, tile->count, op.value_dim);
      else copy(whole, part, tile->count, op.value_dim);
    }
    write_out<E>(op, *tile, head, whole);
  });
}

template <class E, class Call>
void run(const Call& op, const Plan& plan) {
  const int threads = plan.shared.empty() ? threads_for(plan.work, kSmall, op.threads) : (int)op.threads;
  run_shared<E>(op, plan);
  const bool few = threads > 1 && (int64_t)plan.tiles.size() < 4 * threads;
  if (few && plan.floats <= kMostPartials) run_by_split<E>(op, plan, threads);
  else run_by_tile<E>(op, plan, threads);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if an index leads outside of its table, 2 if there is not enough memory, else 0.
extern "C" int attention(const Attention* op) try {
  const Plan* plan = plan_attention(*op);
  if (!plan) return 1;
  with_types([&](auto element) {
    if (op->kv_is_int8) run<decltype(element)>(Int8Call(*op), *plan);
    else run<decltype(element)>(*op, *plan);
  }, op->is_bf16);
  return 0;
} catch (const std::bad_alloc&) {
  return 2;
}

extern "C" int64_t attention_size() { return sizeof(Attention); }
