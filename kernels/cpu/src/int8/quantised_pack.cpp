// Packs quantised weights in panels of 16 columns, and dequantises rows.
#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "gguf/block_numbers.h"
#include "gguf/block_tile.h"
#include "simd/parallel.h"
#include "int8/quantise.h"
#include "gemm/tile.h"

namespace rootgraft {
namespace {

constexpr uint32_t kBias = 0x80808080u;  // 128 in each byte
constexpr int kRefused = 1, kNoMemory = 2;

// Packs blocks of 32 values in ggml's form, or with a zero point in place of the minimum, to panels. Arguments packed
// by Python: fields of 8 bytes in this order.
struct PackBlocks {
  // [columns][blocks] of: half-precision scale; half-precision minimum, for kNibbles and k5Bits; a word of fifth bits,
  // for 5 bits; 16 bytes of nibbles or 32 bytes
  const uint8_t* rows;
  uint32_t* panels;     // [ceil(columns / 16)][blocks][4, 5 or 8][16] words; after the last column it is repeated
  uint16_t* scales;     // [ceil(columns / 16)][blocks][2 or 1][16]
  int64_t columns, blocks;
  Format format;        // kNibbles, kSymmetric, kZeroPoints, kTable, kFloat4, k5Bits, kSymmetric5Bits or kBytes
  int64_t threads;

