// Products of bytes with a scale for each row, by AMX. Rows are finished while the next product is computed.
#pragma once

#include "gemm/tile_amx.h"
#include "int8/int8_tile.h"

#if ROOTGRAFT_AMX

namespace rootgraft {

// Finishes the rows of a product while AMX multiplies the next one, which leaves the vector units idle.
class ChannelFinish {
 public:
  static constexpr int kStride = kAmxPanels * kWidth;  // sums from row to row
  static constexpr int kNoneLeft = 1 << 30;
  using Row = void (*)(const ChannelProduct& product, const int32_t* sums, int row);

  ~ChannelFinish() { finish_all(); }

  // Returns the memory for the sums of the product that is computed now.
  int32_t* room() { return sums_[room_]; }

  // Called when these sums are complete: from the next product on they are finished and written to product.c. The next
  // product has `products` multiplying instructions.
  void begin(const ChannelProduct& product, int rows, int panels, ptrdiff_t products);

  // Finishes a row. Returns the number of multiplying instructions before the next row is due.
  INLINE int finish_one() {
    if (next_ < rows_) finish_next();
    return next_ < rows_ ? every_ : kNoneLeft;
  }

  void finish_all() {
    while (next_ < rows_) finish_next();
  }

  int wait = kNoneLeft;  // number of instructions until a row is due

 private:
  INLINE void finish_next() { row_(product_, from_, next_++); }

  alignas(64) int32_t sums_[2][kMostAmxRows * kStride];
  ChannelProduct product_;
  Row row_ = nullptr;
  const int32_t* from_ = nullptr;
  int next_ = 0, rows_ = 0, room_ = 0, every_ = 1;
};

// Some words along K of a product. `from`: its sums over the words before, null for none. `to`: where its own sums are
// written, null if they are to be finished. The rows of these sums are ChannelFinish::kStride apart.
struct ChannelPiece {
  ptrdiff_t word, words;
  const int32_t* from;
  int32_t* to;
};

// Gives the same bits as multiply_channel_tile if the words fill AMX's registers. Results are stored when the finishing
// continues or ends. To be called in an AmxScope of amx_shapes(rows, kAmxWords). Two tiles of rows may take panels from
// the second cache.
void multiply_channel_amx(const ChannelProduct& product, const AmxRows& rows, int panels, AmxReuse reuse,
                          ChannelFinish& finishing, const ChannelPiece& piece);

}  // namespace rootgraft

#endif
