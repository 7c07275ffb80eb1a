// Attention of a query tile over one split of its context, where KV is of 8 bits (kv_int8.h) and so are the factors of
// both products, whose sums are exact.
//
// A query is rounded to 8 bits with one scale. The weights of a query against a block, each times the scale of its
// value, are rounded to unsigned bytes with a scale of their own: where one key has most of the weight, others far from
// it keep theirs. Rounding adds a fraction that differs from lane to lane before it cuts: of many weights below half a
// step some become a step, so that together they keep their weight, where rounding to the nearest would drop them all.
#include "attention_int8.h"
#include "parallel.h"

namespace rootgraft {
namespace {

void gather_queries(const Int8Call& op, const QueryTile& tile, Int8Scratch& scratch) {
  const int64_t group = op.group(), words = op.head_dim / kWordBytes;
  for (int head = 0; head < tile.heads; head++) {
    for_queries(op, tile, [&](int m, int64_t row, int64_t token, int64_t mate) {
      const int64_t from = (op.query_start[row] + token) * op.heads + (tile.first_head + head) * group + mate;
      const int query = head * tile.count + m;
      std::copy_n(op.queries + from * words, words, scratch.queries + query * words);
      scratch.factor[query] = op.factors[from];
      scratch.start[query] = op.starts[from];
    });
  }
}

// Scores in base 2, before the soft cap, of N queries from `query` on against a block.
template <int N>
INLINE void score(const Int8Block& block, int query, int steps, Floats (&scores)[N][kPanels]) {
  const ptrdiff_t words = block.op.head_dim / kWordBytes;
  const int first = block.head * block.tile.count + query;
  const uint32_t* queries = block.scratch.queries + first * words;
  Ints dots[N][kPanels];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++) dots[i][v] = broadcast_int(block.scratch.start[first + i]);
  }
#pragma GCC unroll 2
  for (ptrdiff_t w = 0; w < words; w++) {
    block.ahead.step(steps);
    Words column[kPanels];
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++) column[v] = load_words(block.keys[v] + w * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      const Words word = broadcast_word(queries[i * words + w]);
#pragma GCC unroll 4
      for (int v = 0; v < kPanels; v++) dots[i][v] = dot_biased(column[v], word, dots[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    const Floats factor = broadcast(block.scratch.factor[first + i]);
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++) scores[i][v] = to_floats(dots[i][v]) * load(block.key_scales[v]) * factor;
  }
}

// Weights of N queries from `query` on, in bytes. A plain block: every query sees every key, and no score is capped.
// Returns whether older sums shrink.
template <int N, bool kPlain>
INLINE bool weigh_queries(const Int8Block& block, int query, int steps) {
  Int8Scratch& scratch = block.scratch;
  Floats scores[N][kPanels], best[N];
  score<N>(block, query, steps, scores);
  if constexpr (!kPlain) {
    for (int i = 0; i < N; i++) mask_scores(block, query + i, scores[i]);
  }
  bool above = false;
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    best[i] = max(max(scores[i][0], scores[i][1]), max(scores[i][2], scores[i][3]));
    above |= any_above(best[i], block.result.reference[query + i] + kHeadroom);
  }
  const Floats tops = largest_of(best);
  if (above) exchange_references(block, query, N, tops);
  const BlockScales scales(block, query, N, tops);
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    const Floats reference = broadcast(block.result.reference[query + i]);
    float* lanes = block.result.lanes + (query + i) * kWidth;
    Floats total = load(lanes);
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++) {
      scores[i][v] = coarse_exp2<kPlain>(scores[i][v] - reference);
      total = total + scores[i][v];
    }
    store(lanes, total);
    uint8_t* weights = scratch.weights + i * kBlock;
    if constexpr (kPlain) {
      round_weights(scores[i], block.value_scales, scales.to_bytes[i], weights);
      scratch.weight_scale[i] = scales.largest[i] * block.value_step;
    } else {
      Floats value_scales[kPanels];
      const int64_t end = scratch.end[query + i] - block.first_key;
      const float step = scales_to_bytes(block.stored_value_scales, end - block.op.window, end, value_scales);
      round_weights(scores[i], value_scales, scales.to_bytes[i], weights);
      scratch.weight_scale[i] = scales.largest[i] * step;
    }
  }
  return above;
}

