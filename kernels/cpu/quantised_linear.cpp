// y = x W^T + b with W in four or eight bits and x quantised to 8 or 15 on the way in; sums of products are integers.
#include <algorithm>
#include <new>
#include <vector>

#include "byte_tile.h"
#include "parallel.h"
#include "quantise.h"
#include "tile.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 15;          // multiplications below which one thread is faster
constexpr int64_t kSmallRows = 1 << 14;      // the same, for values to quantise
constexpr int64_t kSlicePanels = 16;         // at least in a slice, where several are cut for a thread
constexpr int64_t kMostSlices = 8;           // for each thread
constexpr int kNoMemory = 2;

// The call, as the caller packs it: fields of 8 bytes in this order.
struct QuantisedLinear {
  const void* x;           // [rows][width]
  const uint32_t* panels;  // see Format
  const void* scales;
  const float* bias;       // [columns] or null
  void* out;               // [rows][columns], of x's type or fp32
  int64_t rows, columns, width;
  Format format;
  int64_t planes;  // of x
  int64_t is_bf16, out_is_bf16, threads;

  int64_t blocks() const { return format == Format::kChannels ? 1 : width / kBlockValues; }
  int64_t words() const { return format == Format::kChannels ? (width + kWordBytes - 1) / kWordBytes : kBlockWords; }
  // Of a panel, in words and in elements of the scales.
  int64_t panel_words() const { return blocks() * words() * kWidth / (format == Format::kNibbles ? 2 : 1); }
  int64_t panel_scales() const { return blocks() * kWidth * (format == Format::kNibbles ? 2 : 1); }
};

// x as A of the products.
struct QuantisedRows {
  int64_t planes, stride, blocks;  // of a row; words and blocks of a plane
  std::vector<uint32_t> words;
  std::vector<float> scales, offsets;
  std::vector<int32_t> sums;

  template <class E>
  void fill(const QuantisedLinear& op) {
    planes = op.planes;
    blocks = op.blocks();
    stride = (op.width + kWidth - 1) / kWidth * (kWidth / kWordBytes);
    words.resize(op.rows * planes * stride);
    scales.resize(op.rows * blocks);
    offsets.resize(op.rows * blocks);
    sums.resize(op.rows * planes * blocks);
    const int threads = op.rows * op.width < kSmallRows ? 1 : (int)op.threads;
    parallel_ranges(threads, op.rows, [&](int64_t row, int64_t end) {
      for (; row < end; row++) planes == 1 ? fill_row<E, 1>(op, row) : fill_row<E, 2>(op, row);
    });
  }

 private:
  // Not inlined, so that the size of a block is known where its loops are compiled.
  template <class E, int kPlanes>
  __attribute__((noinline)) void fill_row(const QuantisedLinear& op, int64_t row) {
    const auto* from = static_cast<const typename E::Value*>(op.x) + row * op.width;
    if (op.format == Format::kChannels) return fill_block<E, kPlanes>(from, op.width, row, 0);
    for (int64_t i = 0; i < blocks; i++) fill_block<E, kPlanes>(from + i * kBlockValues, kBlockValues, row, i);
  }

  template <class E, int kPlanes>
  INLINE void fill_block(const typename E::Value* from, int64_t count, int64_t row, int64_t block) {
    int8_t* to[kPlanes];
    int32_t totals[kPlanes];
    for (int i = 0; i < kPlanes; i++) {
      to[i] = reinterpret_cast<int8_t*>(&words[(row * kPlanes + i) * stride]) + block * kBlockValues;
    }
    const int64_t at = row * blocks + block;
    scales[at] = quantise_block<E, kPlanes>(from, count, to, totals);
    int32_t total = 0;
    for (int i = 0; i < kPlanes; i++) {
      sums[(row * kPlanes + i) * blocks + block] = totals[i];
      total = total * (1 << kPlaneBits) + totals[i];
    }
    offsets[at] = scales[at] * (float)total;
  }
};

