// A block of keys in the paged caches: where its rows lie, and the asking for those of the next block.
#pragma once

#include "attention.h"

namespace rootgraft {

inline const uint32_t kZeros[kMaxHeadDim] = {};

// Where a block's keys lie in a cache, in elements; nowhere for keys that no query of the tile sees.
template <class E>
struct BlockRows {
  static constexpr int64_t kNowhere = -1;

  int64_t offset[kBlock];  // for the tile's first KV head
  int64_t head_size;       // from there to the next head
  int heads, panels;       // panels of 16 keys in use

  bool whole;              // whether panels lie in one page each, where their keys follow each other
  int64_t start[kBlock / kWidth];  // of each panel, where they are whole; maybe of a key that nobody sees

  // No tile: no rows.
  BlockRows(const Attention& op, const QueryTile* tile, int64_t first_key) : head_size(op.page_size * op.head_dim) {
    heads = panels = 0;
    whole = op.page_size % kWidth == 0;
    if (!tile) return;
    heads = tile->heads;
    const int begin = (int)std::clamp<int64_t>(tile->begin - first_key, 0, kBlock);
    const int end = (int)std::clamp<int64_t>(tile->end - first_key, 0, kBlock);
    panels = (end + kWidth - 1) / kWidth;
    std::fill_n(offset, begin, kNowhere);
    const int32_t* pages = op.pages(tile->parts->row);
    for (int i = begin; i < end;) {
      const int64_t page = (first_key + i) / op.page_size, cell = (first_key + i) % op.page_size;
      const int64_t at = (pages[page] * op.kv_heads + tile->first_head) * head_size + cell * op.head_dim;
      const int run = (int)std::min<int64_t>(op.page_size - cell, end - i);
      for (int j = 0; j < run; j++) offset[i + j] = at + j * op.head_dim;
      i += run;
    }
    std::fill_n(offset + end, panels * kWidth - end, kNowhere);
    for (int panel = 0; whole && panel < panels; panel++) {
      const int64_t key = first_key + panel * kWidth;
      const int64_t at = pages[key / op.page_size] * op.kv_heads + tile->first_head;
      start[panel] = at * head_size + key % op.page_size * op.head_dim;
    }
  }

  // The first key of a whole panel.
  const uint32_t* panel(const void* cache, int head, int panel) const {
    const auto* values = static_cast<const typename E::Value*>(cache) + start[panel] + head * head_size;
    return reinterpret_cast<const uint32_t*>(values);
  }

  const uint32_t* row(const void* cache, int head, int i) const {
    if (offset[i] == kNowhere) return kZeros;
    const auto* values = static_cast<const typename E::Value*>(cache) + offset[i] + head * head_size;
    return reinterpret_cast<const uint32_t*>(values);
  }
};

// Asks for the next block a little at a time, while the present one is computed: the caches' own prefetchers lose the
// trail from page to page, and whoever asks for much at once waits. The KV heads of a page follow each other, as they
// lie in memory. What is asked for goes into the second-level cache, because a block would crowd the first one.
template <class E>
class Ahead {
 public:
  // To be spread over so many panels of the present block, one KV head's each.
  Ahead(const Attention& op, const BlockRows<E>& next, int panels) : op_(op), next_(next) {
    const int rows = 2 * kWidth * next.panels * next.heads, steps = 2 * kWidth * panels;
    rate_ = (rows + steps - 1) / steps;
    if (rows) start_panel();
    else rate_ = 0;
  }

  // For each panel of the present block kWidth steps while its keys are multiplied, as many while its values are.
  INLINE void step(int steps) {
    if (rate_) run(steps * rate_);
  }

  void finish() {
    while (rate_) run(kWidth);
  }

 private:
  using Value = typename E::Value;

  void run(int rows) {
    while (rows > 0 && rate_) {
      const int count = std::min(rows, kWidth - row_);
      if (next_.whole) {
        ask(base_ + next_.start[panel_] + row_ * op_.head_dim, count * op_.head_dim);
      } else {
        const int64_t* at = next_.offset + panel_ * kWidth + row_;
        for (int r = 0; r < count; r++) {
          if (at[r] != BlockRows<E>::kNowhere) ask(base_ + at[r], op_.head_dim);
        }
      }
      rows -= count;
      row_ += count;
      if (row_ == kWidth) next_panel();
    }
  }

  static INLINE void ask(const Value* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(Value)) __builtin_prefetch(from + i, 0, 2);
  }

  // Keys, then values; then the next KV head's; then the next panel's.
  void next_panel() {
    row_ = 0;
    if (of_values_ && ++head_ == next_.heads) head_ = 0, panel_++;
    of_values_ = !of_values_;
    if (panel_ == next_.panels) rate_ = 0;
    else start_panel();
  }

  void start_panel() {
    base_ = static_cast<const Value*>(of_values_ ? op_.v_cache : op_.k_cache) + head_ * next_.head_size;
  }

  const Attention& op_;
  const BlockRows<E>& next_;
  const Value* base_ = nullptr;
  int rate_;  // rows for each step; 0: all were asked for
  int panel_ = 0, head_ = 0, row_ = 0;
  bool of_values_ = false;
};

}  // namespace rootgraft
