// Attention over KV in bf16 by AMX: what tiles of many queries and of few have in common. Its sums have bits of their own
// (gemm/tile_amx.h), so it makes those of few queries too. Products of weights and values start from nothing in each block
// and are added by vectors: a sum then depends on its query alone, whichever queries share the tile.
#pragma once

#include "attention/attention_panels.h"
#include "gemm/tile_amx.h"

#if ROOTGRAFT_AMX

namespace rootgraft {

using Bf16Block = Block<Bf16>;

constexpr int kBlockWords = kBlock / Bf16::kPerWord;              // of a block's keys
constexpr int kSumDims = kAmxPanels * kWidth;                     // dimensions of values that are summed together
constexpr int kTakenRows = 4;                                     // whose scores are weighted together
constexpr int kStepPanels = kAmxWords * Bf16::kPerWord / kWidth;  // of keys, in a step of the sums of values

struct alignas(64) AmxRoom {
  // Of few queries' scores, [key][query], and of their weighted values; of those of two tiles.
  float sums[std::max(kAmxRows * kSumDims, 2 * kAmxRows * kMaxHeadDim)];
};

// Weights of R queries from m on, of a block of P panels, as weigh() makes them, in rows of kBlock words; but their total
// is that of the rounded ones, by which values are multiplied. In the first block of a split, where each query finds its reference, there are no
// sums to shrink.
template <int R, int P>
INLINE void weigh_rows(const Bf16Block& block, int m, Floats (&scores)[R][P], float* rows) {
  const Floats factor = broadcast(block.op.soft_cap ? 1.0f : (float)block.op.scale * kLog2E);
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
    block.scratch.shrink[m + r] = 1.0f;
    if (!any_above(best * factor, reference + kHeadroom)) continue;
    const float now = std::max(reference, largest(best) * first_lane(factor));
    const Floats less = exp2(broadcast(reference - now));
    totals[r] = totals[r] * less;
    block.scratch.shrink[m + r] = first_lane(less);
    reference = now;
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const Floats shift = broadcast(-block.result.reference[m + r]);
    auto* weights = reinterpret_cast<uint16_t*>(rows + r * kBlock);
#pragma GCC unroll 4
    for (int v = 0; v < P; v++) {
      Bf16::store(weights + v * kWidth, rough_exp2(fma(scores[r][v], factor, shift)));
      totals[r] = totals[r] + Bf16::load(weights + v * kWidth);
    }
    store(block.result.lanes + (m + r) * kWidth, totals[r]);
  }
}

// Where weights of so many panels end within a step of AMX, zeros behind those of so many rows.
INLINE void clear_end(int panels, float* rows, int count) {
  if (panels % kStepPanels == 0) return;
  const size_t width = kWidth * sizeof(uint16_t);
  for (int m = 0; m < count; m++) std::memset(reinterpret_cast<char*>(rows + m * kBlock) + panels * width, 0, width);
}

// The same for the values.
INLINE void clear_values_end(const Bf16Block& block) {
  const int panels = block.rows.panels, first = panels * kWidth / Bf16::kPerWord;
  for (int64_t p = 0; panels % kStepPanels && p < block.op.value_dim / kWidth; p++) {
    uint32_t* values = block.scratch.values + p * kBlockWords * kWidth;
    std::fill_n(values + first * kWidth, kWidth * kWidth / Bf16::kPerWord, 0u);
  }
}

// Values of a full block in pairs of keys. Two panels share 32 dimensions, four by four in turns, as unpacking leaves them.
INLINE void unpack_values(const Bf16Block& block, int steps) {
  const int64_t row_words = block.op.head_dim / Bf16::kPerWord, words = block.op.value_dim / Bf16::kPerWord;
  uint32_t* out = block.scratch.values;
  for (int p = 0; p < kBlock / kWidth; p++) {
    const uint32_t* row = block.rows.panel(block.op.v_cache, block.head, p);
    for (int pair = 0; pair < kWidth / Bf16::kPerWord; pair++, row += 2 * row_words, out += kWidth) {
      uint32_t* to = out;
      for (int64_t word = 0; word < words; word += kWidth, to += 2 * kBlockWords * kWidth) {
        const __m512i even = _mm512_loadu_si512(row + word), odd = _mm512_loadu_si512(row + row_words + word);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(to + kBlockWords * kWidth, _mm512_unpackhi_epi16(even, odd));
      }
    }
    block.ahead.step(steps);
  }
}

// Values of the block as the second product takes them; returns whether they were unpacked, which is faster than to lay
// them out key by key. `steps`: of what is to come, for each panel of keys.
INLINE bool take_values(const Bf16Block& block, int steps) {
  const bool unpacked = block.rows.full && block.op.value_dim % (2 * kWidth) == 0;
  if (unpacked) unpack_values(block, steps);
  else lay_out_values(block);
  return unpacked;
}

// Sums of two panels of unpack_values(), in the order of dimensions.
INLINE void repack_sums(Floats& first, Floats& second) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 a = (__m512)first.part[0], b = (__m512)second.part[0];
  first.part[0] = (FloatPart)_mm512_permutex2var_ps(a, low, b);
  second.part[0] = (FloatPart)_mm512_permutex2var_ps(a, high, b);
}

// Adds the sums of `panels` panels of queries [begin, end), `stride` from one to the next, to the result's dimensions from
// `dim` on.
INLINE void add_sums(const Bf16Block& block, const float* sums, int stride, int dim, int panels, bool unpacked, int begin,
                     int end) {
  const float* shrink = block.shrink();
  const int value_dim = (int)block.op.value_dim;
  for (int m = begin; m < end; m++, sums += stride) {
    float* to = block.result.values + m * value_dim + dim;
    const auto add = [&](int p, const Floats& sum) {
      float* older = to + p * kWidth;
      store(older, shrink ? fma(load(older), broadcast(shrink[m]), sum) : sum);
    };
    for (int p = 0; !unpacked && p < panels; p++) add(p, load(sums + p * kWidth));
    for (int p = 0; unpacked && p < panels; p += 2) {
      Floats first = load(sums + p * kWidth), second = load(sums + (p + 1) * kWidth);
      repack_sums(first, second);
      add(p, first);
      add(p + 1, second);
    }
  }
}

// Whether so few queries have tiles of their own shapes.
inline bool are_few(const Attention& op, const QueryTile& tile) {
  const int64_t words = op.head_dim / Bf16::kPerWord;
  return tile.count <= kAmxRows && op.page_size % kWidth == 0 && tile.heads * words <= kBlock * kMaxHeadDim / kWidth;
}

// attend_by_amx() of a tile of few queries, which are gathered.
void attend_few_by_amx(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result,
                       bool resumes, Scratch& scratch, AmxRoom& room);

}  // namespace rootgraft

#endif
