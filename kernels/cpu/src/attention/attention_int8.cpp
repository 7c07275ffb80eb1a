// Attention of a query tile over one split of its context with 8-bit KV (int8_kv.h): both products have 8-bit factors
// and exact sums.
//
// A query is rounded to 8 bits with one scale. The weights of a query for a block, each multiplied by the scale of its
// value, are rounded to unsigned bytes with a scale of their own for each block. So in blocks without the largest
// weights, small weights are still represented. Before it truncates, rounding adds a fraction that differs from lane to
// lane. So of many weights below half a step some become a whole step, and together they keep their weight. Rounding to
// the nearest would drop them all.
#include <type_traits>

#include "attention/attention_int8_softmax.h"
#include "simd/parallel.h"

namespace rootgraft {
namespace {

// words of a head that are multiplied together. A head has 16 dimensions or a multiple.
constexpr ptrdiff_t kWordsTogether = 4;

// Copies whole registers, as a call of the library takes longer.
INLINE void copy_words(const uint32_t* from, uint32_t* to, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store_words(to + i, load_words(from + i));
  for (; i < count; i++) to[i] = from[i];
}

void gather_queries(const Int8Call& op, const QueryTile& tile, Int8Scratch& scratch) {
  const int64_t group = op.group(), words = op.head_dim / kWordBytes;
  for (int head = 0; head < tile.heads; head++) {
    for_tokens(op, tile, [&](int m, int count, int64_t row, int64_t token, int64_t mate) {
      const int64_t from = (op.query_start[row] + token) * op.heads + (tile.first_head + head) * group + mate;
      const int query = head * tile.count + m;
      copy_words(op.queries + from * words, scratch.queries + query * words, count * words);
      std::copy_n(op.factors + from, count, scratch.factor + query);
      std::copy_n(op.starts + from, count, scratch.start + query);
    });
  }
}

// Scores of N queries of a head from `query` on; in the band they are the rows from `row` on. Must not be inlined:
// among other code the compiler would not keep all sums in registers.
template <int N, bool kPlain, int kDims>
__attribute__((noinline)) void score(const BlockWork& block, Int8Scratch& scratch, const Int8Head& head, int query,
                                     int steps, int row) {
  const ptrdiff_t words = (kDims ? kDims : block.op.head_dim) / kWordBytes;
  const int first = head.number * block.tile.count + query;
  const uint32_t* queries = scratch.queries + first * words;
  Ints dots[N][kPanels];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++) dots[i][v] = broadcast_int(scratch.start[first + i]);
  }
  for (ptrdiff_t first_word = 0; first_word < words; first_word += kWordsTogether) {
    block.ahead.step(kWordsTogether * steps);
#pragma GCC unroll 4
    for (ptrdiff_t w = first_word; w < first_word + kWordsTogether; w++) {
      Words column[kPanels];
#pragma GCC unroll 4
      for (int v = 0; v < kPanels; v++) column[v] = load_words(head.keys[v] + w * kWidth);
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        const Words word = broadcast_word(queries[i * words + w]);
#pragma GCC unroll 4
        for (int v = 0; v < kPanels; v++) dots[i][v] = dot_biased(column[v], word, dots[i][v]);
      }
    }
  }
  Floats scores[N][kPanels];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++) scores[i][v] = to_floats(dots[i][v]) * load(head.key_scales[v]);
  }
  store_scores<N, kPlain>(block, scratch, head, query, scores, scratch.band, row);
}

// values = values * shrink + weights * the block's values, for N queries of a head from `query` on, which are the rows
// of the band from `row` on, and dimensions [dim, dim + 16 P). If no sum shrinks, the multiplication is left out.
template <int N, int P, int kDims>
__attribute__((noinline)) void add_values(const BlockWork& block, const Int8Head& head, int query, const Band& band,
                                          int row, int64_t dim) {
  const int64_t dims = kDims ? kDims : block.op.head_dim;
  const auto* weights = reinterpret_cast<const uint32_t*>(band.weights + row * kBlock);
  float* to = block.result.values + (head.number * block.tile.count + query) * dims + dim;
  Ints dots[N][P];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
#pragma GCC unroll 4
    for (int v = 0; v < P; v++) dots[i][v] = broadcast_int(0);
  }
  for (int panel = 0; panel < block.rows.panels; panel++) {
    const uint32_t* values = head.values[panel] + dim;
#pragma GCC unroll 4
    for (int w = 0; w < kPanelWords; w++) {
      Words column[P];
#pragma GCC unroll 4
      for (int v = 0; v < P; v++) column[v] = load_words(values + w * dims + v * kWidth);
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        const Words word = broadcast_word(weights[i * (kBlock / kWordBytes) + w * kPanels + panel]);
#pragma GCC unroll 4
        for (int v = 0; v < P; v++) dots[i][v] = dot_bytes(word, column[v], dots[i][v]);
      }
    }
  }
  const auto store_sums = [&](auto older) {
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      const Floats scale = broadcast(band.weight_scale[row + i]);
#pragma GCC unroll 4
      for (int v = 0; v < P; v++) {
        float* sum = to + i * dims + v * kWidth;
        store(sum, fma(to_floats(dots[i][v]), scale, older(sum, i)));
      }
    }
  };
  if (block.begins) store_sums([](const float*, int) { return broadcast(0.0f); });
  else if (!band.shrinks) store_sums([](const float* sum, int) { return load(sum); });
  else store_sums([&](const float* sum, int i) { return load(sum) * broadcast(band.shrink[row + i]); });
}

// Number of prefetch steps of the next block for a tile of queries: for each word of the keys, and for the values.
struct Pace {
  int of_word, of_values;

