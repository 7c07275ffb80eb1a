// What weighing scores of KV of 8 bits is made of: references, and the rounding of weights to bytes.
#pragma once

#include "attention_weigh.h"

namespace rootgraft {

constexpr int kPanels = kBlock / kWidth;
constexpr int kPanelWords = kWidth / kWordBytes;  // of weights
constexpr float kMasked = -std::numeric_limits<float>::infinity();

// The fractions 1/32, 3/32, ... 31/32, neighbours far apart.
alignas(64) constexpr float kFractions[kWidth] = {0.03125f, 0.53125f, 0.28125f, 0.78125f, 0.15625f, 0.65625f,
                                                  0.40625f, 0.90625f, 0.09375f, 0.59375f, 0.34375f, 0.84375f,
                                                  0.21875f, 0.71875f, 0.46875f, 0.96875f};

struct alignas(64) Int8Scratch {
  uint32_t queries[kTileQueries * kMaxHeadDim / kWordBytes];  // A of the scores, by KV head
  int32_t start[kTileQueries];                                // of these queries: see Int8Call
  float factor[kTileQueries];
  uint8_t weights[kTileRows * kBlock];  // A of the output: [query][word of a panel][panel][key of the word]
  float weight_scale[kTileRows];
  float shrink[kWidth];       // what new references do to older sums, if any of a tile's queries has one
  int64_t end[kTileQueries];  // of the keys that a query sees
};

// The values' scales of keys [begin, end) of a block, brought to what makes weights bytes; 0 for the others, which may
// hold anything. Returns the step of the bytes.
INLINE float scales_to_bytes(const float* const (&from)[kPanels], int64_t begin, int64_t end,
                             Floats (&scales)[kPanels]) {
#pragma GCC unroll 4
  for (int v = 0; v < kPanels; v++) scales[v] = keep_panel_lanes(load(from[v]), v, begin, end, 0.0f);
  const float most = largest(max(max(scales[0], scales[1]), max(scales[2], scales[3])));
  const Floats inverse = broadcast(most > 1e-30f ? kMostByte / most : 0.0f);
#pragma GCC unroll 4
  for (int v = 0; v < kPanels; v++) scales[v] = scales[v] * inverse;
  return most / kMostByte;
}

struct Int8Block : BlockWork {
  Int8Scratch& scratch;
  // Of each panel. Those that are not in use repeat the first, and are masked.
  const uint32_t *keys[kPanels], *values[kPanels];
  const float *key_scales[kPanels], *stored_value_scales[kPanels];
  // Of a plain block, whose values' scales are the same for all queries: see scales_to_bytes().
  Floats value_scales[kPanels];
  float value_step;

