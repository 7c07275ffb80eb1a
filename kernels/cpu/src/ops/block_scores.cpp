// Block-sparse attention: for each token and head of an index, the best score of the tokens of each block.
#include <algorithm>
#include <limits>
#include <new>
#include <vector>

#include "ops/index_rows.h"
#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 16;  // number of products below which one thread is faster

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct BlockScores {
  const void* q;     // [tokens][heads][dim]
  const void* keys;  // [num_pages * page_size][dim]
  const int32_t *page_table, *query_start, *context_len;  // [rows][table_width], [rows + 1], [rows]
  float* out;  // [tokens][heads][blocks]: the best score of the tokens of a block up to the token, else -infinity
  int64_t tokens, rows, table_width, num_pages, page_size, heads, dim, blocks, size, is_bf16, threads;
};

// Memory that one thread needs for a token, used again for the next one.
struct Scratch {
  std::vector<float> queries, panel;  // [heads][dim], [dim][kWidth]

  explicit Scratch(const BlockScores& op) : queries(op.heads * op.dim), panel(op.dim * kWidth) {}
};

// A NaN is no best score, as no comparison with it holds.
template <class E>
void score(const BlockScores& op, int64_t token, int64_t row, Scratch& scratch) {
  const int64_t seen = (int64_t)op.context_len[row] - (op.query_start[row + 1] - token) + 1;
  float* out = op.out + token * op.heads * op.blocks;
  std::fill(out, out + op.heads * op.blocks, -std::numeric_limits<float>::infinity());
  const auto* q = static_cast<const typename E::Value*>(op.q) + token * op.heads * op.dim;
  for (int64_t i = 0; i < op.heads * op.dim; i++) scratch.queries[i] = E::widen(q[i]);
  for (int64_t first = 0; first < seen; first += kWidth) {
    const int64_t count = std::min<int64_t>(kWidth, seen - first);
    fill_panel<E>(op, row, first, count, scratch.panel.data());
    for (int64_t head = 0; head < op.heads; head++) {
      Floats sum = broadcast(0.0f);
      for (int64_t d = 0; d < op.dim; d++) {
        sum = fma(broadcast(scratch.queries[head * op.dim + d]), load(scratch.panel.data() + d * kWidth), sum);
      }
      float found[kWidth];
      store(found, sum);
      for (int64_t lane = 0; lane < count; lane++) {
        float& best = out[head * op.blocks + (first + lane) / op.size];
        if (found[lane] > best) best = found[lane];
      }
    }
  }
}

template <class E>
void run(const BlockScores& op) {
  int64_t products = 0;
  std::vector<int64_t> rows(op.tokens);
  for (int64_t row = 0; row < op.rows; row++) {
    for (int64_t token = op.query_start[row]; token < op.query_start[row + 1]; token++) rows[token] = row;
    products += (int64_t)(op.query_start[row + 1] - op.query_start[row]) * op.context_len[row] * op.heads * op.dim;
  }
  const int threads = threads_for(products, kSmall, op.threads);
  // Memory is allocated here, as an exception must not leave a thread of the pool.
  const int64_t parts = std::min<int64_t>(std::max<int64_t>(op.tokens, 1), 2 * threads);
  std::vector<Scratch> scratches;
  scratches.reserve(parts);
  for (int64_t part = 0; part < parts; part++) scratches.emplace_back(op);
  parallel_items(threads, parts, [&](int64_t part) {
    for (int64_t token = op.tokens * part / parts; token < op.tokens * (part + 1) / parts; token++) {
      score<E>(op, token, rows[token], scratches[part]);
    }
  });
}

bool in_bounds(const BlockScores& op) {
  if (!rows_in_bounds(op)) return false;
  for (int64_t row = 0; row < op.rows; row++) {
    if (op.context_len[row] > op.blocks * op.size) return false;
  }
  return true;
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if the page table or the lengths lead outside of their tables, 2 if there is not enough memory, else 0.
extern "C" int block_scores(const BlockScores* op) try {
  if (!in_bounds(*op)) return 1;
  with_types([&](auto element) { run<decltype(element)>(*op); }, op->is_bf16);
  return 0;
} catch (const std::bad_alloc&) {
  return 2;
}

extern "C" int64_t block_scores_size() { return sizeof(BlockScores); }
