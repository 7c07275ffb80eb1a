// Blocks of panels rounded to numbers of bf16 or fp32, some at a time beside other work.
#pragma once

#include "gguf/block_numbers.h"
#include "int8/quantised_linear.h"

namespace rootgraft {

// A word of each column.
INLINE void store_pair(uint32_t* to, const Floats& first, const Floats& second) {
#if defined(__AVX512BF16__)
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0]);
  store_words(to, Words{{(WordPart)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both)}});
#else
  uint16_t halves[2][kWidth];
  Bf16::store(halves[0], first);
  Bf16::store(halves[1], second);
  store_words(to, Bf16::interleave(halves[0], halves[1]));
#endif
}

template <class E, int I = 0, class Block>
INLINE void widen_block(const Block& block, uint32_t* to) {
  if constexpr (I < kBlockValues) {
    if constexpr (E::kPerWord == 1) {
      store(reinterpret_cast<float*>(to), block.template number<I>());
    } else {
      store_pair(to, block.template number<I>(), block.template number<I + 1>());
    }
    widen_block<E, I + E::kPerWord>(block, to + kWidth);
  }
}

constexpr int kAhead = 8;  // blocks that are asked for before they are needed

template <class E, Format F, bool kIsWhole>
void widen_next(BlockPlace& place, int panel, uint32_t* to) {
  prefetch_block<F>(place, kIsWhole ? kAhead : panel);
  widen_block<E>(next_block<F>(place), to);
}

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
    with_block_format(op.format, [&](auto format) {
      constexpr Format F = format.value;
      place_ = [](const QuantisedLinear& of, int64_t block) {
        return block_place<F>(of.panels, static_cast<const uint16_t*>(of.scales), block);
      };
      widen_ = is_whole_ ? &widen_next<E, F, true> : &widen_next<E, F, false>;
    });
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
    from_ = place_(*op_, (span_.panel + panel) * all_ + span_.block);
    left_ = is_whole_ ? span_.panels * all_ : span_.blocks;
  }

  INLINE void next() {
    widen_(from_, (int)all_, to_);
    to_ += kWords;
    if (!--left_ && ++panel_ < panels_) begin_panel();
  }

  const QuantisedLinear* op_ = nullptr;
  WidenedSpan span_ = {};
  BlockPlace from_;
  BlockPlace (*place_)(const QuantisedLinear& op, int64_t block) = nullptr;
  void (*widen_)(BlockPlace& place, int panel, uint32_t* to) = nullptr;
  uint32_t* to_ = nullptr;
  int64_t all_ = 0, left_ = 0, panel_ = 0, panels_ = 0;  // blocks of a panel, blocks left in one, panels
  int every_ = 1, wait_ = 1;
  bool is_whole_ = true;
};

}  // namespace rootgraft
