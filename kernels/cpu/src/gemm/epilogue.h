// Epilogues of a linear op, called tile by tile: `Stored` or `Searched`, passed as the op's template argument Out.
//
//   place   returns where a tile's sums go: `room`, rows of fp32 kRoomStride apart, or the output itself
//   take    processes the sums of a tile
//   finish  is called after the last tile
#pragma once

#include <algorithm>

#include "gemm/argmax.h"
#include "gemm/tile.h"

namespace rootgraft {

constexpr int kRoomStride = 4 * kWidth;  // row length of the widest tile

// Rounds sums into the output, after adding a bias [columns] of type Bias if there is one. A whole tile without a bias
// is stored to the output directly: storing sums to memory in between took a tenth of the time of products of bytes
// (Zen 4).
template <class Bias, class To>
class Stored {
 public:
  template <class Op>
  Stored(const Op& op, int64_t)
      : out_(static_cast<Value*>(op.out)),
        bias_(static_cast<const typename Bias::Value*>(static_cast<const void*>(op.bias))),
        columns_(op.columns) {}

  TileRows place(float* room, const TileSpan& tile) const {
    if (!stays(tile)) return {room, kRoomStride};
    return {out_ + tile.row * columns_ + tile.panel * kWidth, columns_, To::kPerWord == Bf16::kPerWord};
  }

  void take(int64_t, const float* sums, const TileSpan& tile) {
    if (stays(tile)) return;
    const int64_t column = tile.panel * kWidth;
    const int columns = (int)std::min<int64_t>(tile.panels * kWidth, columns_ - column);
    for (int m = 0; m < tile.rows; m++, sums += kRoomStride) {
      Value* out = out_ + (tile.row + m) * columns_ + column;
      int i = 0;
      for (; i + kWidth <= columns; i += kWidth) {
        const Floats sum = load(sums + i);
        To::store(out + i, bias_ ? sum + Bias::load(bias_ + column + i) : sum);
      }
      for (; i < columns; i++) out[i] = To::narrow(bias_ ? sums[i] + Bias::widen(bias_[column + i]) : sums[i]);
    }
  }

  void finish() {}

 private:
  using Value = typename To::Value;

  bool stays(const TileSpan& tile) const { return !bias_ && (tile.panel + tile.panels) * kWidth <= columns_; }

  Value* out_;
  const typename Bias::Value* bias_;
  int64_t columns_;
};

// Finds the maximum of each row, after adding a bias, while the sums are in the first cache.
template <class Bias>
class Searched {
 public:
  template <class Op>
  Searched(const Op& op, int64_t parts)
      : value_(static_cast<float*>(op.out)),
        at_(op.at),
        bias_(static_cast<const typename Bias::Value*>(static_cast<const void*>(op.bias))),
        largest_(op.columns, op.rows, parts) {}

  TileRows place(float* room, const TileSpan&) const { return {room, kRoomStride}; }

  void take(int64_t part, const float* sums, const TileSpan& tile) {
    largest_.template take<Bias>(part, sums, kRoomStride, tile.row, tile.rows, tile.panel, tile.panels, bias_);
  }

  void finish() { largest_.write(value_, at_); }

 private:
  float* value_;
  int64_t* at_;
  const typename Bias::Value* bias_;
  LargestColumns largest_;
};

}  // namespace rootgraft