  explicit Pace(const BlockWork& block) {
    const int words = (int)(block.op.head_dim / kWordBytes), tiles = (block.tile.count + kTileRows - 1) / kTileRows;
    const int steps = 2 * kWidth * block.rows.panels / tiles;
    of_word = steps / 2 / words;
    of_values = steps - of_word * words;
  }
};

// Attention of the queries [query, query + count) of each of some KV heads.
template <bool kPlain, int kDims>
void attend_band(const BlockWork& block, Int8Scratch& scratch, const Pace& pace, int first_head, int heads, int query,
                 int count) {
  Band& band = scratch.band;
  for (int h = 0; h < heads; h++) {
    const Int8Head& head = scratch.heads[h];
    for_tiles<kTileRows, 1>(count, 1, [&](int first, int rows, int, int) {
      with_constant<kTileRows>(rows, [&](auto n) {
        score<n.value, kPlain, kDims>(block, scratch, head, query + first, pace.of_word, h * count + first);
      });
    });
  }
  choose_scales<kPlain>(block, scratch, band, value_steps<kPlain>(band, scratch.heads, heads, count),
                        first_head * block.tile.count + query, heads * count);
  for (int h = 0; h < heads; h++) {
    const Int8Head& head = scratch.heads[h];
    weigh_scores<kPlain>(block, scratch, head, query, band, h * count, count);
    for_tiles<kTileRows, 1>(count, 1, [&](int first, int rows, int, int) {
      block.ahead.step(pace.of_values);
      with_constant<kTileRows>(rows, [&](auto n) {
        for_tiles<1>(1, (int)(block.op.head_dim / kWidth), [&](int, int, int panel, int panels) {
          const auto add = [&](auto p) {
            add_values<n.value, p.value, kDims>(block, head, query + first, band, h * count + first, panel * kWidth);
          };
          if constexpr (kDims != 0) add(std::integral_constant<int, kTilePanels>());
          else with_constant<kTilePanels>(panels, add);
        });
      });
    });
  }
}

template <bool kPlain, int kDims>
void attend_block(const BlockWork& block, Int8Scratch& scratch) {
  const QueryTile& tile = block.tile;
  const int together = std::max(1, kBandQueries / tile.count);
  const Pace pace(block);
  for (int head = 0; head < tile.heads; head += together) {
    const int heads = std::min(together, tile.heads - head);
    for (int h = 0; h < heads; h++) scratch.heads[h].find(block, head + h);
    for_tiles<kBandQueries, 1>(tile.count, 1, [&](int query, int count, int, int) {
      attend_band<kPlain, kDims>(block, scratch, pace, head, heads, query, count);
    });
  }
}

// Calls f with the number of dimensions of a head, or f(0) for unusual numbers. If it is known at compile time, loops
// need no address computation. Known numbers fill whole tiles of panels. If a register has four lanes, products take so
// long that this makes no difference, and each instance takes long to compile.
template <class F>
INLINE void with_head_dim(int64_t dims, F f) {
#if defined(__AVX2__)
  if (dims == 64) return f(std::integral_constant<int, 64>());
  if (dims == 128) return f(std::integral_constant<int, 128>());
#endif
  f(std::integral_constant<int, 0>());
}

constexpr int64_t kSmall = 1 << 13;  // number of values to round below which one thread is faster

template <class E>
void round_queries(const Attention& op, uint32_t* queries, float* factors, int32_t* starts) {
  const int64_t count = op.tokens * op.heads, dims = op.head_dim;
  parallel_ranges(threads_for(count * dims, kSmall, op.threads), count, [&](int64_t query, int64_t end) {
    for (; query < end; query++) {
      int32_t totals[1];
      int8_t* to = reinterpret_cast<int8_t*>(queries) + query * dims;
      const auto* from = static_cast<const typename E::Value*>(op.q) + query * dims;
      const float scale = quantise_block<E>(from, dims, {to}, totals);
      const float factor = op.soft_cap ? scale : scale * (float)op.scale * kLog2E;
      // Never 0, as a masked score would then become NaN. A NaN stays.
      factors[query] = std::max(factor, std::numeric_limits<float>::min());
      starts[query] = kBiasedStart * totals[0];
    }
  });
}

}  // namespace

Int8Call::Int8Call(const Attention& op) : Attention(op) {
  // kept between calls, because new memory would come from the operating system
  thread_local std::vector<uint32_t> words;
  thread_local std::vector<float> of_queries;
  thread_local std::vector<int32_t> of_sums;
  const int64_t count = tokens * heads;
  words.resize(count * head_dim / kWordBytes);
  of_queries.resize(count);
  of_sums.resize(count);
  queries = words.data(), factors = of_queries.data(), starts = of_sums.data();
  with_types([&](auto e) { round_queries<decltype(e)>(*this, words.data(), of_queries.data(), of_sums.data()); },
             is_bf16);
}

void attend_int8(const Int8Call& op, const Stretch& stretch, const Stretch& next, const Partial& result, bool resumes) {
  thread_local Int8Scratch scratch;
  if (!stretch.continues) gather_queries(op, *stretch.tile, scratch);
#if ROOTGRAFT_AMX
  if (takes_amx(op, *stretch.tile)) return attend_int8_by_amx(op, stretch, next, result, resumes, scratch);
#endif
  with_head_dim(op.head_dim, [&](auto dims) {
    walk_blocks(op, stretch, next, result, resumes, scratch.end, [&](const BlockWork& block) {
      block.plain ? attend_block<true, dims.value>(block, scratch) : attend_block<false, dims.value>(block, scratch);
    });
  });
}

}  // namespace rootgraft
