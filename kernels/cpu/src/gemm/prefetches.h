// Prefetches of the next product's panels, spread over the steps of this one.
#pragma once

#include "gemm/tile.h"

namespace rootgraft {

struct Prefetches {
  const uint32_t *line, *end;
  ptrdiff_t burst;          // lines of each stream
  ptrdiff_t apart, stream;  // words

  // So many lines, and with `apart` as many again so many words further, to be asked for in so many bursts.
  Prefetches(const uint32_t* first, ptrdiff_t lines, ptrdiff_t apart, ptrdiff_t bursts)
      : line(first), end(first + lines * kWidth), burst((lines + bursts - 1) / bursts), apart(apart), stream(0) {}

  Prefetches(const Product& p, ptrdiff_t bursts) : Prefetches(p.ahead, p.ahead_lines, p.ahead_apart, bursts) {
    stream = p.ahead_stream;
  }

  INLINE void next_burst() {
    for (ptrdiff_t i = 0; i < burst && line < end; i++, line += kWidth) {
      for (int s = 0; s < (stream ? Streams::kHalf : 1); s++) {
        __builtin_prefetch(line + s * stream, 0, 2);
        if (apart) __builtin_prefetch(line + s * stream + apart, 0, 2);
      }
    }
  }
};

}  // namespace rootgraft
