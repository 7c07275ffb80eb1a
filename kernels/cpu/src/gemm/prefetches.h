// Prefetches of the next product's panels, spread over the steps of this one.
#pragma once

#include "gemm/tile.h"

namespace rootgraft {

struct Prefetches {
  const uint32_t *line, *end;
  ptrdiff_t burst;  // lines in a burst

  Prefetches(const Product& p, ptrdiff_t bursts)
      : line(p.ahead), end(p.ahead + p.ahead_lines * kWidth), burst((p.ahead_lines + bursts - 1) / bursts) {}

  INLINE void next_burst() {
    for (ptrdiff_t i = 0; i < burst && line < end; i++, line += kWidth) __builtin_prefetch(line, 0, 2);
  }
};

// Lines to prefetch beside products, spread evenly over `steps` steps: of one run of lines, or of Streams.
struct AheadLines {
  const uint32_t* line;
  ptrdiff_t stream, apart;  // words
  ptrdiff_t lines, steps;
  // due: lines of each stream in this step; owed: remainder of a line, in units of 1 / steps
  ptrdiff_t due = 0, owed = 0;

  template <class AnyProduct>  // Product, ChannelProduct
  AheadLines(const AnyProduct& p, ptrdiff_t steps)
      : line(p.ahead), stream(p.ahead_stream), apart(p.ahead_apart), lines(p.ahead_lines), steps(steps) {}

  INLINE void next_step() {
    line += due * kWidth;
    due = 0;
    for (owed += lines; owed >= steps; owed -= steps) due++;
  }

  // Prefetches the share of product I of the `Products` products in a step.
  template <int I, int Products>
  INLINE void ask() const {
    if (!stream) {
      for (ptrdiff_t i = I; i < due; i += Products) __builtin_prefetch(line + i * kWidth, 0, 2);
      return;
    }
    for (int s = I; s < Streams::kHalf; s += Products) {
      const uint32_t* at = line + s * stream;
      for (ptrdiff_t i = 0; i < due; i++, at += kWidth) {
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + apart, 0, 2);
      }
    }
  }
};

}  // namespace rootgraft
