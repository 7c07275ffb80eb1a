// Arranges packed blocks by columns.
#include "gguf/block_rows.h"

#include "simd/parallel.h"

using namespace rootgraft;

namespace {

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct ArrangeBlocks {
  uint32_t* panels;  // changed in place
  uint16_t* scales;  // the same, for kSymmetric
  int64_t blocks;
  Format format;     // format in which they were packed; words of super-blocks are like those of other blocks
  int64_t threads;
};

// The number of a column at a place along K, in four or eight bits.
uint32_t nibble_at(const uint32_t* block, int column, int place) {
  constexpr int kHalf = kBlockValues / 2;
  return block[place % kHalf / kWordBytes * kWidth + column] >> (8 * (place % kWordBytes) + (place < kHalf ? 0 : 4)) & 15;
}
uint32_t byte_at(const uint32_t* block, int column, int place) {
  return block[place / kWordBytes * kWidth + column] >> 8 * (place % kWordBytes) & 255;
}

void arrange_nibbles(uint32_t* block) {
  uint16_t halves[4][kBlockValues] = {};
  for (int column = 0; column < kWidth; column++) {
    for (int k = 0; k < kBlockValues; k++) halves[column / 4][k] |= nibble_at(block, column, k) << 4 * (column % 4);
  }
  std::memcpy(block, halves, sizeof(halves));
}

void arrange_bytes(uint32_t* block) {
  uint8_t bytes[4][kBlockValues][4];
  for (int column = 0; column < kWidth; column++) {
    for (int k = 0; k < kBlockValues; k++) bytes[column / 4][k][column % 4] = (uint8_t)byte_at(block, column, k);
  }
  std::memcpy(block, bytes, sizeof(bytes));
}

#if ROOTGRAFT_AMX
// Converts the numbers of a block from planes or nibbles to fields.
template <Format F>
void arrange_fields(uint32_t* block) {
  using Fields = RowFields<F>;
  using Lane = std::conditional_t<Fields::kLane == 16, uint16_t, uint32_t>;
  constexpr int kLow = kLowBits<F>, kTop = kTopBits<F>;
  uint32_t numbers[kBlockValues][kWidth];
  for (int k = 0; k < kBlockValues; k++) {
    const int four = k / kWordBytes, byte = 8 * (k % kWordBytes);
    for (int column = 0; column < kWidth; column++) {
      if constexpr (kIsPlanes<F>) {
        numbers[k][column] = block[four % kLow * kWidth + column] >> (byte + four / kLow * kLow) & ((1u << kLow) - 1);
        if constexpr (kTop > 0) {
          const uint32_t top = block[(kLow + four % kTop) * kWidth + column] >> (byte + four / kTop * kTop);
          numbers[k][column] |= (top & ((1u << kTop) - 1)) << kLow;
        }
      } else {
        numbers[k][column] = nibble_at(block, column, k);
      }
    }
  }
  Lane lanes[kPanelWords<F> * sizeof(uint32_t) / sizeof(Lane)] = {};
  for (int column = 0; column < kWidth; column++) {
    for (int k = 0; k < kBlockValues; k++) {
      Fields::for_parts(column, k, [&](int lane, int bit, int up, int bits) {
        lanes[lane] |= (Lane)((numbers[k][column] >> up & ((1u << bits) - 1)) << bit);
      });
    }
  }
  std::memcpy(block, lanes, sizeof(lanes));
}
#endif

// Replaces numbers with a scale of zero by numbers 8 with a scale of one: products convert bits of the scale to
// exponents.
void write_zeros(uint32_t* block, uint16_t* scales) {
  constexpr uint16_t kOne = 0x3C00;
  for (int column = 0; column < kWidth; column++) {
    if (scales[column] & 0x7FFF) continue;
    scales[column] = kOne;
    for (int i = 0; i < kBlockWords / 2; i++) block[i * kWidth + column] = 0x88888888;
  }
}

}  // namespace

extern "C" int arrange_blocks(const ArrangeBlocks* op) {
  with_block_format(op->format, [&](auto format) {
    constexpr Format F = format.value;
    if constexpr (kIsByRows<F>) return;
    parallel_ranges((int)op->threads, op->blocks, [&](int64_t i, int64_t end) {
      for (; i < end; i++) {
        uint32_t* block = op->panels + i * kPanelWords<F>;
#if ROOTGRAFT_AMX
        if constexpr (kIsPlanes<F> || kIsTable<F>) {
          arrange_fields<F>(block);
          continue;
        }
#endif
        if constexpr (kIsSymmetric<F>) write_zeros(block, op->scales + i * kPanelScales<F>);
        (kIsNibbles<F> ? arrange_nibbles : arrange_bytes)(block);
      }
    });
  });
  return 0;
}

extern "C" int64_t arrange_blocks_size() { return sizeof(ArrangeBlocks); }

// Whether products with blocks arranged by columns are faster on this CPU.
extern "C" int arranges_blocks() { return has_amx(); }
