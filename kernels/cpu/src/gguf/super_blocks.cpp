// Packing of super-blocks in panels of 16 columns.
#include "gguf/block_numbers.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int kRefused = 1;

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct PackSuperBlocks {
  const uint8_t* rows;  // [columns][supers] in one of ggml's types
  uint32_t* panels;     // [ceil(columns / 16)][supers][8][bits][16] words; after the last column it is repeated
  uint16_t* scales;     // [ceil(columns / 16)][supers], see super_blocks.h
  int64_t columns, supers;
  Format format;
  int64_t threads;
};

bool is_finite(uint16_t half) { return (half & 0x7C00) != 0x7C00; }

// The place of a super-block of a column in the panels.
template <Format F>
struct SuperColumn {
  uint32_t* panel;
  uint16_t* scales;
  int lane;

  // Stores d, or e as factor 1. Returns false if it is not finite.
  bool put_factor(int i, const uint8_t* from) const {
    const auto half = load_as<uint16_t>(from);
    scales[i * kWidth + lane] = half;
    return is_finite(half);
  }

  // Stores step i of the kStepHalves / 8 steps of a block.
  void put_step(int block, int i, int step) const {
    auto* steps = reinterpret_cast<uint8_t*>(scales + kFactorHalves<F> + block * kStepHalves<F>);
    steps[i * kWidth + lane] = (uint8_t)step;
  }

  // Stores the numbers of a block.
  void put_values(int block, const uint8_t (&value)[kBlockValues]) const {
    constexpr int kBits = bits_of<F>(), kLow = kLowBits<F>, kTop = kTopBits<F>;
    uint32_t words[kBits] = {};
    for (int place = 0; place < kBlockValues; place++) {
      const int four = place / kWordBytes, byte = 8 * (place % kWordBytes);
      words[four % kLow] |= (uint32_t)(value[place] & ((1 << kLow) - 1)) << (byte + four / kLow * kLow);
      if constexpr (kTop > 0) words[kLow + four % kTop] |= (uint32_t)(value[place] >> kLow) << (byte + four / kTop * kTop);
    }
    for (int i = 0; i < kBits; i++) panel[(block * kBits + i) * kWidth + lane] = words[i];
  }
};

// Reads scales and minima of 6 bits from 12 bytes.
template <Format F>
void put_six_bit_steps(const uint8_t* six, const SuperColumn<F>& to) {
  for (int block = 0; block < kSuperBlocks; block++) {
    const int i = block % 4;
    const bool late = block >= 4;
    to.put_step(block, 0, late ? (six[8 + i] & 15) | six[i] >> 6 << 4 : six[i] & 63);
    to.put_step(block, 1, late ? six[8 + i] >> 4 | six[4 + i] >> 6 << 4 : six[4 + i] & 63);
  }
}

// Layout of the file: d and e; scales; 32 bytes for each two blocks, with the first block in the low halves. With 5
// bits, the fifth bits come before them: one bit of 32 bytes holds those of a block.
template <Format F>
bool pack_nibbles(const uint8_t* from, const SuperColumn<F>& to) {
  constexpr bool kFifth = F == Format::kSuper5Bits;
  const uint8_t *top = from + 16, *bytes = top + (kFifth ? kBlockValues : 0);
  put_six_bit_steps(from + 4, to);
  for (int block = 0; block < kSuperBlocks; block++) {
    uint8_t value[kBlockValues];
    for (int k = 0; k < kBlockValues; k++) {
      value[k] = bytes[block / 2 * kBlockValues + k] >> (block % 2 * 4) & 15;
      if (kFifth) value[k] |= (top[k] >> block & 1) << 4;
    }
    to.put_values(block, value);
  }
  const bool first = to.put_factor(0, from), second = to.put_factor(1, from + 2);
  return first && second;
}

// Two bits of the values of a block: 32 bytes hold four blocks, the first one in the lowest bits.
uint8_t pair_at(const uint8_t* from, int block, int k) { return from[block / 4 * kBlockValues + k] >> block % 4 * 2 & 3; }

// Layout: two halves of 128 values, each 64 bytes of low nibbles; 32 bytes of pairs of high bits; a scale for each 16
// values; d.
bool pack_q6_k(const uint8_t* from, const SuperColumn<Format::kSuper6Bits>& to) {
  const uint8_t *low = from, *high = from + 128, *step = from + 192;
  for (int block = 0; block < kSuperBlocks; block++) {
    const int half = block / 4, quarter = block % 4;
    uint8_t value[kBlockValues];
    for (int k = 0; k < kBlockValues; k++) {
      const int nibble = low[half * 64 + quarter % 2 * 32 + k] >> (quarter / 2 * 4) & 15;
      value[k] = (uint8_t)(nibble | pair_at(high, block, k) << 4);
    }
    to.put_values(block, value);
    for (int i = 0; i < 2; i++) to.put_step(block, i, step[2 * block + i]);
  }
  return to.put_factor(0, from + 208);
}

