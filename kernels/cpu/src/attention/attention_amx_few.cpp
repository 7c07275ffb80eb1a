// Attention of few queries by AMX, mostly for decode steps, which are bound by memory. The registers have their own
// shapes: for the scores, keys are rows and queries are columns, no more than there are; weights have as many rows.
// Prefetches are spread evenly between all instructions, because many at once delay other loads.
#include "attention/attention_amx.h"

#if ROOTGRAFT_AMX

namespace rootgraft {
namespace {

// Numbers of the registers: sums of scores, two of queries, two of keys or values, weights, two of sums of values.
constexpr int kScoreSums = 0, kQueries = 1, kRows = 3, kWeights = 5, kValueSums = 6;
constexpr int kHeldWords = 2 * kAmxWords;  // words of a head whose queries stay in registers
// Prefetch steps of each phase (scores, weights, values, their sums) for each panel of keys.
constexpr int kPanelSteps = kWidth / 2;

alignas(64) thread_local float few_scores[kBlock * kWidth];  // scores of a block, [key][query]

AmxShapes few_shapes(int count, int columns) {
  AmxShapes shapes;
  shapes.set(kScoreSums, kAmxRows, columns);
  shapes.set(kWeights, count, kAmxWords);
  for (int i = 0; i < 2; i++) {
    shapes.set(kQueries + i, kAmxWords, columns);
    shapes.set(kRows + i, kAmxRows, kAmxWords);
    shapes.set(kValueSums + i, count, kWidth);
  }
  return shapes;
}

// Writes the queries of each KV head as columns to the memory of the laid out keys: [head][word][column].
void turn_queries(const Attention& op, const QueryTile& tile, int columns, Scratch& scratch) {
  const int words = (int)op.head_dim / Bf16::kPerWord;
  uint32_t* to = scratch.keys;
  for (int head = 0; head < tile.heads; head++) {
    const uint32_t* queries[kWidth];
    for (int m = 0; m < kWidth; m++) {
      queries[m] = m < tile.count ? scratch.queries + (head * tile.count + m) * words : kZeros;
    }
    for (int first = 0; first < words; first += kColumns) {
      Words turned[kColumns];
      load_columns([&](int i) { return queries[i] + first; }, turned);
      for (int i = 0; i < kColumns; i++, to += columns) {
        _mm512_mask_storeu_epi32(to, (__mmask16)((1u << columns) - 1), (__m512i)turned[i].part[0]);
      }
    }
  }
}

// Computes the scores of a block, [key][column]. Keys are read directly from their pages.
template <bool kHeld>
INLINE void score_keys(const Bf16Block& block, int columns, float* scores) {
  const int words = (int)block.op.head_dim / Bf16::kPerWord, line = columns * (int)sizeof(uint32_t);
  const int steps = std::max(1, kPanelSteps * kAmxWords / words);
  const uint32_t* queries = block.scratch.keys + block.head * words * columns;
  const auto load_queries = [&](auto half, int word) { amx_load<kQueries + half.value>(queries + word * columns, line); };
  if (kHeld) for_constants<2>([&](auto half) { load_queries(half, half.value * kAmxWords); });
  for (int panel = 0; panel < block.rows.panels; panel++, scores += kWidth * columns) {
    const uint32_t* keys = block.rows.panel(block.op.k_cache, block.head, panel);
    const auto multiply = [&](auto half, int word) {
      if (!kHeld) load_queries(half, word);
      amx_load_passing<kRows + half.value>(keys + word, words * sizeof(uint32_t));
      amx_dot_bf16<kScoreSums, kRows + half.value, kQueries + half.value>();
      block.ahead.step(steps);
    };
    amx_zero<kScoreSums>();
    int word = 0;
    for (; word + kHeldWords <= words; word += kHeldWords) {
      multiply(Constant<0>{}, word);
      multiply(Constant<1>{}, word + kAmxWords);
    }
    if (!kHeld && word < words) multiply(Constant<0>{}, word);
    amx_store<kScoreSums>(scores, line);
  }
}

// Loads the scores of four queries against a panel of keys. The rows of `from` are `columns` apart.
INLINE void load_scores(const float* from, int columns, Floats (&scores)[4]) {
  __m512 keys[4];  // four keys each
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const float* at = from + 4 * i * columns;
    if (columns == 4) {
      keys[i] = _mm512_loadu_ps(at);
      continue;
    }
    const __m512 two = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(at)), _mm_loadu_ps(at + columns), 1);
    const __m512 three = _mm512_insertf32x4(two, _mm_loadu_ps(at + 2 * columns), 2);
    keys[i] = _mm512_insertf32x4(three, _mm_loadu_ps(at + 3 * columns), 3);
  }
  const __m512i low = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i high = _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {  // queries 0 and 1 of eight keys and of the other eight, then queries 2 and 3
    const __m512 first = _mm512_permutex2var_ps(keys[0], i ? high : low, keys[1]);
    const __m512 second = _mm512_permutex2var_ps(keys[2], i ? high : low, keys[3]);
    scores[2 * i].part[0] = (FloatPart)_mm512_shuffle_f32x4(first, second, 0x44);
    scores[2 * i + 1].part[0] = (FloatPart)_mm512_shuffle_f32x4(first, second, 0xEE);
  }
}

