// Attention over KV in bf16 by AMX: the parts that tiles of many and of few queries share. AMX rounds sums differently
// (gemm/tile_amx.h), so it computes those of few queries too. Products of weights and values are added to the result's
// sums. If a query's reference has changed, its sums are rescaled first. So a sum depends on its query alone, whichever
// queries share the tile.
#pragma once

#include "attention/attention_panels.h"
#include "gemm/tile_amx.h"

#if ROOTGRAFT_AMX

namespace rootgraft {

using Bf16Block = Block<Bf16>;

constexpr int kBlockWords = kBlock / Bf16::kPerWord;              // words of a block's keys
constexpr int kTakenRows = 4;                                     // rows whose scores are weighted together
constexpr int kStepPanels = kAmxWords * Bf16::kPerWord / kWidth;  // panels of keys in a step of the sums of values

// Computes the weights of R queries from m on for a block of P panels, like weigh(), in rows of kBlock words with zeros
// to the end of a step of AMX. Their total is the sum of the rounded weights, as the values are multiplied by these. In
// the first block of a split, where each query gets its reference, there are no sums to rescale.
template <int R, int P>
INLINE void weigh_rows(const Bf16Block& block, int m, Floats (&scores)[R][P], float* rows) {
  const Floats factor = broadcast(block.op.soft_cap ? 1.0f : (float)block.op.scale * kLog2E);
  const int64_t value_dim = block.op.value_dim;
  Floats totals[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const int64_t last = block.scratch.end[m + r] - 1;
    if (!block.plain) {
      cap_and_mask(scores[r], block.op.first_key(last) - block.first_key, last + 1 - block.first_key, block.op);
    }
    Floats best = scores[r][0];
#pragma GCC unroll 4
    for (int v = 1; v < P; v++) best = max(best, scores[r][v]);
    float& reference = block.result.reference[m + r];
    totals[r] = load(block.result.lanes + (m + r) * kWidth);
    if (block.begins) {
      reference = std::max(reference, largest(best) * first_lane(factor));
      continue;
    }
    if (!any_above(best * factor, reference + kHeadroom)) continue;
    const float now = std::max(reference, largest(best) * first_lane(factor));
    const Floats less = exp2(broadcast(reference - now));
    totals[r] = totals[r] * less;
    float* values = block.result.values + (m + r) * value_dim;
    for (int64_t d = 0; d < value_dim; d += kWidth) store(values + d, load(values + d) * less);
    reference = now;
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const Floats shift = broadcast(-block.result.reference[m + r]);
    auto* weights = reinterpret_cast<uint16_t*>(rows + r * kBlock);
#pragma GCC unroll 2
    for (int v = 0; v < P; v += 2) {
      const Floats first = rough_exp2(fma(scores[r][v], factor, shift));
      const Floats second = v + 1 < P ? rough_exp2(fma(scores[r][v + 1], factor, shift)) : broadcast(0.0f);
      const auto both = _mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0]);
      const auto ones = (__m512bh)_mm512_set1_epi32(0x3F803F80);
      __builtin_memcpy(weights + v * kWidth, &both, sizeof(both));
      totals[r].part[0] = (FloatPart)_mm512_dpbf16_ps((__m512)totals[r].part[0], both, ones);
    }
    store(block.result.lanes + (m + r) * kWidth, totals[r]);
  }
}

// If the keys' panels end within a step of AMX, writes zeros after the values.
INLINE void clear_values_end(const Bf16Block& block) {
  const int panels = block.rows.panels, first = panels * kWidth / Bf16::kPerWord;
  for (int64_t p = 0; panels % kStepPanels && p < block.op.value_dim / kWidth; p++) {
    uint32_t* values = block.scratch.values + p * kBlockWords * kWidth;
    std::fill_n(values + first * kWidth, kWidth * kWidth / Bf16::kPerWord, 0u);
  }
}

// Lays out the values of a block in pairs of keys by unpacking: two panels share 32 dimensions, see are_unpacked().
// `row(key)` is the address of a key's values. each() is called for every pair.
template <class Row, class Each>
INLINE void unpack_values(const Bf16Block& block, int steps, Row row, Each each) {
  const int64_t words = block.op.value_dim / Bf16::kPerWord;
  uint32_t* out = block.scratch.values;
  for (int p = 0; p < block.rows.panels; p++) {
    for (int pair = 0; pair < kWidth / Bf16::kPerWord; pair++, out += kWidth) {
      const uint32_t *first = row(p * kWidth + 2 * pair), *second = row(p * kWidth + 2 * pair + 1);
      uint32_t* to = out;
      each();
      for (int64_t word = 0; word < words; word += kWidth, to += 2 * kBlockWords * kWidth) {
        const __m512i even = _mm512_loadu_si512(first + word), odd = _mm512_loadu_si512(second + word);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(to + kBlockWords * kWidth, _mm512_unpackhi_epi16(even, odd));
      }
    }
    block.ahead.step(steps);
  }
}

// Lays out the values of the block for the second product. `steps`: number of prefetch steps for each panel of keys.
// each() is called now and then meanwhile.
template <class Each>
INLINE void take_values(const Bf16Block& block, int steps, Each each) {
  const void* cache = block.op.v_cache;
  const int64_t row_words = block.op.head_dim / Bf16::kPerWord;
  if (!are_unpacked(block.op)) {
    lay_out_values(block);
  } else if (block.rows.full) {
    unpack_values(block, steps, [&](int key) {
      return block.rows.panel(cache, block.head, key / kWidth) + key % kWidth * row_words;
    }, each);
  } else {
    unpack_values(block, steps, [&](int key) { return block.rows.row(cache, block.head, key); }, each);
  }
  clear_values_end(block);
}

// Whether a tile has so few queries that registers with their own shapes are used.
inline bool are_few(const Attention& op, const QueryTile& tile) {
  const int64_t words = op.head_dim / Bf16::kPerWord;
  return tile.count <= kAmxRows && op.page_size % kWidth == 0 && tile.heads * words <= kBlock * kMaxHeadDim / kWidth;
}

// attend_by_amx() for a tile of few queries, which are gathered first.
void attend_few_by_amx(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result,
                       bool resumes, Scratch& scratch);

}  // namespace rootgraft

#endif
