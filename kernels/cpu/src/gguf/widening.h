// Blocks of panels rounded to numbers of bf16 or fp32, some at a time beside other work.
#pragma once

#include "gguf/block_numbers.h"
#include "int8/quantised_linear.h"

namespace rootgraft {

constexpr int kAhead = 8;  // blocks that are asked for before they are needed

// How blocks of a format are widened, one by one. Not a template of what widens them: each format's code is long, and is
// compiled once for each type of number.
struct Widener {
  // The place of a block that is counted over panels.
  BlockPlace (*place)(const uint32_t* panels, const uint16_t* scales, int64_t block);
  // Widens the block at a place, which moves on to the next, and asks for the one that comes so many blocks later.
  void (*widen)(BlockPlace& place, int ahead, uint32_t* to);
};

// To numbers of E.
template <class E>
Widener widener_of(Format format);

// Panels, those of a gate's factors `apart` further if that is not 0, and of each some blocks along K.
struct WidenedSpan {
  int64_t panel, panels, apart, block, blocks;
};

// Widens the blocks of some panels one by one, between other work.
template <class E>
class Widening {
 public:
  // A block every so many steps.
  void begin(const QuantisedLinear& op, const WidenedSpan& span, int every, uint32_t* to) {
    all_ = op.width / kBlockValues;
    // Blocks of a whole panel are followed by those of the next; some are followed by blocks that come much later.
    is_whole_ = span.blocks == all_;
    ahead_ = is_whole_ ? kAhead : (int)all_;
    widener_ = widener_of<E>(op.format);
    op_ = &op, span_ = span, to_ = to, panel_ = 0;
    panels_ = is_whole_ ? 1 : span.panels;
    if (span.apart) panels_ *= 2;
    every_ = wait_ = every;
    begin_panel();
  }

  // One of those steps.
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
  static constexpr int kWords = kBlockValues / E::kPerWord * kWidth;  // of a block, widened

  // The next panel, or all of them where they are whole and follow each other.
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
  int64_t all_ = 0, left_ = 0, panel_ = 0, panels_ = 0;  // blocks of a panel, blocks left in one, panels
  int every_ = 1, wait_ = 1, ahead_ = kAhead;
  bool is_whole_ = true;
};

}  // namespace rootgraft
