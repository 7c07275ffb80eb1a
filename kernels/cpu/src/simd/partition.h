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

// Memory that is asked for in eight streams at once, a line of each after another. The hardware's own prefetcher into
// the second cache follows each stream. One alone overtakes it, and then a line that is asked for occupies one of the
// first cache's few fill buffers for as long as memory takes, while loads of panels wait for those.
struct Streams {
  static constexpr int kHalf = 4;

  const uint32_t* first;
  int64_t length;        // lines of a stream
  int64_t words, apart;  // from a stream to the next one of the same half; from the first half to the second

  // Of some lines, or of those and as many again so many words further.
  explicit Streams(const Lines& lines, int64_t apart = 0) : first(lines.first) {
    const int64_t streams = apart ? kHalf : 2 * kHalf;
    length = (lines.count + streams - 1) / streams, words = length * kWidth;
    this->apart = apart ? apart : kHalf * words;
  }

  // What is due of each stream while `done` becomes `done_end`, of `all`.
  Streams between(int64_t done, int64_t done_end, int64_t all) const {
    const Lines lines = Lines{first, length}.between(done, done_end, all);
    Streams some = *this;
    some.first = lines.first, some.length = lines.count;
    return some;
  }
};

// Rows [row, row_end) times panels [panel, panel_end).
struct ProductPart {
  int64_t index, row, row_end, panel, panel_end;

  int row_count() const { return (int)(row_end - row); }
  int panel_count() const { return (int)(panel_end - panel); }
};

// Slices of so many panels for `few` rows, which make one tile, or for more.
inline int64_t slice_count(int threads, int64_t rows, int64_t panels, int64_t few) {
  constexpr int64_t kPanels = 16;  // at least in a slice, where several are cut for a thread
  constexpr int64_t kMost = 8;     // for each thread
  if (panels <= 1 || (threads == 1 && rows <= few)) return 1;
  if (rows > few) return std::min(panels, threads * std::clamp<int64_t>(panels / (kPanels * threads), 1, kMost));
  const int64_t largest = (panels + threads - 1) / threads;  // of which fewer threads may be as soon done
  return (panels + largest - 1) / largest;
}

// Of a part whose panels are used by many rows: so many lines of 64 bytes of panels leave room for those of the next part
// in a core's second cache.
constexpr int64_t kPartRows = 128, kPartLines = 1 << 13;

// How an op's columns are cut where each thread has many rows.
struct Slicing {
  int64_t panel_lines;   // of 64 bytes, of a panel
  int64_t weights = 1;   // of these columns: a panel stands for one of each
  bool is_fine = false;  // by AMX, whose rows pass all panels of a slice again and again
  int64_t at_once = 0;   // panels of a part, 0: as many as leave room in the cache
  int64_t most_rows = 0;  // of a part that a core's second cache keeps, 0: any

  // Slices of `threads` threads, in which their panels, those of the next slice and the rows fit the second cache.
  int64_t fine_count(int threads, int64_t panels) const {
    constexpr int64_t kLines = 2304, kLeast = 4, kMost = 16;  // panels
    return std::max<int64_t>(1, panels / (std::clamp(kLines / panel_lines, kLeast, kMost) * threads)) * threads;
  }

  // Panels of a part that many rows use.
  int64_t most_panels() const {
    constexpr int64_t kLeast = 4;  // for which rows are read from a larger cache
    return at_once ? at_once : std::max(kLeast, kPartLines / (panel_lines * weights));
  }
};

class Cuts {
 public:
  // Rows are cut at multiples of `unit`; `few` of them make one tile; `many` for a thread pay for reading all panels.
  Cuts(int most_threads, int64_t rows, int64_t columns, int64_t unit, int64_t few, int64_t many, const Slicing& slicing)
      : rows_(rows),
        unit_(unit),
        panels_((columns + kWidth - 1) / kWidth),
        slices_(slice_count(most_threads, rows, panels_ * slicing.weights, few)) {
    const int64_t of_all = panels_ * slicing.weights;
    if (slicing.is_fine && rows >= many * most_threads) {
      slices_ = slicing.fine_count(most_threads, of_all);
      even_ = 1;
    } else if (rows >= kPartRows) {
      const int64_t most = most_threads * slicing.most_panels();
      slices_ = std::max(slices_, (panels_ + most - 1) / most * most_threads);
    }
    slices_ = std::clamp<int64_t>(slices_, 1, std::max<int64_t>(1, panels_));
    if (most_threads > 1 && of_all * slicing.panel_lines <= kCachedLines) {
      // Few panels and many rows on many threads: the rows are cut into pieces too.
      const int64_t wanted = 2 * most_threads / std::max<int64_t>(1, of_all / kFewPanels);
      const int64_t most = std::max<int64_t>(1, std::min(rows / kFewRows, (rows + unit - 1) / unit));
      const int64_t least = rows >= many * most_threads ? most_threads : 1;
      row_cuts_ = std::clamp<int64_t>(std::max(wanted, least), 1, most);
    }
    // Rows that a core keeps pass all panels before the next rows do.
    if (slicing.most_rows) row_cuts_ = std::max(row_cuts_, (rows + slicing.most_rows - 1) / slicing.most_rows);
    threads = (int)std::min<int64_t>(most_threads, count());
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

  int threads;  // no more than parts

 private:
  static constexpr int64_t kFewPanels = 3;  // for a thread
  static constexpr int64_t kFewRows = 48;   // to be cut from others
  static constexpr int64_t kCachedLines = 1 << 17;  // more are read from memory, so that one thread is to read each

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

// A slice of a part, of some panels for all of its rows. `next`: panels to ask for meanwhile, of the part or of the one
// after it; none where it is the last of a share.
struct PartSlice {
  ProductPart part;
  int64_t next, next_end;

  // What to ask for during a tile, streams(first, end) being those of some panels, where tiles take all panels of some
  // rows before the next rows. A tile of all rows asks for the panels that are used next.
  template <class F>
  Streams due(F streams, const TileSpan& tile) const {
    const int64_t end = tile.panel + tile.panels;
    if (tile.rows == part.row_count()) return streams(end, std::min(end + tile.panels, part.panel_end));
    const int64_t panels = part.panel_count(), all = part.row_count() * panels;
    const int64_t done = (tile.row - part.row) * panels + (tile.panel - part.panel) * tile.rows;
    return streams(next, next_end).between(done, done + tile.rows * tile.panels, all);
  }
};

// f(slice) for slices of the index-th part, of at most so many panels.
template <class F>
void for_slices(const Cuts& cuts, int64_t index, int64_t most, F f) {
  const ProductPart part = cuts.part(index);
  PartSlice slice = {part};
  for (int64_t panel = part.panel; panel < part.panel_end; panel = slice.part.panel_end) {
    slice.part.panel = panel, slice.part.panel_end = std::min(panel + most, part.panel_end);
    const bool goes_on = slice.part.panel_end < part.panel_end;
    const ProductPart next = goes_on || cuts.is_last(index) ? part : cuts.part(index + 1);
    slice.next = goes_on || cuts.is_last(index) ? slice.part.panel_end : next.panel;
    slice.next_end = std::min(slice.next + most, next.panel_end);
    f(slice);
  }
}

}  // namespace rootgraft
