#include "attention/attention_plan.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "gemm/tile.h"

namespace rootgraft {
namespace {

// Whether every index of the call is within its table.
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

bool same_rows(const SharedSplit& a, const SharedSplit& b) {
  return std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(),
                    [](const Queries& mine, const Queries& other) { return mine.row == other.row; });
}

// The consecutive splits that the same rows share, by the index of the first of them in `all`.
using Chains = std::map<size_t, std::vector<size_t>>;

Chains find_chains(const std::vector<SharedSplit>& all) {
  Chains chains;
  for (size_t i = 0; i < all.size(); i++) {
    if (all[i].split != 0 || !all[i].is_whole()) continue;
    std::vector<size_t> chain = {i};
    for (size_t next = i + 1; next < all.size(); next++) {
      const bool follows = all[next].split == (int64_t)chain.size() && all[next].is_whole();
      if (follows && same_rows(all[i], all[next])) chain.push_back(next);
    }
    if (chain.size() > 1) chains[i] = std::move(chain);
  }
  return chains;
}

// Number of KV heads of which one thread computes a whole chain. The other work must keep all threads busy until the
// last chain ends.
int64_t heads_in_one(const Attention& op, int64_t chains) {
  if (op.threads == 1) return op.kv_heads;
  for (int64_t heads = op.kv_heads - 1; heads > 0; heads--) {
    const int64_t idle = (op.threads - chains * heads % op.threads) % op.threads;
    if (idle <= chains * (op.kv_heads - heads)) return heads;
  }
  return 0;
}

// Plans the shared tiles, and places their partials one after another.
class SharedPlanner {
 public:
  SharedPlanner(const Attention& op, Plan& plan, float* room) : op_(op), plan_(plan), free_(room) {}

  // Adds the keys from the start of a split up to `end`, for some KV heads.
  void add(const SharedSplit& shared, int64_t end, int64_t first_head, int64_t end_head) {
    if (first_head == end_head) return;
    int64_t query = 0;
    for (const Queries& part : shared.parts) {
      Shared& mine = plan_.of_rows[part.row];
      const Share share = {free_, first_head, end_head, shared.count, query};
      if (shared.is_whole()) mine.whole.push_back(share);
      else mine.begun = share, mine.has_begun = true;
      query += part.count;
    }
    for (int64_t head = first_head; head < end_head; head++) {
      const int64_t begin = shared.split * kSplit;
      plan_.shared_tiles.push_back(
          {{shared.parts.data(), (int)shared.parts.size(), shared.count, head, 1, begin, end}, free_});
      free_ += Partial::floats(shared.count, op_.value_dim);
    }
  }

