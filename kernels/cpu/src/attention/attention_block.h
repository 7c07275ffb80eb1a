// Addresses of a block of keys in the paged caches, and prefetch of the next block.
#pragma once

#include "attention/attention.h"
#include "simd/amx.h"

namespace rootgraft {

inline const uint32_t kZeros[kMaxHeadDim] = {};

// Byte offsets of a block's keys in a cache. Keys that no query of the tile sees have none.
struct BlockRows {
  static constexpr int64_t kNowhere = -1;

  int64_t offset[kBlock];  // for the tile's first KV head; not set for 8-bit KV
  int64_t head_bytes;      // bytes from a KV head to the next one
  int heads, panels;       // heads: KV heads; panels: used panels of 16 keys

  bool cached = false;     // whether the block is in a cache already, so that nothing is prefetched
  bool full = false;       // whether every key of the block is used, and panels are whole
  bool whole;              // whether each panel lies within one page, with its keys one after another
  int64_t start[kBlock / kWidth];   // of each panel, if panels are whole; its key may be masked
  int64_t scales[kBlock / kWidth];  // of each panel's keys, for 8-bit KV

  // Without a tile there are no rows.
  BlockRows(const Attention& op, const QueryTile* tile, int64_t first_key) : head_bytes(op.head_bytes()) {
    heads = panels = 0;
    whole = op.page_size % kWidth == 0;
    if (!tile) return;
    heads = tile->heads;
    cached = tile->cached;
    const int begin = (int)std::clamp<int64_t>(tile->begin - first_key, 0, kBlock);
    const int end = (int)std::clamp<int64_t>(tile->end - first_key, 0, kBlock);
    panels = (end + kWidth - 1) / kWidth;
    full = whole && begin == 0 && end == kBlock;
    const int32_t* page = op.pages(tile->parts->row) + first_key / op.page_size;
    int64_t cell = first_key % op.page_size;
    const auto head = [&] { return (*page * op.kv_heads + tile->first_head) * head_bytes; };
    const auto advance = [&](int64_t keys) {
      if ((cell += keys) == op.page_size) page++, cell = 0;
    };
    if (whole) {
      for (int panel = 0; panel < panels; panel++, advance(kWidth)) {
        start[panel] = head() + cell * op.cell_bytes();
        scales[panel] = head() + int8_scale(cell, op.page_size, op.head_dim);
        for (int i = 0; !op.kv_is_int8 && i < kWidth; i++) offset[panel * kWidth + i] = start[panel] + i * op.cell_bytes();
      }
    } else {
      for (int i = 0, run; i < end; i += run, advance(run)) {
        run = (int)std::min<int64_t>(op.page_size - cell, end - i);
        for (int j = 0; j < run; j++) offset[i + j] = head() + (cell + j) * op.cell_bytes();
      }
    }
    std::fill_n(offset, begin, kNowhere);
    std::fill_n(offset + end, panels * kWidth - end, kNowhere);
  }

  // Address of the first key of a whole panel.
  const uint32_t* panel(const void* cache, int head, int panel) const { return at(cache, head, start[panel]); }

  const uint32_t* row(const void* cache, int head, int i) const {
    return offset[i] == kNowhere ? kZeros : at(cache, head, offset[i]);
  }

  const float* panel_scales(const void* cache, int head, int panel) const {
    return reinterpret_cast<const float*>(at(cache, head, scales[panel]));
  }

