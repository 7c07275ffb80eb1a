// Softmax: converts scores to weights 2^(score - reference), whose sums are kept lane by lane. The reference is the
// largest score of the first block. If a later score is far above it, that score becomes the reference, and older sums
// are rescaled. Scores come from memory, or from the registers in which they were summed.
#pragma once

#include <limits>

#include "attention/attention_walk.h"
#include "gemm/tile_fma.h"

namespace rootgraft {

struct alignas(64) Scratch {
  uint32_t queries[kTileQueries * kMaxHeadDim];  // A of the scores, by KV head
  uint32_t keys[kBlock * kMaxHeadDim];           // B of the scores: [panel of 16 keys][word of the head][key]
  uint32_t values[kBlock * kMaxHeadDim];         // B of the output: [panel of 16 dimensions][word of keys][dimension]
  float scores[kTileQueries * kBlock];           // of one KV head; then, in place, the weights as A of the output
  float shrink[kTileQueries];                    // of one KV head: factors of older sums for a new reference
  int64_t end[kTileQueries];                     // end of the keys that a query sees
};

// Types of the operands for a tile of many queries. Without an instruction for bf16, all operands are widened to fp32
// once for all products. The sums have the same bits.
template <class E>
struct Operands {
  using Type = E;
};
#if ROOTGRAFT_FMA
template <>
struct Operands<Bf16> {
  using Type = Fp32;
};
#endif

// Limit by which scores, in base 2, may exceed the reference. A weight of 2^6 is rounded as precisely as one of 1, and
// finding the largest of 16 lanes and changing the reference would take longer than a block's weights.
constexpr float kHeadroom = 6.0f;

// Arguments of a block for one KV head.
template <class E>
struct Block : BlockWork {
  int head;
  Partial result;           // result of the head
  const uint32_t* queries;  // queries of the head
  Scratch& scratch;

  const float* shrink() const { return begins ? nullptr : scratch.shrink; }
};

// Converts the scores of one query to weights, and adds these to its lanes. `factor` converts scores to base 2. Returns
// the factor of older sums, which is not 1 if there is a new reference.
template <class E, int P>
INLINE float to_weights(Floats (&scores)[P], const Floats& factor, float& reference, float* lanes) {
  Floats best = scores[0], total = load(lanes);
  float shrink = 1.0f;
#pragma GCC unroll 4
  for (int v = 1; v < P; v++) best = max(best, scores[v]);
  if (any_above(best * factor, reference + kHeadroom)) {
    const float now = std::max(reference, largest(best) * first_lane(factor));
    const Floats less = exp2(broadcast(reference - now));
    total = total * less;
    shrink = first_lane(less);
    reference = now;
  }
  const Floats shift = broadcast(-reference);
#pragma GCC unroll 4
  for (int v = 0; v < P; v++) {
    scores[v] = E::weight_exp2(fma(scores[v], factor, shift));
    total = total + scores[v];
  }
  store(lanes, total);
  return shrink;
}

// Writes the weights of one query for a block, as words of W, in place of its scores.
template <class E, class W, int P>
INLINE void weigh_row(const Block<E>& block, int m, Floats (&scores)[P]) {
  const Floats factor = broadcast(block.op.soft_cap ? 1.0f : (float)block.op.scale * kLog2E);
  block.scratch.shrink[m] =
      to_weights<E>(scores, factor, block.result.reference[m], block.result.lanes + m * kWidth);
  auto* weights = reinterpret_cast<typename W::Value*>(block.scratch.scores + m * kBlock);
#pragma GCC unroll 4
  for (int v = 0; v < P; v++) {
    if constexpr (W::kPerWord < E::kPerWord) W::store(weights + v * kWidth, E::rounded(scores[v]));
    else W::store(weights + v * kWidth, scores[v]);
  }
}

// The keys [begin, end) of a block, with one bit for each key.
class SeenKeys {
 public:
  SeenKeys(int64_t begin, int64_t end) : bits_(upto(end) & ~upto(begin)) {}

