// Multi-LoRA: adds the low-rank part of many adapters to a projection of the base model:
//
//   y[t] = gain * (y[t] + B (scale * A x[t])) + add           for each token t of each segment; a segment has one slot
//
// Each slot has its own ranks without padding. The work is split among the threads by tokens, ranks and columns. But
// every sum over K or over the ranks has a fixed order, so a token's bits do not depend on the other tokens.
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "ops/lora.h"
#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of multiplications below which one thread is faster
constexpr int kTile = kLanes == 16 ? 4 : 2;  // number of tokens, and of ranks or vectors of columns, held in registers
constexpr int kTokens = 16;                  // tokens of a work item
constexpr int kRanks = 16;                   // ranks of a work item
constexpr int64_t kColumns = 512;            // columns of a work item, in whole blocks
constexpr int64_t kBlockColumns = 64;        // columns of a block of B; the last block of a module may have fewer
// Software prefetch: a decode step reads an adapter once, in pieces too short for the hardware's prefetchers. Without
// it, a fifth more time is needed.
constexpr int kRanksAhead = 2 * kTile;  // number of rows of A between a product and its prefetch
constexpr int kStepsAhead = 48;         // number of rows of a block of B between a product and its prefetch
constexpr int kLine = kWidth * 4;            // bytes of 16 words

struct Segment {
  const Slot* slot;
  const int32_t* tokens;
  int64_t count;
  float* shrunk;  // [count][R], the products with A
};

// Tokens [token, token_end) of a segment, and ranks or columns of a module [from, to).
struct Piece {
  const Segment* segment;
  int64_t token, token_end, module, from, to;
};

// Calls f(Count<1>{}), ... f(Count<kTile>{}).
template <int N>
struct Count {
  static constexpr int value = N;
};
template <class F>
INLINE void with_count(int count, F f) {
  if constexpr (kTile == 4) {
    if (count == 4) return f(Count<4>{});
    if (count == 3) return f(Count<3>{});
  }
  if (count == 2) return f(Count<2>{});
  f(Count<1>{});
}

// Calls f(first, count) for tiles that cover [from, to).
template <class F>
INLINE void for_tiles(int64_t from, int64_t to, int64_t tile, F f) {
  for (; from < to; from += tile) f(from, (int)std::min(tile, to - from));
}

INLINE Words load_words_part(const char* from, int64_t bytes) {
  uint32_t words[kWidth] = {};
  std::memcpy(words, from, bytes);
  return load_words(words);
}

// M rows of x times R rows of A: out[m][r] = scale[r] * (x[m] . a[r]).
template <class E, int M, int R>
INLINE void dot_tile(const char* const* x, const char* a, int64_t bytes, const float* scale, float* out,
                     int64_t out_stride) {
  Floats sums[M][R];
  for (int m = 0; m < M; m++) {
    for (int r = 0; r < R; r++) sums[m][r] = broadcast(0.0f);
  }
  const auto step = [&](auto load, int64_t i) {
    Words row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      row[r] = load(a + r * bytes + i);
      __builtin_prefetch(a + (r + kRanksAhead) * bytes + i, 0, 2);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const Words token = load(x[m] + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[m][r] = E::dot(token, row[r], sums[m][r]);
    }
  };
  int64_t i = 0;
  for (; i + kLine <= bytes; i += kLine) step([](const char* from) { return load_words((const uint32_t*)from); }, i);
  if (i < bytes) step([&](const char* from) { return load_words_part(from, bytes - i); }, i);
  for (int m = 0; m < M; m++) {
    for (int r = 0; r < R; r++) out[m * out_stride + r] = sum(sums[m][r]) * scale[r];
  }
}

template <class E>
void shrink(const LoraOp& op, const Piece& piece) {
  const Segment& segment = *piece.segment;
  const int64_t rank = segment.slot->total(), bytes = op.width * (int64_t)sizeof(typename E::Value);
  for_tiles(piece.token, piece.token_end, kTile, [&](int64_t token, int tokens) {
    const char* x[kTile];
    for (int m = 0; m < tokens; m++) x[m] = op.x + segment.tokens[token + m] * bytes;
    for_tiles(piece.from, piece.to, kTile, [&](int64_t r, int ranks) {
      with_count(tokens, [&](auto m_count) {
        with_count(ranks, [&](auto r_count) {
          dot_tile<E, m_count.value, r_count.value>(x, segment.slot->a + r * bytes, bytes, segment.slot->scale + r,
                                                    segment.shrunk + token * rank + r, rank);
        });
      });
    });
  });
}

