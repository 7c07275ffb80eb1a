// Attention over KV in bf16 by AMX. Its sums have bits of their own (gemm/tile_amx.h), so it makes those of few queries
// too. Products of weights and values start from nothing in each block and are added by vectors: a sum then depends on
// its query alone, whichever queries share the tile.
#include "attention/attention_panels.h"
#include "gemm/tile_amx.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

using Work = Block<Bf16>;

constexpr int kWords = kBlock / Bf16::kPerWord;     // of a block's keys
constexpr int kSumDims = kAmxPanels * kWidth;       // dimensions of values that are summed together
constexpr int kTakenRows = 4;  // whose scores are weighted together
constexpr int kStepPanels = kAmxWords * Bf16::kPerWord / kWidth;  // of keys, in a step of the sums of values

struct alignas(64) AmxRoom {
  float sums[kTileQueries * kSumDims];  // of weighted values; before that of few queries' scores, [key][query]
};
thread_local AmxRoom amx_room;

// The queries of each KV head as the columns of a panel, in the room of laid out keys: [head][word][16].
void turn_queries(const Attention& op, const QueryTile& tile, Scratch& scratch) {
  const int words = (int)op.head_dim / Bf16::kPerWord;
  for (int head = 0; head < tile.heads; head++) {
    const uint32_t* queries[kWidth];
    for (int m = 0; m < kWidth; m++) {
      queries[m] = m < tile.count ? scratch.queries + (head * tile.count + m) * words : kZeros;
    }
    transpose_rows(queries, words, scratch.keys + head * words * kWidth);
  }
}

// Scores of P panels of keys, which are taken as they lie in their pages: a row for each key, a column for each query.
template <int P>
INLINE void score_panels(const Work& block) {
  const int words = (int)block.op.head_dim / Bf16::kPerWord, count = block.tile.count;
  const uint32_t* queries = block.scratch.keys + block.head * words * kWidth;
  const uint32_t* keys[P];
  for (int p = 0; p < P; p++) keys[p] = block.rows.panel(block.op.k_cache, block.head, p);
  for_constants<P>([](auto p) { amx_zero<p.value>(); });
  for (int w = 0; w < words; w += kAmxWords) {
    amx_load<kAmxB>(queries + w * kWidth, kWidth * sizeof(uint32_t));
    for_constants<P>([&](auto p) {
      constexpr int kKeys = kAmxA + p.value % 2;
      block.ahead.step(std::max(1, kWidth * kAmxWords / words));
      amx_load<kKeys>(keys[p.value] + w, words * sizeof(uint32_t));
      amx_dot_bf16<p.value, kKeys, kAmxB>();
    });
  }
  for_constants<P>([](auto p) {
    amx_store<p.value>(amx_room.sums + p.value * kWidth * kWidth, kWidth * sizeof(float));
  });
  for (int p = 0; p < P; p++) {
    const auto* sums = reinterpret_cast<const uint32_t*>(amx_room.sums) + p * kWidth * kWidth;
    for (int first = 0; first < count; first += kColumns) {
      const int columns = std::min(kColumns, count - first);
      Words scores[kColumns];
      load_columns([&](int key) { return sums + key * kWidth + first; }, scores, columns);
      for (int i = 0; i < columns; i++) {
        auto* to = reinterpret_cast<uint32_t*>(block.scratch.scores) + (first + i) * kBlock;
        store_words(to + p * kWidth, scores[i]);
      }
    }
  }
}

// A times B, rows of C c_stride apart, for all queries of a tile.
void multiply_rows(int count, int panels, const Product& product) {
  for_amx_tiles(count, panels, [&](int m, const AmxRows& rows, int p, int some) {
    Product part = product;
    part.a += m * product.a_stride;
    part.b += p * product.b_stride;
    part.c.first = static_cast<float*>(product.c.first) + m * product.c.stride + p * kWidth;
    multiply_amx<AmxWords::kBf16>(part, rows, some);
  });
}

void score_many(const Work& block) {
  const int words = (int)block.op.head_dim / Bf16::kPerWord;
  lay_out_keys(block);
  multiply_rows(block.tile.count, block.rows.panels,
                {block.queries, words, block.scratch.keys, words * kWidth, words, {block.scratch.scores, kBlock}, nullptr});
}

// Weights of R queries from m on, of a block of P panels, as weigh() makes them; but their total is that of the rounded
// ones, by which values are multiplied. In the first block of a split, where each query finds its reference, there are no
// sums to shrink.
template <int R, int P>
INLINE void weigh_rows(const Work& block, int m) {
  const Floats factor = broadcast(block.op.soft_cap ? 1.0f : (float)block.op.scale * kLog2E);
  Floats scores[R][P], totals[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const float* from = block.scratch.scores + (m + r) * kBlock;
    const int64_t last = block.scratch.end[m + r] - 1;
#pragma GCC unroll 4
    for (int v = 0; v < P; v++) scores[r][v] = load(from + v * kWidth);
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
    auto* weights = reinterpret_cast<uint16_t*>(block.scratch.scores + (m + r) * kBlock);
#pragma GCC unroll 4
    for (int v = 0; v < P; v++) {
      Bf16::store(weights + v * kWidth, rough_exp2(fma(scores[r][v], factor, shift)));
      totals[r] = totals[r] + Bf16::load(weights + v * kWidth);
    }
    store(block.result.lanes + (m + r) * kWidth, totals[r]);
  }
}