// Layout: the third bits of a block are one bit of 32 bytes; two bits of each value; sixteen scales of 6 bits in 12
// bytes; d.
template <Format F>
bool pack_q3_k(const uint8_t* from, const SuperColumn<F>& to) {
  const uint8_t *low = from + 96, *high = from + 104;
  for (int block = 0; block < kSuperBlocks; block++) {
    uint8_t value[kBlockValues];
    for (int k = 0; k < kBlockValues; k++) value[k] = pair_at(from + 32, block, k) | (from[k] >> block & 1) << 2;
    to.put_values(block, value);
    for (int i = 2 * block; i < 2 * block + 2; i++) {
      to.put_step(block, i % 2, (low[i % 8] >> i / 8 * 4 & 15 | (high[i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    }
  }
  return to.put_factor(0, from + 108);
}

// Layout: sixteen bytes with a scale and a minimum; two bits of each value; d and e.
bool pack_q2_k(const uint8_t* from, const SuperColumn<Format::kSuper2Bits>& to) {
  for (int block = 0; block < kSuperBlocks; block++) {
    uint8_t value[kBlockValues];
    for (int k = 0; k < kBlockValues; k++) value[k] = pair_at(from + 16, block, k);
    to.put_values(block, value);
    for (int i = 0; i < 2; i++) to.put_step(block, i, from[2 * block + i]);
  }
  const bool first = to.put_factor(0, from + 80), second = to.put_factor(1, from + 82);
  return first && second;
}

// Layout: d; eight scales of 6 bits, with the upper two bits in 2 bytes and the lower four in 4 bytes; 16 bytes a
// block.
bool pack_iq4_xs(const uint8_t* from, const SuperColumn<Format::kSuperTable>& to) {
  const auto high = load_as<uint16_t>(from + 2);
  for (int block = 0; block < kSuperBlocks; block++) {
    constexpr int kHalf = kBlockValues / 2;
    const uint8_t* bytes = from + 8 + block * kHalf;
    uint8_t value[kBlockValues];
    for (int k = 0; k < kBlockValues; k++) value[k] = bytes[k % kHalf] >> k / kHalf * 4 & 15;
    to.put_values(block, value);
    to.put_step(block, 0, (from[4 + block / 2] >> block % 2 * 4 & 15 | (high >> 2 * block & 3) << 4) - 32);
  }
  return to.put_factor(0, from);
}

// Layout: f; sixteen scales; 16 bytes for each block. The caller has checked that the numbers are finite.
bool pack_nvfp4(const uint8_t* from, const SuperColumn<Format::kSuperFloat4>& to) {
  for (int block = 0; block < kSuperBlocks; block++) {
    constexpr int kHalf = kBlockValues / 2;
    const uint8_t* bytes = from + 20 + block * kHalf;
    uint8_t value[kBlockValues];
    for (int k = 0; k < kBlockValues; k++) value[k] = bytes[k % kHalf] >> k / kHalf * 4 & 15;
    to.put_values(block, value);
    for (int i = 0; i < 2; i++) to.put_step(block, i, from[4 + 2 * block + i]);
  }
  std::memcpy(to.scales + 2 * to.lane, from, sizeof(float));
  return (load_as<uint32_t>(from) & 0x7F800000u) != 0x7F800000u;
}

template <Format F>
bool pack_column(const uint8_t* from, const SuperColumn<F>& to) {
  if constexpr (F == Format::kSuper6Bits) return pack_q6_k(from, to);
  else if constexpr (F == Format::kSuper3Bits || F == Format::kSuperGrid) return pack_q3_k(from, to);
  else if constexpr (F == Format::kSuper2Bits) return pack_q2_k(from, to);
  else if constexpr (F == Format::kSuperTable) return pack_iq4_xs(from, to);
  else if constexpr (F == Format::kSuperFloat4) return pack_nvfp4(from, to);
  else return pack_nibbles(from, to);
}

// Bytes of a super-block in a file; for kSuperFloat4, in the form that the loader makes.
template <Format F>
constexpr int stored_bytes() {
  switch (F) {
    case Format::kSuper6Bits: return 210;
    case Format::kSuperFloat4: return 148;
    case Format::kSuper5Bits: return 176;
    case Format::kSuper3Bits:
    case Format::kSuperGrid: return 110;
    case Format::kSuper2Bits: return 84;
    case Format::kSuperTable: return 136;
    default: return 144;
  }
}

template <Format F>
bool pack_panel(const PackSuperBlocks& op, int64_t panel) {
  bool finite = true;
  for (int lane = 0; lane < kWidth; lane++) {
    const int64_t column = std::min(panel * kWidth + lane, op.columns - 1);
    for (int64_t i = 0; i < op.supers; i++) {
      const int64_t super = panel * op.supers + i;
      finite &= pack_column<F>(op.rows + (column * op.supers + i) * stored_bytes<F>(),
                               {op.panels + super * kSuperBlocks * kPanelWords<F>, op.scales + super * kSuperHalves<F>, lane});
    }
  }
  return finite;
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int pack_super_blocks(const PackSuperBlocks* op) {
  std::atomic<bool> finite{true};
  with_block_format(op->format, [&](auto format) {
    if constexpr (kIsSuper<format.value> && !kIsByRows<format.value>) {
      parallel_ranges((int)op->threads, (op->columns + kWidth - 1) / kWidth, [&](int64_t panel, int64_t end) {
        for (; panel < end; panel++) {
          if (!pack_panel<format.value>(*op, panel)) finite = false;
        }
      });
    }
  });
  return finite ? 0 : kRefused;
}

extern "C" int64_t pack_super_blocks_size() { return sizeof(PackSuperBlocks); }
