// Products of bytes with a scale for each row by AMX, whose rows are finished while the next product is made.
#pragma once

#include "gemm/tile_amx.h"
#include "int8/int8_tile.h"

#if ROOTGRAFT_AMX

namespace rootgraft {

constexpr int kChannelGroup = 8;  // panels at most, whose sums are made in pieces along K

// Finishes the rows of a product, kAmxPanels at a time, while AMX multiplies the next, which leaves the vector units idle.
class ChannelFinish {
 public:
  static constexpr int kStride = (kChannelGroup + 1) * kWidth;  // sums from row to row: rows lie in different sets
  using Row = void (*)(const ChannelProduct& product, const int32_t* sums, int row);

  ~ChannelFinish() { finish_all(); }

  // Where the sums of the product that is made go.
  int32_t* room() { return sums_[room_]; }

  // They are there, and go to product.c from now on. The next product has so many instructions that multiply.
  void begin(const ChannelProduct& product, int rows, int panels, ptrdiff_t products);

  // Before an instruction that multiplies: finishes a row, or none.
  INLINE void step() {
    if (next_ == end_ || --wait_ > 0) return;
    wait_ = every_;
    finish_next();
  }

  void finish_all() {
    while (next_ < end_) finish_next();
  }

 private:
  static constexpr int kParts = kChannelGroup / kAmxPanels;

  // Rows of some panels, and how they are finished.
  struct Part {
    ChannelProduct product;
    Row row;
  };

  INLINE void finish_next() {
    const int part = next_ / rows_;
    parts_[part].row(parts_[part].product, from_ + part * kAmxPanels * kWidth, next_ - part * rows_);
    next_++;
  }

  alignas(64) int32_t sums_[2][kMostAmxRows * kStride];
  Part parts_[kParts];
  const int32_t* from_ = nullptr;
  int next_ = 0, end_ = 0, rows_ = 1, room_ = 0, every_ = 1, wait_ = 1;
};

// The same to the bit as multiply_channel_tile where words fill AMX's registers, at most kChannelGroup panels, stored when the
// finishing goes on or ends; in an AmxScope of amx_shapes(rows, kAmxWords).
void multiply_channel_amx(const ChannelProduct& product, const AmxRows& rows, int panels, AmxReuse reuse,
                          ChannelFinish& finishing);

}  // namespace rootgraft

#endif
