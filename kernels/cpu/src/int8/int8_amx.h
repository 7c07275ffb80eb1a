// Products of bytes with a scale for each row by AMX, whose rows are finished while the next product is made.
#pragma once

#include "gemm/tile_amx.h"
#include "int8/int8_tile.h"

#if ROOTGRAFT_AMX

namespace rootgraft {

// Finishes the rows of a product while AMX multiplies the next, which leaves the vector units idle.
class ChannelFinish {
 public:
  static constexpr int kStride = kAmxPanels * kWidth;  // sums from row to row
  static constexpr int kNoneLeft = 1 << 30;
  using Row = void (*)(const ChannelProduct& product, const int32_t* sums, int row);

  ~ChannelFinish() { finish_all(); }

  // Where the sums of the product that is made go.
  int32_t* room() { return sums_[room_]; }

  // They are there, and go to product.c from now on. The next product has so many instructions that multiply.
  void begin(const ChannelProduct& product, int rows, int panels, ptrdiff_t products);

  // Finishes a row. Returns how many instructions that multiply come before the next one is due.
  INLINE int finish_one() {
    if (next_ < rows_) finish_next();
    return next_ < rows_ ? every_ : kNoneLeft;
  }

  void finish_all() {
    while (next_ < rows_) finish_next();
  }

  int wait = kNoneLeft;  // instructions until a row is due

 private:
  INLINE void finish_next() { row_(product_, from_, next_++); }

  alignas(64) int32_t sums_[2][kMostAmxRows * kStride];
  ChannelProduct product_;
  Row row_ = nullptr;
  const int32_t* from_ = nullptr;
  int next_ = 0, rows_ = 0, room_ = 0, every_ = 1;
};

// Some words along K of a product: its sums of the words before, null for none, and where they go, null to be finished.
// Rows of them lie ChannelFinish::kStride apart.
struct ChannelPiece {
  ptrdiff_t word, words;
  const int32_t* from;
  int32_t* to;
};

// The same to the bit as multiply_channel_tile where words fill AMX's registers, stored when the finishing goes on or
// ends; in an AmxScope of amx_shapes(rows, kAmxWords). Two tiles of rows may take panels from the second cache.
void multiply_channel_amx(const ChannelProduct& product, const AmxRows& rows, int panels, AmxReuse reuse,
                          ChannelFinish& finishing, const ChannelPiece& piece);

}  // namespace rootgraft

#endif
