// Plan of an attention call: its tiles and splits. All layers of a step have the same plan, so each thread caches the
// last plan that it made.
#pragma once

#include <memory>
#include <vector>

#include "attention/attention.h"

namespace rootgraft {

constexpr int64_t kMostPartials = 1 << 24;  // limit of the floats of partials that are held at once

// Memory for partials, in whole cache lines. It is kept from call to call, as the operating system would zero new
// memory.
class Room {
 public:
  float* take(int64_t floats) {
    const int64_t lines = (floats + kWidth - 1) / kWidth;
    if (lines_ < lines) {
      memory_.reset(new Line[lines]);
      lines_ = lines;
    }
    return reinterpret_cast<float*>(memory_.get());
  }

 private:
  struct alignas(64) Line {
    float lanes[kWidth];
  };

  std::unique_ptr<Line[]> memory_;
  int64_t lines_ = 0;
};

// The results of a row over one shared split or several: its queries start at `query` of `count` in the partials of
// some KV heads.
struct Share {
  float* partials;  // one partial after the other
  int64_t first_head, end_head;
  int count;
  int64_t query;

  bool has(int64_t head) const { return first_head <= head && head < end_head; }
  Partial at(int64_t head, int64_t value_dim) const {
    return Partial::at(partials + (head - first_head) * Partial::floats(count, value_dim), count).from(query, value_dim);
  }
};

// The queries of one KV head of the rows that share splits, over one or several of these splits, and their partial.
struct SharedTile {
  QueryTile tile;
  float* partial;
};

// The results that a row takes from the splits that it shares.
struct Shared {
  std::vector<Share> whole;  // over whole splits, for each KV head in order
  Share begun;               // over the first blocks of the next split; may be empty
  bool has_begun = false;
  int64_t keys = 0;
};

struct Plan {
  std::vector<SharedSplit> shared;
  std::vector<SharedTile> shared_tiles;  // tiles over shared splits; those over several splits come first
  std::vector<Shared> of_rows;           // by row; empty if no row shares a split
  std::vector<Queries> queries;          // the parts of tiles point to these
  std::vector<QueryTile> tiles;          // tiles over the keys that no other row shares; there may be no such keys
  bool are_small = true;                 // whether all of these are small; otherwise the largest come first
  // for each thread, the index of its first tile, then the end; empty if threads take tiles in turn
  std::vector<int64_t> of_threads;
  int64_t floats = 0;                    // floats of partials, one for each split of a tile
  int64_t work = 0;                      // multiplications of the tiles in each of the two products
};

// Returns null if an index of the call is outside of its table. The plan is valid until the thread requests another
// one.
const Plan* plan_attention(const Attention& op);

}  // namespace rootgraft