void weigh_few(const Bf16Block& block, int columns, const float* from) {
  const int count = block.tile.count, groups = (count + kTakenRows - 1) / kTakenRows;
  with_constant<kBlock / kWidth>(block.rows.panels, [&](auto panels) {
    for (int m = 0; m < count; m += kTakenRows) {
      block.ahead.step(panels.value * (kPanelSteps) / groups);
      Floats turned[panels.value][kTakenRows];
#pragma GCC unroll 4
      for (int v = 0; v < panels.value; v++) load_scores(from + v * kWidth * columns + m, columns, turned[v]);
      with_constant<kTakenRows>(count - m, [&](auto rows) {
        Floats scores[rows.value][panels.value];
#pragma GCC unroll 4
        for (int r = 0; r < rows.value; r++) {
#pragma GCC unroll 4
          for (int v = 0; v < panels.value; v++) scores[r][v] = turned[v][r];
        }
        weigh_rows(block, m, scores, block.scratch.scores + m * kBlock);
      });
    }
  });
}

// Adds the block's values times the weights.
INLINE void add_few_values(const Bf16Block& block) {
  constexpr int kLine = kWidth * sizeof(uint32_t);
  const int value_dim = (int)block.op.value_dim, panels = value_dim / kWidth, stride = value_dim * (int)sizeof(float);
  const int steps = (block.rows.panels + kStepPanels - 1) / kStepPanels;
  const int pace = std::max(1, kPanelSteps * block.rows.panels / (panels * steps));
  const auto* weights = reinterpret_cast<const uint32_t*>(block.scratch.scores);
  const uint32_t* values = block.scratch.values;
  for (int panel = 0; panel < panels; panel += 2, values += 2 * kBlockWords * kWidth) {
    const bool both = panel + 1 < panels;
    float* to = block.result.values + panel * kWidth;
    if (block.begins) {
      for_constants<2>([](auto i) { amx_zero<kValueSums + i.value>(); });
    } else {
      amx_load<kValueSums>(to, stride);
      if (both) amx_load<kValueSums + 1>(to + kWidth, stride);
    }
    for (int step = 0; step < steps; step++) {
      const uint32_t* pairs = values + step * kAmxWords * kWidth;
      amx_load<kWeights>(weights + step * kAmxWords, kBlock * sizeof(float));
      amx_load<kRows>(pairs, kLine);
      amx_dot_bf16<kValueSums, kWeights, kRows>();
      block.ahead.step(pace);
      if (!both) continue;
      amx_load<kRows + 1>(pairs + kBlockWords * kWidth, kLine);
      amx_dot_bf16<kValueSums + 1, kWeights, kRows + 1>();
      block.ahead.step(pace);
    }
    amx_store<kValueSums>(to, stride);
    if (both) amx_store<kValueSums + 1>(to + kWidth, stride);
  }
}

}  // namespace

void attend_few_by_amx(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result,
                       bool resumes, Scratch& scratch) {
  const QueryTile& tile = *stretch.tile;
  const int64_t words = op.head_dim / Bf16::kPerWord;
  const int columns = (tile.count + kTakenRows - 1) / kTakenRows * kTakenRows;
  if (!stretch.continues) turn_queries(op, tile, columns, scratch);
  const AmxScope scope(few_shapes(tile.count, columns));
  walk_blocks(op, stretch, next, result, resumes, scratch.end, [&](const BlockWork& work) {
    for (int head = 0; head < tile.heads; head++) {
      const int first = head * tile.count;
      const Bf16Block block{work, head, result.from(first, op.value_dim), scratch.queries + first * words, scratch};
      if (words == kHeldWords) score_keys<true>(block, columns, few_scores);
      else score_keys<false>(block, columns, few_scores);
      weigh_few(block, columns, few_scores);
      take_values(block, kPanelSteps, [] {});
      add_few_values(block);
    }
  });
}

}  // namespace rootgraft

#endif
