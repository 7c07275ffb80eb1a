// Partition of a product of rows and panels into parts for threads.
//
// Few rows: into slices of panels, so that memory is read once. The more slices, the shorter the wait for a thread that
// came late or lost its core; but each starts with cold caches, and a product with one tile of rows only streams the
// panels, which is fastest in one piece. Many rows: into rows first, so that a thread rounds, multiplies and norms the
// same rows in op after op, and does not wait for lines that another core has written.
#pragma once

#include <algorithm>

#include "simd/parallel.h"
#include "gemm/tile_rows.h"

namespace rootgraft {

// A run of cache lines of 64 bytes in memory.
struct Lines {
  const uint32_t* first;
  int64_t count;

  // What is due while `done` becomes `done_end`, of `all`.
  Lines between(int64_t done, int64_t done_end, int64_t all) const {
    const int64_t from = count * std::min(done, all) / all, to = count * std::min(done_end, all) / all;
    return {first + from * kWidth, to - from};
  }
};

// Rows [row, row_end) times panels [panel, panel_end).
struct ProductPart {
  int64_t index, row, row_end, panel, panel_end;

  int row_count() const { return (int)(row_end - row); }
  int panel_count() const { return (int)(panel_end - panel); }

  // What of `lines` to ask for during a tile, where tiles take all panels of some rows before the next rows.
  Lines due(const Lines& lines, const TileSpan& tile) const {
    const int64_t done = (tile.row - row) * panel_count() + (tile.panel - panel) * tile.rows;
    return lines.between(done, done + tile.rows * tile.panels, (row_end - row) * panel_count());
  }
};

// Slices of so many panels for `few` rows, which make one tile, or for more.
inline int64_t slice_count(int threads, int64_t rows, int64_t panels, int64_t few) {
  constexpr int64_t kPanels = 16;  // at least in a slice, where several are cut for a thread
  constexpr int64_t kMost = 8;     // for each thread
  if (threads == 1 && rows <= few) return 1;
  return threads * (rows <= few ? 1 : std::clamp<int64_t>(panels / (kPanels * threads), 1, kMost));
}

// The same for many rows of each thread by AMX, whose rows pass all panels of a slice again and again: these, the next
// slice's and the rows then fit the second cache together. `panel_lines`: of 64 bytes, of a panel.
inline int64_t fine_slice_count(int threads, int64_t panels, int64_t panel_lines) {
  constexpr int64_t kLines = 2304, kLeast = 6, kMost = 16;  // panels
  return std::max<int64_t>(1, panels / (std::clamp(kLines / panel_lines, kLeast, kMost) * threads)) * threads;
}

class Cuts {
 public:
  // Rows are cut at multiples of `unit`; `few` of them make one tile; `many` for a thread pay for reading all panels.
  // With `weights` of these columns a panel stands for one of each. `fine_lines`: of a panel whose many rows are to have
  // fine slices; 0: they are not.
  Cuts(int threads, int64_t rows, int64_t columns, int64_t unit, int64_t few, int64_t many, int64_t weights = 1,
       int64_t fine_lines = 0)
      : threads(threads),
        rows_(rows),
        unit_(unit),
        panels_((columns + kWidth - 1) / kWidth),
        slices_(slice_count(threads, rows, panels_ * weights, few)) {
    if (threads == 1) return;
    if (fine_lines && rows >= many * threads) slices_ = fine_slice_count(threads, panels_ * weights, fine_lines), even_ = 1;
    // Few panels and many rows on many threads: the rows are cut into pieces too.
    const int64_t wanted = 2 * threads / std::max<int64_t>(1, panels_ * weights / kFewPanels);
    const int64_t most = std::max<int64_t>(1, std::min(rows / kFewRows, (rows + unit - 1) / unit));
    row_cuts_ = std::clamp<int64_t>(rows >= many * threads ? std::max<int64_t>(wanted, threads) : wanted, 1, most);
  }

  int64_t count() const { return row_cuts_ * slices_; }

  ProductPart part(int64_t index) const {
    const int64_t cut = index / slices_, slice = index % slices_;
    return {index, row_edge(cut), row_edge(cut + 1), panel_edge(slice), panel_edge(slice + 1)};
  }

  // The part with which a thread begins: its share is those from there to the beginning of the next one's.
  int64_t first_of(int thread) const { return share_edge(count(), thread, threads); }
  int thread_of(int64_t index) const { return (int)(index * threads / count()); }

  // Whether a part is the last of its share.
  bool is_last(int64_t index) const { return index + 1 == count() || thread_of(index + 1) != thread_of(index); }

  const int threads;

 private:
  static constexpr int64_t kFewPanels = 3;  // for a thread
  static constexpr int64_t kFewRows = 48;   // to be cut from others

  int64_t row_edge(int64_t cut) const {
    const int64_t units = (rows_ + unit_ - 1) / unit_;
    return std::min(rows_, units * cut / row_cuts_ * unit_);
  }

  // Fine slices begin at even panels, which are multiplied in pairs.
  int64_t panel_edge(int64_t slice) const {
    return slice == slices_ ? panels_ : panels_ * slice / slices_ & ~even_;
  }

  int64_t rows_, unit_, panels_, slices_;
  int64_t even_ = 0;
  int64_t row_cuts_ = 1;
};

// Whether a part's panels are used by so many rows that prefetching others meanwhile pays, and leave room for those in a
// core's second cache. `panel_lines`: of 64 bytes, of a panel.
inline bool stays_cached(const ProductPart& part, int64_t panel_lines) {
  constexpr int kRows = 128;
  constexpr int64_t kLines = 1 << 13;
  return part.row_count() >= kRows && part.panel_count() * panel_lines <= kLines;
}

}  // namespace rootgraft
