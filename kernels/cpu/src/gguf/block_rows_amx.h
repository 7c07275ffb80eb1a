// Products by AMX of a few rows of bf16 with blocks that are arranged by columns (block_rows.h).
#pragma once

#include <vector>

#include "gemm/epilogue.h"
#include "gemm/gate.h"
#include "gemm/tile_amx.h"
#include "gguf/block_rows.h"
#include "gguf/widening.h"
#include "simd/partition.h"

#if ROOTGRAFT_AMX

namespace rootgraft {

constexpr int kMostBlockRows = kAmxSums * kAmxRows;  // limit of rows of x

// Rows of x as columns of AMX's second operand: 16 of them side by side, K downwards. A single row needs no
// rearrangement.
class RowPanels {
 public:
  RowPanels(const uint32_t* x, int rows, int64_t words)
      : tiles((rows + kAmxRows - 1) / kAmxRows), side(rows == 1 ? 1 : kAmxRows), words_(words), first_(x) {
    if (rows == 1) return;
    static thread_local std::vector<Words> room;
    if ((int64_t)room.size() < tiles * words) room.resize(tiles * words);
    auto* to = reinterpret_cast<uint32_t*>(room.data());
    for (int tile = 0; tile < tiles; tile++) {
      const uint32_t* each[kAmxRows];
      for (int i = 0; i < kAmxRows; i++) each[i] = x + std::min(tile * kAmxRows + i, rows - 1) * words;
      transpose_rows(each, (int)words, to + tile * words * kAmxRows);
    }
    first_ = to;
  }

  const uint32_t* at(int tile, int64_t block) const { return first_ + (tile * words_ + block * kAmxWords) * side; }
  ptrdiff_t stride() const { return side * sizeof(uint32_t); }

  AmxShapes shapes() const {
    AmxShapes shapes;
    for (int i = 0; i < kAmxSums; i++) shapes.set(i, kWidth, side);
    for (int i = 0; i < 2; i++) shapes.set(kAmxA + i, kWidth, kAmxWords), shapes.set(kAmxB + i, kAmxWords, side);
    return shapes;
  }

  const int tiles, side;

 private:
  int64_t words_;
  const uint32_t* first_;
};

// Number of blocks that are prefetched before they are used, from the second cache, into which they were prefetched
// before. With a larger number, the first cache's few fill buffers would be occupied by lines still on their way from
// memory.
constexpr int kAheadRows = 4;

// Panels that are prefetched while others are multiplied, see Streams.
class NextPanels {
 public:
  static constexpr int64_t kBytes = 64 << 10;  // bytes that are prefetched at a time

  NextPanels() = default;  // no panels

  // `blocks` blocks from `first` on and, if there are two halves, as many from `second` on. Of each block: `lines`
  // lines, and `scales` half-precision scales.
  NextPanels(const BlockPlace& first, const BlockPlace& second, int halves, int64_t blocks, int lines, int scales)
      : scales_{first.scales, second.scales},
        length_(blocks * lines * halves / kStreams),
        halves_(halves),
        lines_(lines),
        block_scales_(scales) {
    const int of_half = kStreams / halves;
    for (int i = 0; i < kStreams; i++) {
      streams_[i] = (i < of_half ? first : second).words + i % of_half * length_ * kWidth;
    }
  }

  // Prefetches the share of one block.
  INLINE void ask() {
    const uint64_t all = kStreams * length_, end = std::min(at_ + lines_, all);
    if (at_ == all) return;
    for (; at_ < end; at_++) __builtin_prefetch(streams_[at_ % kStreams] + at_ / kStreams * kWidth, 0, 2);
    __builtin_prefetch(scales_[half_], 0, 2);
    scales_[half_] += block_scales_;
    half_ = halves_ - 1 - half_;
  }

 private:
  static constexpr int kStreams = 4;

  const uint32_t* streams_[kStreams] = {};
  const uint16_t* scales_[2] = {};
  uint64_t length_ = 0, at_ = 0;  // length_: lines of a stream; at_: lines prefetched so far
  int halves_ = 1, half_ = 0, lines_ = 0, block_scales_ = 0;
};

// Multiplies rows of x with the panels of a part, one panel after the other.
class BlockRowsPart {
 public:
  // Whether a part has few enough rows of bf16, and its blocks are arranged by columns.
  static bool takes(const QuantisedLinear& op, const ProductPart& part) {
    return is_by_rows(op.format) && op.is_bf16 && has_amx() && part.row_count() <= kMostBlockRows;
  }

  BlockRowsPart(const QuantisedLinear& op, const ProductPart& part)
      : op_(op),
        part_(part),
        blocks_(op.width / kBlockValues),
        x_(static_cast<const uint32_t*>(op.x) + part.row * (op.width / Bf16::kPerWord), part.row_count(),
           op.width / Bf16::kPerWord) {}

  template <class Out>
  void multiply(Out& out) {
    alignas(64) float room[kMostBlockRows * kRoomStride];
    for_sums(1, [&](int64_t panel, int, const float* sums) {
      const TileSpan tile = {part_.row, panel, part_.row_count(), 1};
      const TileRows to = out.place(room, tile);
      for (int row = 0; row < tile.rows; row++) {
        const Floats one[1][1] = {{load(sums + row * kWidth)}};
        to.right(row * to.stride).store(one);
      }
      out.take(part_.index, room, tile);
    });
  }

