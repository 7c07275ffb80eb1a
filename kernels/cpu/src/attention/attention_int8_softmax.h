// Softmax of 8-bit attention to weights in bytes, band by band: store all scores and find their maxima; compute the
// numbers of all queries at once; then convert scores to weights.
//
// The weights of a query for a block are relative to its largest score there. Apart from the values' scales, that score
// has the largest byte. The ratio of these weights to the query's reference (see attention_softmax.h) is a factor of
// their sum and of the output.
#pragma once

#include "attention/attention_int8.h"
#include "attention/attention_softmax.h"

namespace rootgraft {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// The fractions 1/32, 3/32, ... 31/32; neighbouring lanes have very different ones.
alignas(64) constexpr float kFractions[kWidth] = {0.03125f, 0.53125f, 0.28125f, 0.78125f, 0.15625f, 0.65625f,
                                                  0.40625f, 0.90625f, 0.09375f, 0.59375f, 0.34375f, 0.84375f,
                                                  0.21875f, 0.71875f, 0.46875f, 0.96875f};

INLINE Floats most_of(const Floats (&panels)[kPanels]) {
  return max(max(panels[0], panels[1]), max(panels[2], panels[3]));
}

// Factor that scales the largest of the values' scales to the largest byte.
INLINE Floats to_bytes(const Floats& step) {
  return map([&](int i) { return step.part[i] > 1e-30f ? (float)kMostByte / step.part[i] : FloatPart{}; });
}

// Lane i gets the largest lane of rows[i], for i < count.
INLINE Floats largest_of_rows(const float (&rows)[kBandQueries * kWidth], int count) {
#if defined(__AVX512F__)
  // Each step folds two registers into one, and halves the remaining lanes of each row. In the end, row 4 b + 2 c + d
  // is in lane 8 b + 4 ... of one register, with two lanes for each row.
  const auto halves = [](__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  };
  const auto quarters = [](__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  const auto of_eight = [&](const float* first) {
    const auto row = [&](int i) { return _mm512_load_ps(first + i * kWidth); };
    const __m512 low = quarters(halves(row(0), row(1)), halves(row(2), row(3)));  // one row in each 128 bits
    const __m512 high = quarters(halves(row(4), row(5)), halves(row(6), row(7)));
    const __m512 pairs = _mm512_max_ps(_mm512_unpacklo_ps(low, high), _mm512_unpackhi_ps(low, high));
    // In each 128 bits: low 0, high 0, low 1, high 1.
    return _mm512_max_ps(pairs, _mm512_permute_ps(pairs, 0x4E));
  };
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 16, 20, 24, 28, 17, 21, 25, 29);
  const __m512 first = of_eight(rows), second = count > 8 ? of_eight(rows + 8 * kWidth) : first;
  return Floats{{(FloatPart)_mm512_permutex2var_ps(first, order, second)}};
#else
  float lane[kWidth] = {};
  for (int i = 0; i < count; i++) lane[i] = largest(load(rows + i * kWidth));
  return load(lane);
#endif
}

// 2^x with relative error 1e-4 for x up to 0 and a little above, which is enough if the result is rounded to bytes
// next. A minimax fit with 2^0 = 1 and 2^1 = 2.
INLINE Floats coarse_exp2(const Floats& x) {
  const auto power = [](const Floats& fraction) {
    Floats p = broadcast(7.826797e-2f);
    p = fma(p, fraction, broadcast(2.2630768e-1f));
    p = fma(p, fraction, broadcast(6.9542435e-1f));
    return fma(p, fraction, broadcast(1.0f));
  };
#if defined(__AVX512DQ__)
  // The fraction of -infinity is 0; the scale is that of the integer below x.
  const __m512 all = (__m512)x.part[0];
  const __m512 fraction = _mm512_reduce_ps(all, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return Floats{{(FloatPart)_mm512_scalef_ps((__m512)power(Floats{{(FloatPart)fraction}}).part[0], all)}};
#else
  const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Floats clamped = max(broadcast(-126.0f), x), shifted = clamped - broadcast(0.5f) + shifter;
  const Floats powers = power(clamped - (shifted - shifter));
  return map([&](int i) {
    const IntPart exponent = ((IntPart)shifted.part[i] - 0x4B400000 + 127) << 23;  // 2^-127 becomes 0
    return powers.part[i] * (FloatPart)exponent;
  });
#endif
}

// The keys of a block that a query of the tile sees.
INLINE SeenKeys seen_keys(const BlockWork& block, const Int8Scratch& scratch, int query) {
  const int64_t last = scratch.end[query] - 1;
  return {block.op.first_key(last) - block.first_key, last + 1 - block.first_key};
}

// Writes the scores of N queries of a KV head, from `query` on, to the rows of a band from `row` on. They are not
// multiplied by the queries' factors, unless scores are capped.
template <int N, bool kPlain>
INLINE void store_scores(const BlockWork& block, const Int8Scratch& scratch, const Int8Head& head, int query,
                         Floats (&scores)[N][kPanels], Band& band, int row) {
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    float* to = band.scores + (row + i) * kBlock;
    if constexpr (!kPlain) {
      const SeenKeys seen = seen_keys(block, scratch, query + i);
      const Floats factor = broadcast(scratch.factor[head.number * block.tile.count + query + i]);
      Floats steps[kPanels];
#pragma GCC unroll 4
      for (int v = 0; v < kPanels; v++) {
        if (block.op.soft_cap) scores[i][v] = capped(scores[i][v] * factor, block.op);
        scores[i][v] = seen.keep(scores[i][v], v, kMasked);
        steps[v] = seen.keep(load(head.value_scales[v]), v, 0.0f);
      }
      store(band.value_steps + (row + i) * kWidth, most_of(steps));
    }
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++) store(to + v * kWidth, scores[i][v]);
    store(band.best + (row + i) * kWidth, most_of(scores[i]));
  }
}

