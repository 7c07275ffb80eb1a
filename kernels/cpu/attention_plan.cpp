#include "attention_plan.h"

#include <algorithm>
#include <array>

#include "tile.h"

namespace rootgraft {
namespace {

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

void plan_shared(const Attention& op, Room& room, Plan& plan) {
  plan.shared = find_shared_splits(op);
  int64_t floats = 0;
  for (const SharedSplit& shared : plan.shared) floats += op.kv_heads * Partial::floats(shared.count, op.head_dim);
  if (floats > kMostPartials) plan.shared.clear();
  if (plan.shared.empty()) return;
  plan.partials = room.take(floats);
  plan.of_rows.resize(op.rows);
  float* free = plan.partials;
  for (const SharedSplit& shared : plan.shared) {
    int64_t query = 0;
    for (const Queries& part : shared.parts) {
      Shared& mine = plan.of_rows[part.row];
      const Share share = {free, shared.count, query};
      if (shared.is_whole()) mine.whole.push_back(share);
      else mine.begun = share, mine.has_begun = true;
      mine.keys += shared.blocks * kBlock;
      query += part.count;
    }
    const int64_t begin = shared.split * kSplit, end = begin + shared.blocks * kBlock;
    for (int64_t head = 0; head < op.kv_heads; head++) {
      plan.shared_tiles.push_back(
          {shared.parts.data(), (int)shared.parts.size(), shared.count, head, 1, begin, end});
      free += Partial::floats(shared.count, op.head_dim);
    }
  }
}

// KV heads of a tile of these queries. The heads of few queries stay together, where that leaves enough tiles for the
// threads: memory is then read in longer pieces.
int heads_together(const Attention& op, const Queries& part, int64_t parts) {
  if (part.count > kTileRows || parts < 4 * op.threads) return 1;
  return (int)std::min<int64_t>(op.kv_heads, kTileQueries / part.count);
}

int64_t scores_of(const QueryTile& tile) { return tile.vectors() * (tile.end - tile.begin); }

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
    plan.are_small &= part.count <= kTileRows;
  }
  // So that no thread begins with a large one when the others are about to end.
  if (!plan.are_small) {
    std::stable_sort(plan.tiles.begin(), plan.tiles.end(),
                     [](const QueryTile& a, const QueryTile& b) { return scores_of(a) > scores_of(b); });
  }
  for (const QueryTile& tile : plan.tiles) {
    plan.work += scores_of(tile) * op.head_dim;
    plan.floats += (tile.end_split() - tile.first_split()) * Partial::floats(tile.vectors(), op.head_dim);
  }
}

// All that a plan depends on.
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
  using Numbers = std::array<int64_t, 10>;

  static Numbers numbers(const Attention& op) {
    return {op.tokens,   op.rows,      op.table_width, op.num_pages, op.heads,
            op.kv_heads, op.page_size, op.head_dim,    op.window,    op.threads};
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
  last = {};  // there may be no memory
  plan = {};
  plan_shared(op, room, plan);
  plan_tiles(op, plan);
  last.take(op);
  return &plan;
}

}  // namespace rootgraft