  Int8Block(const BlockWork& work, Int8Scratch& scratch) : BlockWork(work), scratch(scratch) {
    for (int v = 0; v < kPanels; v++) {
      const int panel = v < rows.panels ? v : 0;
      keys[v] = rows.panel(op.k_cache, head, panel);
      values[v] = rows.panel(op.v_cache, head, panel);
      key_scales[v] = rows.panel_scales(op.k_cache, head, panel);
      stored_value_scales[v] = rows.panel_scales(op.v_cache, head, panel);
    }
    if (plain) value_step = scales_to_bytes(stored_value_scales, 0, kBlock, value_scales);
  }
};

// Lane i holds the largest lane of values[i].
template <int N>
INLINE Floats largest_of(const Floats (&values)[N]) {
  static_assert(N <= 8);
#if defined(__AVX512F__)
  __m512 rows[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) rows[i] = (__m512)values[i < N ? i : 0].part[0];
  // Each step folds two registers into one, and halves what is left of each row: in the end row 4 b + 2 c + d lies in
  // lane 8 b + 4 ... of one register, two lanes a row.
  const auto halves = [](__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  };
  const auto quarters = [](__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  const __m512 low = quarters(halves(rows[0], rows[1]), halves(rows[2], rows[3]));   // a row in each 128 bits
  const __m512 high = quarters(halves(rows[4], rows[5]), halves(rows[6], rows[7]));
  const __m512 pairs = _mm512_max_ps(_mm512_unpacklo_ps(low, high), _mm512_unpackhi_ps(low, high));
  // In each 128 bits: low 0, high 0, low 1, high 1.
  const __m512 both = _mm512_max_ps(pairs, _mm512_permute_ps(pairs, 0x4E));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  return Floats{{(FloatPart)_mm512_permutexvar_ps(order, both)}};
#else
  float lane[kWidth] = {};
  for (int i = 0; i < N; i++) lane[i] = largest(values[i]);
  return load(lane);
#endif
}

// 2^x to 1e-4 relative: enough for what is rounded to bytes next. A least-maximum fit with 2^0 = 1.
template <bool kFinite>
INLINE Floats coarse_exp2(const Floats& x) {
  return exp2_by<kFinite>(x, [](const Floats& f) {
    Floats p = broadcast(5.500893424e-2f);
    p = fma(p, f, broadcast(2.422110011e-1f));
    p = fma(p, f, broadcast(6.932829314e-1f));
    return fma(p, f, broadcast(1.0f));
  });
}

// Scores of one query: capped, and masked where it does not see the key.
INLINE void mask_scores(const Int8Block& block, int query, Floats (&scores)[kPanels]) {
  const Attention& op = block.op;
  const int64_t end = block.scratch.end[query] - block.first_key, begin = end - op.window;
  for (int v = 0; v < kPanels; v++) {
    if (op.soft_cap) scores[v] = capped(scores[v], op);
    scores[v] = keep_panel_lanes(scores[v], v, begin, end, kMasked);
  }
}

// Takes the largest score of a block, tops[i], for a query's reference where it is far above that; older sums shrink.
inline void exchange_references(const Int8Block& block, int query, int count, const Floats& tops) {
  float top[kWidth], older[kWidth] = {}, now[kWidth] = {};
  store(top, tops);
  for (int i = 0; i < count; i++) {
    float& reference = block.result.reference[query + i];
    older[i] = reference;
    now[i] = reference = top[i] > older[i] + kHeadroom ? top[i] : older[i];
  }
  float* shrink = block.scratch.shrink;
  store(shrink, exp2(load(older) - load(now)));
  for (int i = 0; i < count; i++) {
    float* lanes = block.result.lanes + (query + i) * kWidth;
    store(lanes, load(lanes) * broadcast(shrink[i]));
  }
}

// Of some queries: the largest weight of a block, and what makes bytes of its weights but for the values' scales.
struct BlockScales {
  alignas(64) float largest[kWidth], to_bytes[kWidth];

  INLINE BlockScales(const Int8Block& block, int query, int count, const Floats& tops) {
    const Floats reference = load_first(block.result.reference + query, count);
    // A block of weights below 2^-100 counts for nothing, and 2^100 is a number.
    const Floats most = exp2(max(broadcast(-100.0f), tops - reference));
    store(largest, most);
    store(to_bytes, broadcast(1.0f) / most);
  }
};

// Weights of one query as bytes, each times its value's scale.
INLINE void round_weights(const Floats (&weights)[kPanels], const Floats (&value_scales)[kPanels], float to_bytes,
                          uint8_t* to) {
  const Floats fractions = load(kFractions), factor = broadcast(to_bytes);
  Ints rounded[kPanels];
#pragma GCC unroll 4
  for (int v = 0; v < kPanels; v++) rounded[v] = to_ints(fma(weights[v] * factor, value_scales[v], fractions));
#if defined(__AVX512BW__)
  const __m512i first = _mm512_packus_epi32((__m512i)rounded[0].part[0], (__m512i)rounded[1].part[0]);
  const __m512i second = _mm512_packus_epi32((__m512i)rounded[2].part[0], (__m512i)rounded[3].part[0]);
  _mm512_storeu_si512(to, _mm512_packus_epi16(first, second));
#else
  for (int v = 0; v < kPanels; v++) {
    int32_t lane[kWidth];
    std::memcpy(lane, &rounded[v], sizeof(lane));
    for (int i = 0; i < kWidth; i++) {
      to[(i / kWordBytes * kPanels + v) * kWordBytes + i % kWordBytes] = (uint8_t)std::min(lane[i], kMostByte);
    }
  }
#endif
}

}  // namespace rootgraft