// values = values * shrink + weights * those of the block, for N queries from `query` on and dimensions
// [dim, dim + 16 P). Where nothing shrinks, values stay as they are.
template <int N, int P>
INLINE void add_values(const Int8Block& block, int query, int64_t dim, bool shrinks) {
  const int64_t dims = block.op.head_dim;
  const auto* weights = reinterpret_cast<const uint32_t*>(block.scratch.weights);
  float* to = block.result.values + query * dims + dim;
  Ints dots[N][P];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
#pragma GCC unroll 4
    for (int v = 0; v < P; v++) dots[i][v] = broadcast_int(0);
  }
  for (int panel = 0; panel < block.rows.panels; panel++) {
    const uint32_t* values = block.values[panel] + dim;
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
      const Floats scale = broadcast(block.scratch.weight_scale[i]);
#pragma GCC unroll 4
      for (int v = 0; v < P; v++) {
        float* sum = to + i * dims + v * kWidth;
        store(sum, fma(to_floats(dots[i][v]), scale, older(sum, i)));
      }
    }
  };
  if (block.begins) store_sums([](const float*, int) { return broadcast(0.0f); });
  else if (!shrinks) store_sums([](const float* sum, int) { return load(sum); });
  else store_sums([&](const float* sum, int i) { return load(sum) * broadcast(block.scratch.shrink[i]); });
}

template <bool kPlain>
void attend_block(const Int8Block& block) {
  const int tiles = (block.tile.count + kTileRows - 1) / kTileRows;
  const int words = (int)(block.op.head_dim / kWordBytes);
  const int steps = 2 * kWidth * block.rows.panels / tiles, of_words = steps / 2 / words;
  for_tiles<kTileRows, 1>(block.tile.count, 1, [&](int query, int count, int, int) {
    with_constant<kTileRows>(count, [&](auto n) {
      const bool shrinks = weigh_queries<n.value, kPlain>(block, query, of_words);
      block.ahead.step(steps - of_words * words);
      for_tiles<1>(1, (int)(block.op.head_dim / kWidth), [&](int, int, int panel, int panels) {
        with_constant<kTilePanels>(panels, [&](auto p) {
          add_values<n.value, p.value>(block, query, panel * kWidth, shrinks);
        });
      });
    });
  });
}

constexpr int64_t kSmall = 1 << 13;  // values to round below which one thread is faster

template <class E>
void round_queries(const Attention& op, uint32_t* queries, float* factors, int32_t* starts) {
  const int64_t count = op.tokens * op.heads, dims = op.head_dim;
  parallel_ranges(count * dims < kSmall ? 1 : (int)op.threads, count, [&](int64_t query, int64_t end) {
    for (; query < end; query++) {
      int32_t totals[1];
      int8_t* to = reinterpret_cast<int8_t*>(queries) + query * dims;
      const auto* from = static_cast<const typename E::Value*>(op.q) + query * dims;
      const float scale = quantise_block<E>(from, dims, {to}, totals);
      factors[query] = op.soft_cap ? scale : scale * (float)op.scale * kLog2E;
      starts[query] = kBiasedStart * totals[0];
    }
  });
}

}  // namespace

Int8Call::Int8Call(const Attention& op) : Attention(op) {
  thread_local std::vector<uint32_t> words;  // fresh memory would come from the operating system
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
  gather_queries(op, *stretch.tile, scratch);
  walk_blocks(op, stretch, next, result, resumes, scratch.end, [&](const BlockWork& work) {
    const Int8Block block(work, scratch);
    block.plain ? attend_block<true>(block) : attend_block<false>(block);
  });
}

}  // namespace rootgraft