// The largest scale of the values that each query of a band sees; each head has `count` queries.
template <bool kPlain>
INLINE Floats value_steps(const Band& band, const Int8Head* heads, int num_heads, int count) {
  if constexpr (!kPlain) return largest_of_rows(band.value_steps, num_heads * count);
  Floats steps = broadcast(heads[0].value_step);
  for (int h = 1; h < num_heads; h++) steps = keep_lanes(steps, 0, h * count, heads[h].value_step);
  return steps;
}

// The numbers of a band's queries. `first` is the number of its first query in the tile.
template <bool kPlain>
INLINE void choose_scales(const BlockWork& block, const Int8Scratch& scratch, Band& band, const Floats& value_step,
                          int first, int count) {
  const bool capped = !kPlain && block.op.soft_cap;
  const Floats factor = capped ? broadcast(1.0f) : load_first(scratch.factor + first, count);
  float* references = block.result.reference + first;
  const Floats top = largest_of_rows(band.best, count) * factor, older = load_first(references, count);
  const Floats above = top - (older + broadcast(kHeadroom));
  Floats reference = older;
  band.shrinks = any_above(above, 0.0f, count);
  if (band.shrinks) {
    reference = map([&](int i) { return above.part[i] > 0.0f ? top.part[i] : older.part[i]; });
    store_first(references, reference, count);
    store(band.shrink, exp2(older - reference));
    for (int i = 0; i < count; i++) {
      float* lanes = block.result.lanes + (first + i) * kWidth;
      store(lanes, load(lanes) * broadcast(band.shrink[i]));
    }
  }
  // A block of weights below 2^-100 is dropped. A block without weights gets a finite largest score.
  const Floats largest = exp2(max(broadcast(-100.0f), top - reference));
  store(band.largest, largest);
  store(band.top, max(broadcast(kNothing), top));
  store(band.factor, factor);
  store(band.byte_scale, to_bytes(value_step));
  store(band.weight_scale, largest * value_step * broadcast(1.0f / kMostByte));
}

// Rounds weights to bytes, each multiplied by its value's scale.
INLINE void round_weights(const Floats (&weights)[kPanels], const Floats (&value_scales)[kPanels], uint8_t* to) {
  const Floats fractions = load(kFractions);
  Ints rounded[kPanels];
#pragma GCC unroll 4
  for (int v = 0; v < kPanels; v++) rounded[v] = to_ints(fma(weights[v], value_scales[v], fractions));
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

// Converts the scores of a KV head to weights, for the rows [row, row + count) of a band; the first row is query
// `query` of the head. The sums of the weights are added to their lanes.
template <bool kPlain>
INLINE void weigh_scores(const BlockWork& block, const Int8Scratch& scratch, const Int8Head& head, int query,
                         Band& band, int row, int count) {
  Floats value_scales[kPanels];
  if constexpr (kPlain) {
    const Floats scale = broadcast(band.byte_scale[row]);
    for (int v = 0; v < kPanels; v++) value_scales[v] = load(head.value_scales[v]) * scale;
  }
  float* lanes = block.result.lanes + (head.number * block.tile.count + query) * kWidth;
#pragma GCC unroll 2
  for (int i = 0; i < count; i++, row++, lanes += kWidth) {
    if constexpr (!kPlain) {
      const SeenKeys seen = seen_keys(block, scratch, query + i);
      const Floats scale = broadcast(band.byte_scale[row]);
#pragma GCC unroll 4
      for (int v = 0; v < kPanels; v++) value_scales[v] = seen.keep(load(head.value_scales[v]) * scale, v, 0.0f);
    }
    const Floats factor = broadcast(band.factor[row]), shift = broadcast(-band.top[row]);
    Floats weights[kPanels];
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++) {
      weights[v] = coarse_exp2(fma(load(band.scores + row * kBlock + v * kWidth), factor, shift));
    }
    const Floats total = (weights[0] + weights[1]) + (weights[2] + weights[3]);
    store(lanes, fma(total, broadcast(band.largest[row]), load(lanes)));
    round_weights(weights, value_scales, band.weights + row * kBlock);
  }
}

}  // namespace rootgraft