template <class To>
void store_tile(const QuantisedLinear& op, const float* sums, int64_t row, int rows, int64_t column, int columns) {
  for (int m = 0; m < rows; m++, sums += kBytePanels * kWidth) {
    auto* out = static_cast<typename To::Value*>(op.out) + (row + m) * op.columns + column;
    const float* bias = op.bias + column;
    int i = 0;
    for (; i + kWidth <= columns; i += kWidth) {
      const Floats sum = load(sums + i);
      To::store(out + i, op.bias ? sum + load(bias + i) : sum);
    }
    for (; i < columns; i++) out[i] = To::narrow(op.bias ? sums[i] + bias[i] : sums[i]);
  }
}

// Rows [row, row_end) times panels [panel, panel_end).
template <Format F, int kPlanes, class To>
void multiply_block(const QuantisedLinear& op, const QuantisedRows& x, int64_t row, int64_t row_end, int64_t panel,
                    int64_t panel_end) {
  constexpr int kScaleBytes = F == Format::kChannels ? sizeof(float) : sizeof(uint16_t);
  const int64_t panel_words = op.panel_words(), panel_scales = op.panel_scales();
  const char* scales = static_cast<const char*>(op.scales);
  alignas(64) float sums[kByteRows * kBytePanels * kWidth];
  for_tiles<kByteRows / kPlanes, kBytePanels>(
      (int)(row_end - row), (int)(panel_end - panel), [&](int m, int rows, int p, int panels) {
        const int64_t a = row + m, b = panel + p, column = b * kWidth;
        multiply_byte_tile<F, kPlanes>(
            {&x.words[a * kPlanes * x.stride], x.stride, &x.scales[a * x.blocks], &x.offsets[a * x.blocks],
             &x.sums[a * kPlanes * x.blocks], op.panels + b * panel_words, panel_words,
             scales + b * panel_scales * kScaleBytes, panel_scales, x.blocks, op.words(), sums, kBytePanels * kWidth},
            rows, panels);
        const int columns = (int)std::min<int64_t>(panels * kWidth, op.columns - column);
        store_tile<To>(op, sums, a, rows, column, columns);
      });
}

template <Format F, int kPlanes, class To>
void run(const QuantisedLinear& op, const QuantisedRows& x) {
  const int64_t panels = (op.columns + kWidth - 1) / kWidth;
  const int threads = op.rows * op.width * op.columns < kSmall ? 1 : (int)op.threads;
  // As for other linears: several slices for each thread, but one where the panels are only streamed; and rows are cut
  // too where there are few panels.
  const int64_t each = op.rows <= kByteRows / kPlanes ? 1 : panels / (kSlicePanels * threads);
  const int64_t slices = threads == 1 ? 1 : threads * std::clamp<int64_t>(each, 1, kMostSlices);
  const int64_t wanted = 2 * threads / std::max<int64_t>(1, panels / kBytePanels);
  const int64_t row_cuts = std::max<int64_t>(1, std::min<int64_t>(op.rows / 48, wanted));
  parallel_items(threads, row_cuts * slices, [&](int64_t item) {
    const int64_t cut = item / slices, slice = item % slices;
    multiply_block<F, kPlanes, To>(op, x, op.rows * cut / row_cuts, op.rows * (cut + 1) / row_cuts,
                                   panels * slice / slices, panels * (slice + 1) / slices);
  });
}

template <Format F, class To>
void run_blocks(const QuantisedLinear& op, const QuantisedRows& x) {
  if (op.planes == 1) run<F, 1, To>(op, x);
  else run<F, 2, To>(op, x);
}

template <class To>
void run_format(const QuantisedLinear& op, const QuantisedRows& x) {
  switch (op.format) {
    case Format::kNibbles: return run_blocks<Format::kNibbles, To>(op, x);
    case Format::kBytes: return run_blocks<Format::kBytes, To>(op, x);
    case Format::kChannels: return run<Format::kChannels, 1, To>(op, x);
  }
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int quantised_linear(const QuantisedLinear* op) try {
  static thread_local QuantisedRows x;
  with_types([&](auto element, auto out_element) {
    x.fill<decltype(element)>(*op);
    run_format<decltype(out_element)>(*op, x);
  }, op->is_bf16, op->out_is_bf16);
  return 0;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

extern "C" int64_t quantised_linear_size() { return sizeof(QuantisedLinear); }
