// Search for shared prefixes: rows whose page tables begin with the same pages, found as in a prefix tree.
#include "attention/attention.h"

#include <utility>

namespace rootgraft {
namespace {

using Rows = std::vector<int64_t>;

struct Search {
  const Attention& op;
  std::vector<SharedSplit>& found;

  // A row that fills a large part of a tile alone gains nothing from sharing.
  bool joins(int64_t row) const {
    const int64_t queries = op.queries(row);
    return queries > 0 && queries <= kTileQueries / 2;
  }

  // Whether all queries of the row see all keys of the split's first blocks, and at least one key after them.
  bool sees(int64_t row, int64_t split, int blocks) const {
    const int64_t last = op.position(row, op.queries(row) - 1);
    return split * kSplit + blocks * kBlock <= op.position(row, 0) && op.first_key(last) <= split * kSplit;
  }

  bool same_pages(int64_t a, int64_t b, int64_t split, int blocks) const {
    const int64_t key = split * kSplit, first = key / op.page_size;
    const int64_t end = (key + blocks * kBlock - 1) / op.page_size + 1;
    return std::equal(op.pages(a) + first, op.pages(a) + end, op.pages(b) + first);
  }

  // Visits rows that share all splits before this one.
  void visit(Rows rows, int64_t split) {
    for (int blocks = kSplit / kBlock; blocks > 0; blocks--) rows = visit_blocks(rows, split, blocks);
  }

  // Records the rows that share this number of blocks of a split. Returns the other rows.
  Rows visit_blocks(Rows& rows, int64_t split, int blocks) {
    const auto is_blind = [&](int64_t row) { return !sees(row, split, blocks); };
    const auto seeing = std::partition(rows.begin(), rows.end(), is_blind);
    Rows rest(rows.begin(), seeing);
    rows.erase(rows.begin(), seeing);
    const int64_t page = split * kSplit / op.page_size;
    std::sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) {
      return std::make_pair(op.pages(a)[page], a) < std::make_pair(op.pages(b)[page], b);
    });
    for (size_t i = 0; i < rows.size();) {
      size_t end = i + 1;
      while (end < rows.size() && same_pages(rows[i], rows[end], split, blocks)) end++;
      if (end - i == 1) {
        rest.push_back(rows[i]);
      } else {
        add(&rows[i], &rows[end - 1] + 1, split, blocks);
        if (found.back().is_whole()) visit(Rows(rows.begin() + i, rows.begin() + end), split + 1);
      }
      i = end;
    }
    return rest;
  }

  void add(const int64_t* row, const int64_t* end, int64_t split, int blocks) {
    bool full = true;  // whether a tile has room for no further row
    for (; row < end; row++) {
      const int count = (int)op.queries(*row);
      if (full || found.back().count + count > kTileQueries) found.push_back({split, blocks, {}, 0});
      full = false;
      found.back().parts.push_back({*row, 0, count});
      found.back().count += count;
    }
  }
};

}  // namespace

std::vector<SharedSplit> find_shared_splits(const Attention& op) {
  std::vector<SharedSplit> found;
  Search search{op, found};
  Rows rows;
  for (int64_t row = 0; row < op.rows; row++) {
    if (search.joins(row)) rows.push_back(row);
  }
  search.visit(std::move(rows), 0);
  return found;
}

}  // namespace rootgraft
