// State of a block of 8-bit KV for a tile of queries, shared by its two products and the softmax between them.
//
// The softmax works on bands of up to 16 queries; numbers for each query are stored with one lane per query. A band
// holds queries of one KV head, or all queries of several.
#pragma once

#include "simd/amx.h"
#include "attention/attention_walk.h"

namespace rootgraft {

constexpr int kPanels = kBlock / kWidth;
constexpr int kPanelWords = kWidth / kWordBytes;  // words of weights
constexpr int kBandQueries = kWidth;

struct alignas(64) Band {
  // see store_scores(); with AMX first the integer scores, later the sums of values
  float scores[kBandQueries * kBlock];
  float best[kBandQueries * kWidth];         // for each query, lane by lane: the largest score of its panels
  // for each query, lane by lane: the largest scale of the values that it sees
  float value_steps[kBandQueries * kWidth];
  uint8_t weights[kBandQueries * kBlock];    // [query][word of a panel][panel][key of the word]
  // For each query:
  float factor[kBandQueries];        // converts scores to base 2; 1 if they are capped
  float top[kBandQueries];           // the largest score, in base 2
  float largest[kBandQueries];       // the weight of the largest score
  float byte_scale[kBandQueries];    // scales the largest scale of values to the largest byte
  float weight_scale[kBandQueries];  // scale of the bytes
  float shrink[kBandQueries];        // factor of older sums for a new reference
  bool shrinks;                      // whether any query's sums shrink
};

// The panels of a block for one KV head of the tile. Unused panels repeat the first one, and are masked.
struct Int8Head {
  int number;
  const uint32_t *keys[kPanels], *values[kPanels];
  const float *key_scales[kPanels], *value_scales[kPanels];
  float value_step;  // the largest of value_scales

  void find(const BlockWork& block, int head) {
    const BlockRows& rows = block.rows;
    number = head;
    for (int v = 0; v < kPanels; v++) {
      const int panel = v < rows.panels ? v : 0;
      keys[v] = rows.panel(block.op.k_cache, head, panel);
      values[v] = rows.panel(block.op.v_cache, head, panel);
      key_scales[v] = rows.panel_scales(block.op.k_cache, head, panel);
      value_scales[v] = rows.panel_scales(block.op.v_cache, head, panel);
    }
    const auto scales = [&](int v) { return load(value_scales[v]); };
    value_step = largest(max(max(scales(0), scales(1)), max(scales(2), scales(3))));
  }
};

struct Int8Scratch {
  alignas(64) uint32_t queries[kTileQueries * kMaxHeadDim / kWordBytes];  // A of the scores, by KV head
  int32_t start[kTileQueries];  // start values for these queries: see Int8Call
  float factor[kTileQueries];
  int64_t end[kTileQueries];  // end of the keys that a query sees
  Band band;
  Int8Head heads[kBandQueries];  // KV heads of the band
};

#if ROOTGRAFT_AMX
// Whether AMX computes a tile, and the function that does so: the scratch holds the queries.
bool takes_amx(const Attention& op, const QueryTile& tile);
void attend_int8_by_amx(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result,
                        bool resumes, Int8Scratch& scratch);
#endif

}  // namespace rootgraft
