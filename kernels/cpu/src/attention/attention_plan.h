// Plan of an attention call: its tiles and splits. All layers of a step have the same plan, so each thread caches its
// last one.
#pragma once

#include <memory>
#include <vector>

#include "attention/attention.h"

namespace rootgraft {

constexpr int64_t kMostPartials = 1 << 24;  // floats of partials held at once

// Floats for partials in whole lines, kept from call to call: fresh memory of this size would come from the operating system, zeroed.
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

// Results of a row from a shared split, or from several: its queries start at `query` of `count`, in the partials of some
// KV heads.
struct Share {
  float* partials;  // one after the other
  int64_t first_head, end_head;
  int count;
  int64_t query;

  bool has(int64_t head) const { return first_head <= head && head < end_head; }
  Partial at(int64_t head, int64_t value_dim) const {
    return Partial::at(partials + (head - first_head) * Partial::floats(count, value_dim), count).from(query, value_dim);
  }
};

// The queries of rows that share splits, of one KV head, over one of these or several, and their partial.
struct SharedTile {
  QueryTile tile;
  float* partial;
};

// What a row gets from splits that it shares.
struct Shared {
  std::vector<Share> whole;  // of splits, for each KV head in order
  Share begun;               // of the first blocks of the next split, if there are any
  bool has_begun = false;
  int64_t keys = 0;
};

struct Plan {
  std::vector<SharedSplit> shared;
  std::vector<SharedTile> shared_tiles;  // over these; those over several splits are first
  std::vector<Shared> of_rows;           // empty where nothing is shared
  std::vector<Queries> queries;          // what the parts of tiles point to
  std::vector<QueryTile> tiles;          // over what no other row shares; maybe over nothing
  bool are_small = true;                 // whether all these are; else the largest are first
  std::vector<int64_t> of_threads;       // edges of the tiles with which each thread begins; empty: they take turns
  int64_t floats = 0;                    // of partials, one for each split of a tile
  int64_t work = 0;                      // multiplications of the tiles, for each product
};

// Null where an index of the call leads outside its table. The plan holds until the thread asks for another.
const Plan* plan_attention(const Attention& op);

}  // namespace rootgraft
