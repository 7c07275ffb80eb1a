// Partition of a product of rows and panels into parts for threads.
//
// Few rows: the panels are cut into slices, so that memory is read once. With more slices, the wait for a thread that
// started late or lost its core is shorter. But each slice starts with cold caches, and a product with one tile of rows
// reads each panel once, which is fastest in one piece. Many rows: rows are cut first. So a thread rounds, multiplies
// and norms the same rows in op after op, and does not wait for lines that another core has written.
#pragma once

#include <algorithm>

#include "simd/parallel.h"
#include "gemm/tile_rows.h"

namespace rootgraft {

// A run of cache lines of 64 bytes in memory.
struct Lines {
  const uint32_t* first;
  int64_t count;

  // The lines that are due while `done` of `all` work becomes `done_end`.
  Lines between(int64_t done, int64_t done_end, int64_t all) const {
    const int64_t from = count * std::min(done, all) / all, to = count * std::min(done_end, all) / all;
    return {first + from * kWidth, to - from};
  }
};

// Memory that is prefetched in eight streams at once, one line of each stream after the other. The hardware's own
// prefetcher into the second cache then follows each stream. With a single stream, the prefetches would be ahead of the
// hardware's: a prefetched line then occupies one of the few fill buffers of the first cache for the whole time of a
// memory access, and loads of panels wait for these buffers.
struct Streams {
  static constexpr int kHalf = 4;

  const uint32_t* first;
  int64_t length;        // lines of each stream
  // words: from a stream to the next one of the same half; apart: from the first half to the second
  int64_t words, apart;

  // Streams over some lines, or over these and as many again that begin `apart` words further.
  explicit Streams(const Lines& lines, int64_t apart = 0) : first(lines.first) {
    const int64_t streams = apart ? kHalf : 2 * kHalf;
    length = (lines.count + streams - 1) / streams, words = length * kWidth;
    this->apart = apart ? apart : kHalf * words;
  }

  // The lines of each stream that are due while `done` of `all` work becomes `done_end`.
  Streams between(int64_t done, int64_t done_end, int64_t all) const {
    const Lines lines = Lines{first, length}.between(done, done_end, all);
    Streams some = *this;
    some.first = lines.first, some.length = lines.count;
    return some;
  }
};

// The product of rows [row, row_end) and panels [panel, panel_end).
struct ProductPart {
  int64_t index, row, row_end, panel, panel_end;

  int row_count() const { return (int)(row_end - row); }
  int panel_count() const { return (int)(panel_end - panel); }
};

// Number of slices of panels, for at most `few` rows, which make one tile, or for more rows.
inline int64_t slice_count(int threads, int64_t rows, int64_t panels, int64_t few) {
  constexpr int64_t kPanels = 16;  // smallest number of panels in a slice, if a thread gets several
  constexpr int64_t kMost = 8;     // limit of slices for each thread
  if (panels <= 1 || (threads == 1 && rows <= few)) return 1;
  if (rows > few) return std::min(panels, threads * std::clamp<int64_t>(panels / (kPanels * threads), 1, kMost));
  const int64_t largest = (panels + threads - 1) / threads;  // fewer threads with this many panels each may end as soon
  return (panels + largest - 1) / largest;
}

// For a part whose panels many rows use: panels of this many lines of 64 bytes leave room in a core's second cache for
// those of the next part.
constexpr int64_t kPartRows = 128, kPartLines = 1 << 13;

// How the columns of an op are cut if each thread has many rows.
struct Slicing {
  int64_t panel_lines;   // lines of 64 bytes of a panel
  int64_t weights = 1;   // number of weights with these columns: each panel stands for one panel of each weight
  bool is_fine = false;  // whether AMX is used: its rows are multiplied with all panels of a slice again and again
  int64_t at_once = 0;   // panels of a part; 0: as many as leave room in the cache
  int64_t most_rows = 0;  // limit of rows of a part, which a core's second cache holds; 0: no limit