// Scores become weights. Where the block ends within a step of AMX, weights and values behind it are zeros.
void weigh_all(const Work& block) {
  const int panels = block.rows.panels;
  with_constant<kBlock / kWidth>(panels, [&](auto count) {
    int m = 0;
    for (; m + kTakenRows <= block.tile.count; m += kTakenRows) weigh_rows<kTakenRows, count.value>(block, m);
    for (; m < block.tile.count; m++) weigh_rows<1, count.value>(block, m);
  });
  if (panels % kStepPanels == 0) return;
  const size_t width = kWidth * sizeof(uint16_t);
  for (int m = 0; m < block.tile.count; m++) {
    std::memset(reinterpret_cast<char*>(block.scratch.scores + m * kBlock) + panels * width, 0, width);
  }
  const int first = panels * kWidth / Bf16::kPerWord;
  for (int64_t p = 0; p < block.op.value_dim / kWidth; p++) {
    uint32_t* values = block.scratch.values + p * kWords * kWidth;
    std::fill_n(values + first * kWidth, kWidth * kWidth / Bf16::kPerWord, 0u);
  }
}

// Values of a full block in pairs of keys. Two panels share 32 dimensions, four by four in turns, as unpacking leaves them.
void unpack_values(const Work& block) {
  const int64_t row_words = block.op.head_dim / Bf16::kPerWord, words = block.op.value_dim / Bf16::kPerWord;
  uint32_t* out = block.scratch.values;
  for (int p = 0; p < kBlock / kWidth; p++) {
    const uint32_t* row = block.rows.panel(block.op.v_cache, block.head, p);
    for (int pair = 0; pair < kWidth / Bf16::kPerWord; pair++, row += 2 * row_words, out += kWidth) {
      uint32_t* to = out;
      for (int64_t word = 0; word < words; word += kWidth, to += 2 * kWords * kWidth) {
        const __m512i even = _mm512_loadu_si512(row + word), odd = _mm512_loadu_si512(row + row_words + word);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(to + kWords * kWidth, _mm512_unpackhi_epi16(even, odd));
      }
    }
    block.ahead.step(kWidth);
  }
}

// Whether a block's values are unpacked so, which is faster than to lay them out key by key.
bool can_unpack(const Work& block) { return block.rows.full && block.op.value_dim % (2 * kWidth) == 0; }

// Sums of two panels of unpack_values(), in the order of dimensions.
INLINE void repack_sums(Floats& first, Floats& second) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 a = (__m512)first.part[0], b = (__m512)second.part[0];
  first.part[0] = (FloatPart)_mm512_permutex2var_ps(a, low, b);
  second.part[0] = (FloatPart)_mm512_permutex2var_ps(a, high, b);
}

// Rows behind few queries hold anything, and their sums are not used.
void add_values(const Work& block, bool few, bool unpacked) {
  const int count = block.tile.count, rows = few ? kAmxRows : count, value_dim = (int)block.op.value_dim;
  const int steps = (block.rows.panels + kStepPanels - 1) / kStepPanels * kAmxWords;
  const auto* weights = reinterpret_cast<const uint32_t*>(block.scratch.scores);
  const float* shrink = block.shrink();
  for (int dim = 0; dim < value_dim; dim += kSumDims) {
    const int panels = std::min(kSumDims, value_dim - dim) / kWidth;
    const uint32_t* values = block.scratch.values + dim / kWidth * kWords * kWidth;
    multiply_rows(rows, panels, {weights, kBlock, values, kWords * kWidth, steps, {amx_room.sums, kSumDims}, nullptr});
    for (int m = 0; m < count; m++) {
      float* to = block.result.values + m * value_dim + dim;
      const float* from = amx_room.sums + m * kSumDims;
      const auto add = [&](int p, const Floats& sum) {
        float* older = to + p * kWidth;
        store(older, shrink ? fma(load(older), broadcast(shrink[m]), sum) : sum);
      };
      for (int p = 0; !unpacked && p < panels; p++) add(p, load(from + p * kWidth));
      for (int p = 0; unpacked && p < panels; p += 2) {
        Floats first = load(from + p * kWidth), second = load(from + (p + 1) * kWidth);
        repack_sums(first, second);
        add(p, first);
        add(p + 1, second);
      }
    }
  }
}

}  // namespace

void attend_by_amx(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result,
                   bool resumes, Scratch& scratch) {
  const QueryTile& tile = *stretch.tile;
  const int64_t words = op.head_dim / Bf16::kPerWord;
  const bool few = tile.count <= kAmxRows && op.page_size % kWidth == 0 && tile.heads * words <= kBlock * kMaxHeadDim / kWidth;
  gather_queries<Bf16>(op, tile, scratch);
  if (few) turn_queries(op, tile, scratch);
  const AmxScope scope(amx_shapes(few ? kAmxRows : amx_rows(tile.count), kAmxWords));
  walk_blocks(op, stretch, next, result, resumes, scratch.end, [&](const BlockWork& work) {
    for (int head = 0; head < tile.heads; head++) {
      const int first = head * tile.count;
      const Work block{work, head, result.from(first, op.value_dim), scratch.queries + first * words, scratch};
      if (!few) score_many(block);
      else with_constant<kBlock / kWidth>(work.rows.panels, [&](auto count) { score_panels<count.value>(block); });
      const bool unpacked = can_unpack(block);
      if (unpacked) unpack_values(block);
      else lay_out_values(block);
      weigh_all(block);
      add_values(block, few, unpacked);
    }
  });
}

}  // namespace rootgraft

#endif
