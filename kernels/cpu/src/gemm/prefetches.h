// Prefetches of the next product's panels, spread over the steps of this one.
#pragma once

#include "gemm/tile.h"

namespace rootgraft {

struct Prefetches {
  const uint32_t *line, *end;
  ptrdiff_t burst, apart;  // lines, words

  // To be asked for in so many bursts.
  Prefetches(const Product& p, ptrdiff_t bursts)
      : line(p.ahead),
        end(p.ahead + p.ahead_lines * kWidth),
        burst((p.ahead_lines + bursts - 1) / bursts),
        apart(p.ahead_apart) {}

  INLINE void next_burst() {
    for (ptrdiff_t i = 0; i < burst && line < end; i++, line += kWidth) {
      __builtin_prefetch(line, 0, 2);
      if (apart) __builtin_prefetch(line + apart, 0, 2);
    }
  }
};

}  // namespace rootgraft
