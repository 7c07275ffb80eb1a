// The two products of attention for few queries, directly from rows of the caches: packing a block in panels first
// would take longer than multiplying it. Sums are added in the order of multiply(), so their bits are the same.
#pragma once

#include "attention/attention_block.h"
#include "gemm/tile.h"

namespace rootgraft {

// Scores of N queries against P panels of keys; key(i) is the address of a key. `panel` is memory for one panel.
template <class E, int N, int P, class Key>
INLINE void score_rows(const uint32_t* queries, int words, Key key, float* scores, [[maybe_unused]] uint32_t* panel,
                       Ahead& ahead) {
#if defined(__AVX512VL__)
  Floats sums[N][P];
#pragma GCC unroll 8
  for (int m = 0; m < N; m++) {
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) sums[m][p] = broadcast(0.0f);
  }
  for (int first = 0; first < words; first += kColumns) {
    ahead.step(P * kWidth * kColumns / words);
    Words columns[P][kColumns];
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) load_columns([&](int i) { return key(p * kWidth + i) + first; }, columns[p]);
#pragma GCC unroll 8
    for (int w = 0; w < kColumns; w++) {
#pragma GCC unroll 8
      for (int m = 0; m < N; m++) {
        const Words query = broadcast_word(queries[m * words + first + w]);
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) sums[m][p] = E::dot(query, columns[p][w], sums[m][p]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < N; m++) {
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) store(scores + m * kBlock + p * kWidth, sums[m][p]);
  }
#else
  for (int p = 0; p < P; p++) {
    ahead.step(kWidth);
    const uint32_t* keys[kWidth];
    for (int i = 0; i < kWidth; i++) keys[i] = key(p * kWidth + i);
    transpose_rows(keys, words, panel);
    multiply_tile<E>({queries, words, panel, 0, words, {scores + p * kWidth, kBlock}, nullptr}, N, 1);
  }
#endif
}

// A word of the output's B: one dimension of one key (fp32) or of two neighbouring keys (bf16), for 16 dimensions.
template <class E>
INLINE Words value_words(const uint32_t* first, const uint32_t* second, int64_t dim) {
  if constexpr (E::kPerWord == 1) {
    return load_words(first + dim);
  } else {
    const auto at = [&](const uint32_t* row) { return reinterpret_cast<const uint16_t*>(row) + dim; };
    return E::interleave(at(first), at(second));
  }
}

// Values of N queries, dimensions [dim, dim + 16 P): values * shrink + weights * values of the block's keys. Without
// `shrink`, there are no earlier values.
template <class E, int N, int P>
INLINE void add_value_rows(const Attention& op, const BlockRows& rows, int head, int64_t dim,
                           const uint32_t* weights, const float* shrink, float* values, Ahead& ahead) {
  Floats sums[N][P];
#pragma GCC unroll 8
  for (int m = 0; m < N; m++) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      sums[m][p] = shrink ? load(values + m * op.value_dim + dim + p * kWidth) * broadcast(shrink[m]) : broadcast(0.0f);
    }
  }
  for (int key = 0; key < rows.panels * kWidth; key += E::kPerWord, weights++) {
    const uint32_t* first = rows.row(op.v_cache, head, key);
    const uint32_t* second = rows.row(op.v_cache, head, key + E::kPerWord - 1);
    if (dim == 0) ahead.step(E::kPerWord);
    Words column[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) column[p] = value_words<E>(first, second, dim + p * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < N; m++) {
      const Words weight = broadcast_word(weights[m * kBlock]);
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) sums[m][p] = E::dot(weight, column[p], sums[m][p]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < N; m++) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) store(values + m * op.value_dim + dim + p * kWidth, sums[m][p]);
  }
}

}  // namespace rootgraft