 private:
  const uint32_t* at(const void* cache, int head, int64_t offset) const {
    return reinterpret_cast<const uint32_t*>(static_cast<const char*>(cache) + offset + head * head_bytes);
  }
};

#if ROOTGRAFT_AMX
constexpr bool kHasTurns = true;  // if the CPU also has AMX
#else
constexpr bool kHasTurns = false;
#endif

// Prefetches the next block in small steps while the current one is computed. The hardware's prefetchers stop at the
// ends of pages, and many prefetches at once stall. The KV heads of a page are prefetched in memory order. With AMX,
// panels take turns for each head, keys and values, because such a CPU is faster with several streams (others were not
// measured). The target is the second-level cache, as a block would evict too much from the first.
class Ahead {
 public:
  // The prefetches are spread over `panels` panels of the current block, each of one KV head.
  Ahead(const Attention& op, const BlockRows& next, int panels) : op_(op), next_(next), cell_bytes_(op.cell_bytes()) {
    const int rows = (op.values_are_keys() ? 1 : 2) * kWidth * next.panels * next.heads, steps = 2 * kWidth * panels;
    rate_ = (rows + steps - 1) / steps;
    turn_rows_ = !has_amx() || !next.whole ? 0 : cell_bytes_ <= 64 ? 4 : 2;
    if (!rows || next.cached) rate_ = 0;
    else if (turn_rows_) start_turns();
    else start_panel();
  }

  // Called for each panel of the current block with kWidth steps while its keys are multiplied, and again with as many
  // while its values are.
  INLINE void step(int steps) {
    if (rate_) run(steps * rate_);
  }

  void finish() {
    while (rate_) run(kWidth);
  }

 private:
  void run(int rows) {
    if (kHasTurns && turn_rows_) return run_in_turns(rows);
    while (rows > 0 && rate_) {
      const int count = std::min(rows, kWidth - row_);
      if (next_.whole) {
        if (op_.kv_is_int8 && row_ == 0) ask(base_ + next_.scales[panel_], 1);
        ask(base_ + next_.start[panel_] + row_ * cell_bytes_, count * cell_bytes_);
      } else {
        const int64_t* at = next_.offset + panel_ * kWidth + row_;
        for (int r = 0; r < count; r++) {
          if (at[r] != BlockRows::kNowhere) ask(base_ + at[r], cell_bytes_);
        }
      }
      rows -= count;
      row_ += count;
      if (row_ == kWidth) next_panel();
    }
  }

  static INLINE void ask(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  }

  // The order is: keys, values, the next KV head, the next panel.
  void next_panel() {
    row_ = 0;
    const bool ends_head = of_values_ || op_.values_are_keys();
    if (ends_head && ++head_ == next_.heads) head_ = 0, panel_++;
    of_values_ = !ends_head;
    if (panel_ == next_.panels) rate_ = 0;
    else start_panel();
  }

  void start_panel() {
    base_ = static_cast<const char*>(of_values_ ? op_.v_cache : op_.k_cache) + head_ * next_.head_bytes;
  }

  __attribute__((noinline)) void run_in_turns(int rows) {
    for (due_ += rows; due_ >= turn_rows_ && rate_; due_ -= turn_rows_) {
      ask(turns_[turn_], turn_rows_ * cell_bytes_);
      turns_[turn_] += turn_rows_ * cell_bytes_;
      if (++turn_ < num_turns_) continue;
      turn_ = 0;
      if ((row_ += turn_rows_) < kWidth) continue;
      row_ = 0;
      if (++head_ == next_.heads) rate_ = 0;
      else start_turns();
    }
  }

  __attribute__((noinline)) void start_turns() {
    num_turns_ = 0;
    for (const void* cache : {op_.k_cache, op_.v_cache}) {
      if (num_turns_ && op_.values_are_keys()) break;
      const char* base = static_cast<const char*>(cache) + head_ * next_.head_bytes;
      for (int panel = 0; panel < next_.panels; panel++) {
        turns_[num_turns_++] = base + next_.start[panel];
        if (op_.kv_is_int8) ask(base + next_.scales[panel], 1);
      }
    }
  }

  const Attention& op_;
  const BlockRows& next_;
  const char* base_ = nullptr;
  int64_t cell_bytes_;
  int rate_;  // rows for each step; 0 if all were prefetched
  int panel_ = 0, head_ = 0, row_ = 0;
  bool of_values_ = false;

  int turn_rows_;  // rows of each panel of a head that are prefetched in turns; 0: panel by panel
  int num_turns_ = 0, turn_ = 0, due_ = 0;
  const char* turns_[2 * kBlock / kWidth];
};

}  // namespace rootgraft