  template <class Act>
  void multiply_gated() {
    alignas(64) uint16_t gates[kMostBlockRows][kWidth], factor[kWidth];
    auto* out = static_cast<uint16_t*>(op_.out) + part_.row * op_.out_columns();
    for_sums(2, [&](int64_t panel, int half, const float* sums) {
      for (int row = 0; row < part_.row_count(); row++) {
        Bf16::store(half ? factor : gates[row], load(sums + row * kWidth));
        if (half) store_gated<Bf16, Act>(gates[row], factor, out + row * op_.out_columns() + panel * kWidth);
      }
    });
  }

 private:
  // Calls f(panel, half, sums [rows][16]) for all panels and halves of the weight, each while the next sums are
  // computed.
  template <class Fn>
  void for_sums(int halves, Fn f) {
    const AmxScope scope(x_.shapes());
    halves_ = halves;
    const int64_t count = part_.panel_count() * halves;
    const auto finish = [&](int64_t i) {
      const uint32_t(*columns)[kTileSums] = columns_[i % 2];
      if (x_.side > 1) transpose(columns);
      f(part_.panel + i / halves, (int)(i % halves), reinterpret_cast<const float*>(x_.side > 1 ? rows_[0] : columns[0]));
    };
    const Sum sum = sum_of_format();
    for (int64_t i = 0; i < count; i++) {
      (this->*sum)(i);
      if (i) finish(i - 1);
    }
    finish(count - 1);
  }

  // Computes the sums of a panel. Panels are counted over both halves of the weight.
  using Sum = void (BlockRowsPart::*)(int64_t i);

  Sum sum_of_format() const {
    Sum found = nullptr;
    with_block_format(op_.format, [&](auto format) {
      constexpr Format F = format.value;
      if constexpr (kIsByRows<F>) {
        with_constant<kAmxSums>(x_.tiles, [&](auto tiles) { found = &BlockRowsPart::sum_panel<F, tiles.value>; });
      }
    });
    return found;
  }

  template <Format F>
  BlockPlace place(int64_t i) const {
    const int64_t panel = part_.panel + i / halves_ + i % halves_ * (op_.out_columns() / kWidth);
    return block_place<F>(op_.panels, static_cast<const uint16_t*>(op_.scales), panel * blocks_);
  }

  // Called before panel i: sets the panels that are prefetched meanwhile, which are some of the following ones.
  template <Format F>
  void ask_beside(int64_t i) {
    const int64_t bytes = blocks_ * kPanelWords<F> * sizeof(uint32_t) * halves_;
    const int64_t group = std::max<int64_t>(1, NextPanels::kBytes / bytes) * halves_, from = i + group;
    if (i % group) return;
    const int64_t panels = std::min(group, part_.panel_count() * halves_ - from) / halves_;
    others_ = {};
    if (panels > 0) {
      others_ = {place<F>(from), place<F>(from + 1), halves_, panels * blocks_, kPanelLines<F>, kBlockHalves<F>};
    }
  }

  // A block is widened while AMX multiplies an earlier one, not the last one, because loading a tile waits for stores.
  template <Format F, int R>
  void sum_panel(int64_t i) {
    ask_beside<F>(i);
    BlockPlace place = this->place<F>(i);
    uint32_t(*columns)[kTileSums] = columns_[i % 2];
    NextPanels others = others_;  // a local copy, which no store can change
    const auto multiply = [&](int64_t block) {
      amx_load<kAmxA>(widened_[block % (kWait + 1)], kAmxWords * sizeof(uint32_t));
      for_constants<R>([&](auto tile) {
        amx_load<kAmxB + tile.value % 2>(x_.at(tile.value, block), x_.stride());
        amx_dot_bf16<tile.value, kAmxA, kAmxB + tile.value % 2>();
      });
    };
    for_constants<R>([](auto tile) { amx_zero<tile.value>(); });
    const uint32_t* words = place.words;
    factors_[0].take(next_block<F>(place));
    for (int64_t block = 0; block < blocks_; block++, words += kPanelWords<F>) {
      if (block + 1 < blocks_) {
        prefetch_block<F>(place, kAheadRows);
        others.ask();
        factors_[(block + 1) % 2].take(next_block<F>(place));
      }
      if (block >= kWait) multiply(block - kWait);
      widen_rows<F>(words, factors_[block % 2], widened_[block % (kWait + 1)]);
    }
    for (int64_t block = std::max<int64_t>(0, blocks_ - kWait); block < blocks_; block++) multiply(block);
    for_constants<R>([&](auto tile) { amx_store<tile.value>(columns[tile.value], x_.stride()); });
    others_ = others;
  }

  void transpose(const uint32_t (*columns)[kTileSums]) {
    for (int tile = 0; tile < x_.tiles; tile++) {
      const uint32_t* each[kWidth];
      for (int i = 0; i < kWidth; i++) each[i] = columns[tile] + i * kAmxRows;
      transpose_rows(each, kAmxRows, rows_[tile]);
    }
  }

  static constexpr int kWait = 3;  // blocks that are widened and not multiplied yet

  const QuantisedLinear& op_;
  const ProductPart& part_;
  const int64_t blocks_;
  const RowPanels x_;
  int halves_ = 1;  // halves of the weight
  NextPanels others_;
  RowFactors factors_[2];
  alignas(64) uint32_t widened_[kWait + 1][kRowWords];
  alignas(64) uint32_t columns_[2][kAmxSums][kTileSums];  // sums as AMX computes them: rows of x side by side
  alignas(64) uint32_t rows_[kAmxSums][kTileSums];
};

}  // namespace rootgraft

#endif