// The product with a one-hot x: a row of the transposed A.
template <class E>
void gather(const LoraOp& op, const Piece& piece) {
  using Value = typename E::Value;
  const Segment& segment = *piece.segment;
  const int64_t rank = segment.slot->total();
  for (int64_t token = piece.token; token < piece.token_end; token++) {
    const Value* row = (const Value*)segment.slot->a + op.ids[segment.tokens[token]] * rank;
    for (int64_t r = piece.from; r < piece.to; r++) {
      segment.shrunk[token * rank + r] = E::widen(row[r]) * segment.slot->scale[r];
    }
  }
}

// Loads 16 values, or only the first `count` of them followed by zeros.
template <class E, bool kWhole>
INLINE Floats load_values(const typename E::Value* from, int count) {
  if constexpr (kWhole) return E::load(from);
  typename E::Value values[kWidth] = {};
  std::memcpy(values, from, count * sizeof(values[0]));
  return E::load(values);
}

// Computes M tokens by V vectors of columns; of the last vector only the first `last` columns.
template <class E, class Y, int M, int V, bool kWhole>
INLINE void expand_tile(const float* const* shrunk, int64_t rank, const typename E::Value* b, int64_t b_stride,
                        typename Y::Value* const* y, const float* gain, const float* add, int last) {
  Floats sums[M][V];
  for (int m = 0; m < M; m++) {
    for (int v = 0; v < V; v++) sums[m][v] = broadcast(0.0f);
  }
  for (int64_t r = 0; r < rank; r++, b += b_stride) {
    Floats column[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      column[v] = load_values<E, kWhole>(b + v * kWidth, last);
      __builtin_prefetch(b + v * kWidth + kStepsAhead * b_stride, 0, 2);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const Floats factor = broadcast(shrunk[m][r]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[m][v] = fma(factor, column[v], sums[m][v]);
    }
  }
  for (int m = 0; m < M; m++) {
    for (int v = 0; v < V; v++) {
      typename Y::Value* out = y[m] + v * kWidth;
      Floats value = load_values<Y, kWhole>(out, last) + sums[m][v];
      if (gain) value = value * load_values<Fp32, kWhole>(gain + v * kWidth, last);
      if (add) value = value + load_values<Fp32, kWhole>(add + v * kWidth, last);
      if constexpr (kWhole) {
        Y::store(out, value);
      } else {
        typename Y::Value values[kWidth];
        Y::store(values, value);
        std::memcpy(out, values, last * sizeof(values[0]));
      }
    }
  }
}

template <class E, class Y>
void expand(const LoraOp& op, const Piece& piece) {
  using Value = typename E::Value;
  using Out = typename Y::Value;
  const Segment& segment = *piece.segment;
  const Slot& slot = *segment.slot;
  const int64_t total = slot.total(), rank = slot.rank[piece.module], columns = op.columns[piece.module];
  const int64_t width = op.columns[0] + op.columns[1] + op.columns[2];
  int64_t first_rank = 0, first_column = 0;
  const Value* b = (const Value*)slot.b;
  for (int m = 0; m < piece.module; m++) {
    first_rank += slot.rank[m];
    first_column += op.columns[m];
    b += slot.rank[m] * op.columns[m];
  }
  for_tiles(piece.token, piece.token_end, kTile, [&](int64_t token, int tokens) {
    const float* shrunk[kTile];
    Out* rows[kTile];
    for (int m = 0; m < tokens; m++) {
      shrunk[m] = segment.shrunk + (token + m) * total + first_rank;
      rows[m] = (Out*)op.y + segment.tokens[token + m] * width + first_column;
    }
    const auto tile = [&](auto m_count, auto v_count, auto whole, int64_t block, int64_t column, int last) {
      Out* y[kTile];
      for (int m = 0; m < m_count.value; m++) y[m] = rows[m] + column;
      const float* gain = slot.gain ? slot.gain + first_column + column : nullptr;
      const float* add = slot.add ? slot.add + first_column + column : nullptr;
      expand_tile<E, Y, m_count.value, v_count.value, whole.value != 0>(
          shrunk, rank, b + block * rank + (column - block), std::min(kBlockColumns, columns - block), y, gain, add,
          last);
    };
    with_count(tokens, [&](auto m_count) {
      for_tiles(piece.from, piece.to, kBlockColumns, [&](int64_t block, int width) {
        const int64_t vectors_end = block + width / kWidth * kWidth;
        for_tiles(block, vectors_end, kTile * kWidth, [&](int64_t column, int count) {
          with_count(count / kWidth, [&](auto v_count) { tile(m_count, v_count, Count<1>{}, block, column, kWidth); });
        });
        const int left = width % kWidth;
        if (left) tile(m_count, Count<1>{}, Count<0>{}, block, vectors_end, left);
      });
    });
  });
}

void add_pieces(std::vector<Piece>& pieces, const Segment& segment, int64_t module, int64_t size, int64_t cut) {
  for (int64_t token = 0; token < segment.count; token += kTokens) {
    for (int64_t from = 0; from < size; from += cut) {
      pieces.push_back({&segment, token, std::min<int64_t>(token + kTokens, segment.count), module, from,
                        std::min(from + cut, size)});
    }
  }
}

bool valid(const LoraOp& op) {
  for (int64_t g = 0; g < op.segments; g++) {
    if (op.slots[g] < 0 || op.slots[g] >= op.num_slots || op.starts[g] > op.starts[g + 1]) return false;
  }
  if (op.segments && op.starts[0] != 0) return false;
  const int64_t count = op.segments ? op.starts[op.segments] : 0;
  if (count > op.num_tokens) return false;
  for (int64_t i = 0; i < count; i++) {
    const int32_t token = op.tokens[i];
    if (token < 0 || token >= op.rows) return false;
    if (op.ids && (op.ids[token] < 0 || op.ids[token] >= op.width)) return false;
  }
  return true;
}

template <class E>
void run(const LoraOp& op, const std::vector<Segment>& segments, int64_t multiplications) {
  std::vector<Piece> shrinks, expands;
  for (const Segment& segment : segments) {
    add_pieces(shrinks, segment, 0, segment.slot->total(), kRanks);
    for (int m = 0; m < kModules; m++) {
      if (segment.slot->rank[m]) add_pieces(expands, segment, m, op.columns[m], kColumns);
    }
  }
  const int threads = threads_for(multiplications, kSmall, op.threads);
  parallel_items(threads, (int64_t)shrinks.size(), [&](int64_t i) {
    if (op.ids) gather<E>(op, shrinks[i]);
    else shrink<E>(op, shrinks[i]);
  });
  parallel_items(threads, (int64_t)expands.size(), [&](int64_t i) {
    if (op.y_is_bf16) expand<E, Bf16>(op, expands[i]);
    else expand<E, Fp32>(op, expands[i]);
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 0, or 1 if an index is out of range (nothing is written), or 2 if there is not enough memory.
extern "C" int lora_shrink_expand(const LoraOp* op) {
  if (!valid(*op)) return 1;
  try {
    std::vector<Segment> segments;
    int64_t floats = 0, multiplications = 0;
    for (int64_t g = 0; g < op->segments; g++) {
      const Slot* slot = op->table + op->slots[g];
      const int64_t count = op->starts[g + 1] - op->starts[g];
      if (!slot->a || !count) continue;
      segments.push_back({slot, op->tokens + op->starts[g], count, nullptr});
      floats += count * slot->total();
      if (!op->ids) multiplications += count * slot->total() * op->width;
      for (int m = 0; m < kModules; m++) multiplications += count * slot->rank[m] * op->columns[m];
    }
    const std::unique_ptr<float[]> shrunk(new float[floats]);
    float* next = shrunk.get();
    for (Segment& segment : segments) {
      segment.shrunk = next;
      next += segment.count * segment.slot->total();
    }
    if (op->is_bf16) run<Bf16>(*op, segments, multiplications);
    else run<Fp32>(*op, segments, multiplications);
  } catch (const std::bad_alloc&) {
    return 2;
  }
  return 0;
}

extern "C" int64_t lora_shrink_expand_size() { return sizeof(LoraOp); }
