// Indexed attention: for each token, chooses the earlier tokens with the highest scores of a separate index.
#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "ops/index_rows.h"
#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 16;  // number of products below which one thread is faster
constexpr int64_t kHeads = 4;        // number of heads whose sums are computed side by side

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct ChooseTokens {
  const void* q;        // [tokens][heads][dim]
  const void* weights;  // [tokens][heads]
  const void* keys;     // [num_pages * page_size][dim]
  const int32_t *page_table, *query_start, *context_len;  // [rows][table_width], [rows + 1], [rows]
  // [tokens][most + 1]: cells in the order of their positions, then zeros; the last entry is their number
  int32_t* out;
  int64_t tokens, rows, table_width, num_pages, page_size, heads, dim, most, is_bf16, threads;
};

// Memory that one thread needs for a token, used again for the next one.
struct Scratch {
  std::vector<float> queries, weights, panel;  // [heads, padded][dim], [heads, padded], [dim][kWidth]
  std::vector<uint64_t> order, ranked;

  explicit Scratch(const ChooseTokens& op)
      : queries((op.heads + kHeads - 1) / kHeads * kHeads * op.dim),
        weights((op.heads + kHeads - 1) / kHeads * kHeads),
        panel(op.dim * kWidth) {}
};

// A sort key for each score and position: larger for a higher score, and for the earlier position of equal scores. NaN
// ranks lowest.
INLINE uint64_t rank_of(float score, int64_t position) {
  score += 0.0f;  // turns -0 into 0
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  bits = score != score ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (uint64_t)bits << 32 | (0xFFFFFFFFu - (uint32_t)position);
}

// The scores of kWidth keys, with their dimensions as rows of the panel: sum of weight * max(0, query . key).
INLINE Floats scores(const ChooseTokens& op, const Scratch& scratch) {
  Floats total = broadcast(0.0f);
  for (int64_t head = 0; head < (int64_t)scratch.weights.size(); head += kHeads) {
    const float* query = scratch.queries.data() + head * op.dim;
    Floats sums[kHeads];
    for (Floats& each : sums) each = broadcast(0.0f);
    for (int64_t d = 0; d < op.dim; d++) {
      const Floats key = load(scratch.panel.data() + d * kWidth);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kHeads; i++) sums[i] = fma(broadcast(query[i * op.dim + d]), key, sums[i]);
    }
    for (int64_t i = 0; i < kHeads; i++) {
      total = fma(broadcast(scratch.weights[head + i]), max(broadcast(0.0f), sums[i]), total);
    }
  }
  return total;
}

template <class E>
void score_keys(const ChooseTokens& op, int64_t row, int64_t context, Scratch& scratch) {
  scratch.order.resize(context);
  for (int64_t first = 0; first < context; first += kWidth) {
    const int64_t count = std::min<int64_t>(kWidth, context - first);
    fill_panel<E>(op, row, first, count, scratch.panel.data());
    float found[kWidth];
    store(found, scores(op, scratch));
    for (int64_t lane = 0; lane < count; lane++) {
      scratch.order[first + lane] = rank_of(found[lane], first + lane);
    }
  }
}

template <class E>
void choose(const ChooseTokens& op, int64_t token, int64_t row, Scratch& scratch) {
  const int64_t context = (int64_t)op.context_len[row] - (op.query_start[row + 1] - token) + 1;
  int32_t *out = op.out + token * (op.most + 1), *next = out;
  if (context <= op.most) {
    for (int64_t at = 0; at < context; at++) *next++ = (int32_t)cell_of(op, row, at);
  } else {
    const auto* q = static_cast<const typename E::Value*>(op.q) + token * op.heads * op.dim;
    const auto* weights = static_cast<const typename E::Value*>(op.weights) + token * op.heads;
    for (int64_t i = 0; i < op.heads * op.dim; i++) scratch.queries[i] = E::widen(q[i]);
    for (int64_t i = 0; i < op.heads; i++) scratch.weights[i] = E::widen(weights[i]);
    score_keys<E>(op, row, context, scratch);
    scratch.ranked.assign(scratch.order.begin(), scratch.order.end());
    const auto least = scratch.ranked.begin() + op.most - 1;
    std::nth_element(scratch.ranked.begin(), least, scratch.ranked.end(), std::greater<uint64_t>());
    for (int64_t at = 0; at < context; at++) {
      if (scratch.order[at] >= *least) *next++ = (int32_t)cell_of(op, row, at);
    }
  }
  const int32_t count = (int32_t)(next - out);
  std::fill(next, out + op.most, 0);
  out[op.most] = count;
}

template <class E>
void run(const ChooseTokens& op) {
  int64_t products = 0;
  std::vector<int64_t> rows(op.tokens);
  for (int64_t row = 0; row < op.rows; row++) {
    for (int64_t token = op.query_start[row]; token < op.query_start[row + 1]; token++) rows[token] = row;
    if (op.context_len[row] <= op.most) continue;
    products += (int64_t)(op.query_start[row + 1] - op.query_start[row]) * op.context_len[row] * op.heads * op.dim;
  }
  const int threads = threads_for(products, kSmall, op.threads);
  // Memory is allocated here, as an exception must not leave a thread of the pool.
  int64_t longest = 0;
  for (int64_t row = 0; row < op.rows; row++) longest = std::max<int64_t>(longest, op.context_len[row]);
  const int64_t parts = std::min<int64_t>(std::max<int64_t>(op.tokens, 1), 2 * threads);
  std::vector<Scratch> scratches;
  scratches.reserve(parts);
  for (int64_t part = 0; part < parts; part++) scratches.emplace_back(op);
  for (Scratch& each : scratches) {
    each.order.reserve(longest);
    each.ranked.reserve(longest);
  }
  parallel_items(threads, parts, [&](int64_t part) {
    for (int64_t token = op.tokens * part / parts; token < op.tokens * (part + 1) / parts; token++) {
      choose<E>(op, token, rows[token], scratches[part]);
    }
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if the page table or the lengths lead outside of their tables, 2 if there is not enough memory, else 0.
extern "C" int choose_tokens(const ChooseTokens* op) try {
  if (!rows_in_bounds(*op)) return 1;
  with_types([&](auto element) { run<decltype(element)>(*op); }, op->is_bf16);
  return 0;
} catch (const std::bad_alloc&) {
  return 2;
}

extern "C" int64_t choose_tokens_size() { return sizeof(ChooseTokens); }