 private:
  const Attention& op_;
  Plan& plan_;
  float* free_;
};

void plan_shared(const Attention& op, Room& room, Plan& plan) {
  plan.shared = find_shared_splits(op);
  int64_t floats = 0;  // upper bound
  for (const SharedSplit& shared : plan.shared) floats += op.kv_heads * Partial::floats(shared.count, op.value_dim);
  if (floats > kMostPartials) plan.shared.clear();
  if (plan.shared.empty()) return;
  plan.of_rows.resize(op.rows);
  const Chains chains = find_chains(plan.shared);
  const int64_t in_one = heads_in_one(op, (int64_t)chains.size());
  std::vector<int64_t> first_head(plan.shared.size(), 0);
  SharedPlanner planner(op, plan, room.take(floats));
  for (const auto& [first, chain] : chains) {
    planner.add(plan.shared[first], (int64_t)chain.size() * kSplit, 0, in_one);
    for (const size_t i : chain) first_head[i] = in_one;
  }
  for (size_t i = 0; i < plan.shared.size(); i++) {
    const SharedSplit& shared = plan.shared[i];
    planner.add(shared, shared.split * kSplit + shared.blocks * kBlock, first_head[i], op.kv_heads);
    for (const Queries& part : shared.parts) plan.of_rows[part.row].keys += shared.blocks * kBlock;
  }
}

// Number of KV heads in a tile of these queries. The heads of few queries stay together if enough splits remain for the
// threads: memory is then read in longer pieces.
int heads_together(const Attention& op, const Queries& part, int64_t splits) {
  if (part.count > kTileRows || splits < 4 * op.threads) return 1;
  return (int)std::min<int64_t>(op.kv_heads, kTileQueries / part.count);
}

int64_t scores_of(const QueryTile& tile) { return tile.vectors() * (tile.end - tile.begin); }

// Sorts the tiles so that the largest come first; no thread should start a large one when the others are about to end.
// With many tokens, each thread starts with the tiles whose rows it also has in linear ops and norms. So neither
// queries nor results move between caches.
void order_tiles(const Attention& op, Plan& plan) {
  constexpr int64_t kManyTokens = 128;  // tokens of each thread
  const bool has_owners = op.threads > 1 && op.tokens >= kManyTokens * op.threads;
  const auto owner = [&](const QueryTile& tile) {
    const Queries& queries = *tile.parts;
    const int64_t middle = queries.first + queries.count / 2;
    return has_owners ? (op.query_start[queries.row] + middle / op.group()) * op.threads / op.tokens : 0;
  };
  std::stable_sort(plan.tiles.begin(), plan.tiles.end(), [&](const QueryTile& a, const QueryTile& b) {
    return std::make_pair(owner(a), -scores_of(a)) < std::make_pair(owner(b), -scores_of(b));
  });
  if (!has_owners) return;
  plan.of_threads.assign(op.threads + 1, 0);
  for (const QueryTile& tile : plan.tiles) plan.of_threads[owner(tile) + 1]++;
  for (int64_t thread = 0; thread < op.threads; thread++) plan.of_threads[thread + 1] += plan.of_threads[thread];
}

// Places tiles with the same keys after the largest such tile of their thread, which has read the keys. This is not
// done if the tiles evict each other from the cache, or if it is not known which thread takes a tile.
void find_cached(const Attention& op, Plan& plan) {
  if (op.threads > 1 && plan.of_threads.empty()) return;
  constexpr int64_t kCachedBytes = 512 << 10;  // bytes of a row's keys and values
  std::map<std::pair<int64_t, int64_t>, int64_t> read;  // by row and KV head: the first key that was read
  for (size_t i = 0, thread = 0; i < plan.tiles.size(); i++) {
    for (; !plan.of_threads.empty() && (int64_t)i == plan.of_threads[thread + 1]; thread++) read.clear();
    QueryTile& tile = plan.tiles[i];
    const auto [known, is_new] = read.try_emplace({tile.parts->row, tile.first_head}, tile.begin);
    const int64_t bytes = 2 * (tile.end - tile.begin) * op.kv_heads * op.cell_bytes();
    tile.cached = !is_new && known->second <= tile.begin && bytes <= kCachedBytes;
  }
}

void plan_tiles(const Attention& op, Plan& plan) {
  for (int64_t row = 0; row < op.rows; row++) {
    for (int64_t first = 0; first < op.queries(row); first += kTileQueries) {
      plan.queries.push_back({row, first, (int)std::min<int64_t>(kTileQueries, op.queries(row) - first)});
    }
  }
  const auto whole = [&](const Queries& part) {  // a tile of all KV heads
    const int64_t shared = plan.of_rows.empty() ? 0 : plan.of_rows[part.row].keys;
    const int64_t begin = op.first_key(op.position(part.row, part.first));
    const int64_t end = op.position(part.row, part.first + part.count - 1) + 1;
    return QueryTile{&part, 1, part.count, 0, (int)op.kv_heads, std::max(begin, shared), end};
  };
  int64_t splits = 0;
  for (const Queries& part : plan.queries) {
    const QueryTile tile = whole(part);
    splits += std::max<int64_t>(1, tile.end_split() - tile.first_split());
  }
  for (const Queries& part : plan.queries) {
    QueryTile tile = whole(part);
    const int heads = heads_together(op, part, splits);
    for (; tile.first_head < op.kv_heads; tile.first_head += heads) {
      tile.heads = (int)std::min<int64_t>(heads, op.kv_heads - tile.first_head);
      plan.tiles.push_back(tile);
    }
    plan.are_small &= part.count <= kTileRows;
  }
  if (!plan.are_small) {
    order_tiles(op, plan);
    find_cached(op, plan);
  }
  for (const QueryTile& tile : plan.tiles) {
    plan.work += scores_of(tile) * op.head_dim;
    plan.floats += (tile.end_split() - tile.first_split()) * Partial::floats(tile.vectors(), op.value_dim);
  }
}

// The arguments on which a plan depends, as a cache key.
class Question {
 public:
  bool is_of(const Attention& op) const {
    return numbers_ == numbers(op) && same(tables_[0], op.query_start, op.rows + 1) &&
           same(tables_[1], op.context_len, op.rows) && same(tables_[2], op.page_table, op.rows * op.table_width);
  }

  void take(const Attention& op) {
    numbers_ = numbers(op);
    tables_[0].assign(op.query_start, op.query_start + op.rows + 1);
    tables_[1].assign(op.context_len, op.context_len + op.rows);
    tables_[2].assign(op.page_table, op.page_table + op.rows * op.table_width);
  }

 private:
  using Numbers = std::array<int64_t, 12>;

  static Numbers numbers(const Attention& op) {
    return {op.tokens,   op.rows,      op.table_width, op.num_pages, op.heads,
            op.kv_heads, op.page_size, op.head_dim,    op.value_dim, op.window, op.threads,
            op.chunk};
  }

  static bool same(const std::vector<int32_t>& known, const int32_t* values, int64_t count) {
    return (int64_t)known.size() == count && std::equal(known.begin(), known.end(), values);
  }

  Numbers numbers_ = {};
  std::vector<int32_t> tables_[3];
};

}  // namespace

const Plan* plan_attention(const Attention& op) {
  thread_local Room room;
  thread_local Plan plan;
  thread_local Question last;
  if (last.is_of(op)) return &plan;
  if (!in_bounds(op)) return nullptr;
  last = {};  // cleared first, as there may not be enough memory for a new plan
  plan = {};
  plan_shared(op, room, plan);
  plan_tiles(op, plan);
  last.take(op);
  return &plan;
}

}  // namespace rootgraft