  // Returns `value` in the lanes of a panel that belong to these keys, and `other` in all other lanes.
  INLINE Floats keep(const Floats& value, int panel, float other) const {
    const uint32_t bits = (uint32_t)(bits_ >> panel * kWidth);
#if defined(__AVX512F__)
    return Floats{{(FloatPart)_mm512_mask_mov_ps(_mm512_set1_ps(other), (__mmask16)bits, (__m512)value.part[0])}};
#else
    return map([&](int i) {
      WordPart bit;
      for (int j = 0; j < kLanes; j++) bit[j] = 1u << (i * kLanes + j);
      return (bit & bits) != 0 ? value.part[i] : FloatPart{} + other;
    });
#endif
  }

 private:
  static uint64_t upto(int64_t end) { return end >= kBlock ? ~0ull : (1ull << std::max<int64_t>(end, 0)) - 1; }

  uint64_t bits_;
};
static_assert(kBlock == 64);

// cap * tanh(score * scale / cap) in base 2, with tanh(x) = 2 sigmoid(2 x) - 1.
INLINE Floats capped(const Floats& score, const Attention& op) {
  const float scale = (float)op.scale, soft_cap = (float)op.soft_cap;
  const Floats half = sigmoid(score * broadcast(2.0f * scale / soft_cap));
  return fma(half, broadcast(2.0f), broadcast(-1.0f)) * broadcast(soft_cap * kLog2E);
}

// Converts scores to base 2: applies the cap, and sets them to -infinity outside of the keys [begin, end).
template <int P>
INLINE void cap_and_mask(Floats (&scores)[P], int64_t begin, int64_t end, const Attention& op) {
  const SeenKeys seen(begin, end);
  for (int v = 0; v < P; v++) {
    if (op.soft_cap) scores[v] = capped(scores[v], op);
    scores[v] = seen.keep(scores[v], v, -std::numeric_limits<float>::infinity());
  }
}

// Writes the weights of a query, as words of W, in place of its scores in memory.
template <class E, class W = E>
void weigh(const Block<E>& block, int m) {
  const int64_t last = block.scratch.end[m] - 1;
  const int64_t begin = block.op.first_key(last) - block.first_key, end = last + 1 - block.first_key;
  with_constant<kBlock / kWidth>(block.rows.panels, [&](auto panels) {
    Floats scores[panels.value];
    for (int v = 0; v < panels.value; v++) scores[v] = load(block.scratch.scores + m * kBlock + v * kWidth);
    if (!block.plain && (block.op.soft_cap || begin > 0 || end < panels.value * kWidth)) {
      cap_and_mask(scores, begin, end, block.op);
    }
    weigh_row<E, W>(block, m, scores);
  });
}

// Whether the scores of a tile of queries for a block fit in registers.
constexpr bool kBlockFits = kTilePanels >= kBlock / kWidth;

// Weights of MR queries from m on, for a block without masks and caps whose keys are in panels.
template <class E, int MR>
INLINE void score_and_weigh(const Block<E>& block, int m) {
  using W = typename Operands<E>::Type;
  constexpr int kPanels = kBlock / kWidth;
  const ptrdiff_t words = block.op.head_dim / W::kPerWord;
  const uint32_t *queries = block.queries + m * words, *keys = block.scratch.keys;
  Floats scores[MR][kPanels];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++) scores[i][v] = broadcast(0.0f);
  }
#pragma GCC unroll 2
  for (ptrdiff_t w = 0; w < words; w++) {
    Words column[kPanels];
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++) column[v] = load_words(keys + (v * words + w) * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const Words query = broadcast_word(queries[i * words + w]);
#pragma GCC unroll 4
      for (int v = 0; v < kPanels; v++) scores[i][v] = W::dot(query, column[v], scores[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) weigh_row<E, W>(block, m + i, scores[i]);
}

}  // namespace rootgraft
