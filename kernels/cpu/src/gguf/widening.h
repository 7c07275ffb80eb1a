// Rounds blocks of panels to numbers of bf16 or fp32, some at a time beside other work.
#pragma once

#include "gguf/block_numbers.h"
#include "int8/quantised_linear.h"

namespace rootgraft {

constexpr int kAhead = 8;  // number of blocks that are prefetched before they are used

// Functions that widen the blocks of a format, one by one. The code that uses them is not a template of the format:
// each format's code is long, and is compiled once for each type of number.
struct Widener {
  // The position of a block that is counted over panels.
  BlockPlace (*place)(const uint32_t* panels, const uint16_t* scales, int64_t block);
  // Widens the block at a position, which is advanced to the next one, and prefetches the block `ahead` blocks later.
  void (*widen)(BlockPlace& place, int ahead, uint32_t* to);
};

// Widens to numbers of E.
template <class E>
Widener widener_of(Format format);

// Some blocks along K of some panels. If `apart` is not 0, there are panels of a gate's factor that much further on.
struct WidenedSpan {
  int64_t panel, panels, apart, block, blocks;
};

// Widens the blocks of some panels one by one, between other work.
template <class E>
class Widening {
 public:
  // From now on, widens one block in every `every` steps.
  void begin(const QuantisedLinear& op, const WidenedSpan& span, int every, uint32_t* to) {
    all_ = op.width / kBlockValues;
    // The blocks of a whole panel are followed by those of the next one; after a part of a panel, the next is far away.
    is_whole_ = span.blocks == all_;
    ahead_ = is_whole_ ? kAhead : (int)all_;
    widener_ = widener_of<E>(op.format);
    op_ = &op, span_ = span, to_ = to, panel_ = 0;
    panels_ = is_whole_ ? 1 : span.panels;
    if (span.apart) panels_ *= 2;
    every_ = wait_ = every;
    begin_panel();
  }

  // One of these steps.
  INLINE void step() {
    if (!left_ || --wait_ > 0) return;
    wait_ = every_;
    next();
  }

  INLINE void step_now() {
    if (left_) next();
  }

  void finish() {
    while (left_) next();
  }

 private:
  static constexpr int kWords = kBlockValues / E::kPerWord * kWidth;  // words of a block, widened

  // Starts the next panel, or all panels if they are whole and one after another.
  void begin_panel() {
    const int64_t own = is_whole_ ? 1 : span_.panels, panel = panel_ < own ? panel_ : panel_ - own + span_.apart;
    const int64_t block = (span_.panel + panel) * all_ + span_.block;
    from_ = widener_.place(op_->panels, static_cast<const uint16_t*>(op_->scales), block);
    left_ = is_whole_ ? span_.panels * all_ : span_.blocks;
  }

  INLINE void next() {
    widener_.widen(from_, ahead_, to_);
    to_ += kWords;
    if (!--left_ && ++panel_ < panels_) begin_panel();
  }

  const QuantisedLinear* op_ = nullptr;
  WidenedSpan span_ = {};
  BlockPlace from_;
  Widener widener_ = {};
  uint32_t* to_ = nullptr;
  // blocks of a panel, blocks left in one, number of the panel, number of panels
  int64_t all_ = 0, left_ = 0, panel_ = 0, panels_ = 0;
  int every_ = 1, wait_ = 1, ahead_ = kAhead;
  bool is_whole_ = true;
};

}  // namespace rootgraft