  bool has_fifth() const { return format == Format::k5Bits || format == Format::kSymmetric5Bits; }
  int words() const { return format == Format::kBytes ? kBlockWords : kBlockWords / 2 + has_fifth(); }
  int halves() const {
    return format == Format::kNibbles || format == Format::kZeroPoints || format == Format::k5Bits ? 2 : 1;
  }
  int64_t block_bytes() const { return halves() * sizeof(uint16_t) + words() * kWordBytes; }
};

// Moves bit 4 i + j of a word to bit i of byte j.
uint32_t by_fours(uint32_t bits) {
  uint32_t result = 0;
  for (int place = 0; place < kBlockValues; place++) {
    result |= (bits >> place & 1) << (8 * (place % kWordBytes) + place / kWordBytes);
  }
  return result;
}

// Writes lane `lane` of a panel. Returns false if a scale or a minimum is not finite.
bool pack_column(const PackBlocks& op, const uint8_t* from, int lane, uint32_t* panel, uint16_t* scales) {
  const int words = op.words(), halves = op.halves();
  bool finite = true;
  for (int64_t block = 0; block < op.blocks; block++) {
    for (int i = 0; i < halves; i++, from += sizeof(uint16_t), scales += kWidth) {
      scales[lane] = load_as<uint16_t>(from);
      finite &= (scales[lane] & 0x7C00) != 0x7C00;
    }
    if (op.has_fifth()) {
      panel[kBlockWords / 2 * kWidth + lane] = by_fours(load_as<uint32_t>(from));
      from += kWordBytes;
    }
    for (int i = 0; i < words - op.has_fifth(); i++, from += kWordBytes, panel += kWidth) {
      panel[lane] = load_as<uint32_t>(from) ^ (op.format == Format::kBytes ? kBias : 0);
    }
    if (op.has_fifth()) panel += kWidth;
  }
  return finite;
}

// Quantises a matrix to signed bytes, with a scale for each row. Arguments packed by Python.
struct PackChannels {
  const void* weight;  // [columns][width]
  uint32_t* panels;    // [ceil(columns / 16)][ceil(width / 4)][16] words
  float* scales;       // [ceil(columns / 16)][16]
  int64_t columns, width, is_bf16, threads;
};

template <class E>
void pack_channels_panel(const PackChannels& op, int64_t panel) {
  const int64_t words = (op.width + kWordBytes - 1) / kWordBytes, stride = (words + 3) / 4 * 4;
  std::vector<uint32_t> bytes(kWidth * stride);
  const uint32_t* rows[kWidth];
  for (int i = 0; i < kWidth; i++) {
    const int64_t row = std::min(panel * kWidth + i, op.columns - 1);
    const auto* from = static_cast<const typename E::Value*>(op.weight) + row * op.width;
    int32_t total[1];
    auto* to = reinterpret_cast<int8_t*>(&bytes[i * stride]);
    op.scales[panel * kWidth + i] = quantise_block<E>(from, op.width, {to}, total);
    rows[i] = &bytes[i * stride];
  }
  uint32_t* out = op.panels + panel * words * kWidth;
  transpose_rows(rows, (int)words, out);
  for (int64_t i = 0; i < words * kWidth; i++) out[i] ^= kBias;
}

// Converts rows of the weight to numbers. Arguments packed by Python.
struct QuantisedRows {
  const int64_t* ids;      // [count]
  const uint32_t* panels;  // see Format
  const void* scales;
  float* out;              // [count][width]
  int64_t count, columns, width;
  Format format;
  int64_t threads;
};

// Writes the numbers of a lane, block by block.
template <Format F>
void read_blocks(const QuantisedRows& op, int64_t panel, int64_t lane, float* out) {
  const int64_t blocks = op.width / kBlockValues;
  BlockPlace place = block_place<F>(op.panels, static_cast<const uint16_t*>(op.scales), panel * blocks);
  for (int64_t block = 0; block < blocks; block++, out += kBlockValues) {
    store_column(next_block<F>(place), (int)lane, out);
  }
}

void read_channel(const QuantisedRows& op, int64_t panel, int64_t lane, float* out) {
  const int64_t words = (op.width + kWordBytes - 1) / kWordBytes;
  const uint32_t* from = op.panels + panel * words * kWidth + lane;
  const float scale = static_cast<const float*>(op.scales)[panel * kWidth + lane];
  for (int64_t i = 0; i < op.width; i++) {
    const uint32_t byte = from[i / kWordBytes * kWidth] >> 8 * (i % kWordBytes) & 0xFF;
    out[i] = scale * (float)((int32_t)byte - 128);
  }
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int pack_blocks(const PackBlocks* op) {
  std::atomic<bool> finite{true};
  parallel_ranges((int)op->threads, (op->columns + kWidth - 1) / kWidth, [&](int64_t panel, int64_t end) {
    const int64_t row_bytes = op->blocks * op->block_bytes();
    for (; panel < end; panel++) {
      uint32_t* words = op->panels + panel * op->blocks * op->words() * kWidth;
      uint16_t* scales = op->scales + panel * op->blocks * op->halves() * kWidth;
      for (int i = 0; i < kWidth; i++) {
        const int64_t row = std::min(panel * kWidth + i, op->columns - 1);
        if (!pack_column(*op, op->rows + row * row_bytes, i, words, scales)) finite = false;
      }
    }
  });
  return finite ? 0 : kRefused;
}

extern "C" int64_t pack_blocks_size() { return sizeof(PackBlocks); }

extern "C" int pack_channels(const PackChannels* op) {
  std::atomic<bool> has_memory{true};
  with_types([&](auto element) {
    parallel_ranges((int)op->threads, (op->columns + kWidth - 1) / kWidth, [&](int64_t panel, int64_t end) {
      try {
        for (; panel < end; panel++) pack_channels_panel<decltype(element)>(*op, panel);
      } catch (const std::bad_alloc&) {
        has_memory = false;
      }
    });
  }, op->is_bf16);
  return has_memory ? 0 : kNoMemory;
}

extern "C" int64_t pack_channels_size() { return sizeof(PackChannels); }

extern "C" int quantised_rows(const QuantisedRows* op) {
  for (int64_t i = 0; i < op->count; i++) {
    if (op->ids[i] < 0 || op->ids[i] >= op->columns) return kRefused;
  }
  parallel_ranges(op->count < 8 ? 1 : (int)op->threads, op->count, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      const int64_t panel = op->ids[i] / kWidth, lane = op->ids[i] % kWidth;
      float* out = op->out + i * op->width;
      if (op->format == Format::kChannels || op->format == Format::kWidened) read_channel(*op, panel, lane, out);
      else with_block_format(op->format, [&](auto format) { read_blocks<format.value>(*op, panel, lane, out); });
    }
  });
  return 0;
}

extern "C" int64_t quantised_rows_size() { return sizeof(QuantisedRows); }