  // Number of slices for `threads` threads such that a slice's panels, the next slice's and the rows fit in the cache.
  int64_t fine_count(int threads, int64_t panels) const {
    constexpr int64_t kLines = 2304, kLeast = 4, kMost = 16;  // kLeast and kMost: panels
    return std::max<int64_t>(1, panels / (std::clamp(kLines / panel_lines, kLeast, kMost) * threads)) * threads;
  }

  // Number of panels of a part that many rows use.
  int64_t most_panels() const {
    constexpr int64_t kLeast = 4;  // for these, it is acceptable that rows are read from a larger cache
    return at_once ? at_once : std::max(kLeast, kPartLines / (panel_lines * weights));
  }
};

class Cuts {
 public:
  // Rows are cut at multiples of `unit`; `few` rows make one tile. From `many` rows a thread, reading all panels pays
  // off.
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
      // Few panels and many rows for many threads: the rows are cut into pieces too.
      const int64_t wanted = 2 * most_threads / std::max<int64_t>(1, of_all / kFewPanels);
      const int64_t most = std::max<int64_t>(1, std::min(rows / kFewRows, (rows + unit - 1) / unit));
      const int64_t least = rows >= many * most_threads ? most_threads : 1;
      row_cuts_ = std::clamp<int64_t>(std::max(wanted, least), 1, most);
    }
    // If a core holds a limited number of rows, these are multiplied with all panels before the next rows.
    if (slicing.most_rows) row_cuts_ = std::max(row_cuts_, (rows + slicing.most_rows - 1) / slicing.most_rows);
    threads = (int)std::min<int64_t>(most_threads, count());
  }

  int64_t count() const { return row_cuts_ * slices_; }

  ProductPart part(int64_t index) const {
    const int64_t cut = index / slices_, slice = index % slices_;
    return {index, row_edge(cut), row_edge(cut + 1), panel_edge(slice), panel_edge(slice + 1)};
  }

  // The part with which a thread starts. Its share ends where the next thread's share begins.
  int64_t first_of(int thread) const { return share_edge(count(), thread, threads); }
  int thread_of(int64_t index) const { return (int)(index * threads / count()); }

  // Whether a part is the last one of its share.
  bool is_last(int64_t index) const { return index + 1 == count() || thread_of(index + 1) != thread_of(index); }

  int threads;  // not more than there are parts

 private:
  static constexpr int64_t kFewPanels = 3;  // panels for each thread
  static constexpr int64_t kFewRows = 48;   // smallest number of rows of a cut
  // more lines than these are read from memory, so that only one thread should read each
  static constexpr int64_t kCachedLines = 1 << 17;

  int64_t row_edge(int64_t cut) const {
    const int64_t units = (rows_ + unit_ - 1) / unit_;
    return std::min(rows_, units * cut / row_cuts_ * unit_);
  }

  // Fine slices begin at even panels, as panels are multiplied in pairs.
  int64_t panel_edge(int64_t slice) const {
    return slice == slices_ ? panels_ : panels_ * slice / slices_ & ~even_;
  }

  int64_t rows_, unit_, panels_, slices_;
  int64_t even_ = 0;
  int64_t row_cuts_ = 1;
};

// A slice of a part: some panels for all of its rows. `next`: panels to prefetch meanwhile, of this part or of the one
// after it; none for the last part of a share.
struct PartSlice {
  ProductPart part;
  int64_t next, next_end;

  // Returns the memory to prefetch during a tile; streams(first, end) gives that of some panels. Tiles take all panels
  // of some rows before the next rows. A tile of all rows prefetches the panels that are used next.
  template <class F>
  Streams due(F streams, const TileSpan& tile) const {
    const int64_t end = tile.panel + tile.panels;
    if (tile.rows == part.row_count()) return streams(end, std::min(end + tile.panels, part.panel_end));
    const int64_t panels = part.panel_count(), all = part.row_count() * panels;
    const int64_t done = (tile.row - part.row) * panels + (tile.panel - part.panel) * tile.rows;
    return streams(next, next_end).between(done, done + tile.rows * tile.panels, all);
  }
};

// Calls f(slice) for slices of the index-th part, of at most `most` panels each.
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
