// Packing of super-blocks in panels of 16 columns.
#include "gguf/super_blocks.h"

#include <algorithm>
#include <atomic>

#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int kRefused = 1;

// Argument structure packed by Python: fields of 8 bytes in this order.
struct PackSuperBlocks {
  const uint8_t* rows;  // [columns][supers] of ggml's Q4_K (144 bytes) or Q6_K (210)
  uint32_t* panels;     // [ceil(columns / 16)][supers][8][4 or 8][16] words; past the last column it is repeated
  uint16_t* scales;     // [ceil(columns / 16)][supers], see super_blocks.h
  int64_t columns, supers, is_nibbles, threads;
};

bool is_finite(uint16_t half) { return (half & 0x7C00) != 0x7C00; }

// Puts a word of a column, of bytes b[0] .. b[3].
void put_word(uint32_t* panel, int word, int lane, const uint8_t* b) { panel[word * kWidth + lane] = load_as<uint32_t>(b); }

// d and e; scales of 6 bits in 12 bytes; 32 bytes for two blocks each, the first in low halves.
bool pack_q4_k(const uint8_t* from, int lane, uint32_t* panel, uint16_t* scales) {
  const uint16_t d = load_as<uint16_t>(from), e = load_as<uint16_t>(from + 2);
  const uint8_t *six = from + 4, *bytes = from + 16;
  scales[lane] = d, scales[kWidth + lane] = e;
  auto* steps = reinterpret_cast<uint8_t*>(scales + kFactorHalves<Format::kSuperNibbles>);
  for (int block = 0; block < kSuperBlocks; block++) {
    const int i = block % 4;
    const bool late = block >= 4;
    const int scale = late ? (six[8 + i] & 15) | six[i] >> 6 << 4 : six[i] & 63;
    const int minimum = late ? six[8 + i] >> 4 | six[4 + i] >> 6 << 4 : six[4 + i] & 63;
    steps[block * 2 * kWidth + lane] = (uint8_t)scale;
    steps[(block * 2 + 1) * kWidth + lane] = (uint8_t)minimum;
    uint8_t value[kBlockValues];
    for (int k = 0; k < kBlockValues; k++) value[k] = bytes[block / 2 * kBlockValues + k] >> (block % 2 * 4) & 15;
    uint8_t both[kBlockValues / 2];
    for (int k = 0; k < kBlockValues / 2; k++) both[k] = value[k] | value[kBlockValues / 2 + k] << 4;
    for (int w = 0; w < kBlockWords / 2; w++) put_word(panel, block * kBlockWords / 2 + w, lane, both + w * kWordBytes);
  }
  return is_finite(d) && is_finite(e);
}

// Two halves of 128 values: 64 bytes of low nibbles, 32 bytes of high pairs of bits; a scale for each 16 values; d.
bool pack_q6_k(const uint8_t* from, int lane, uint32_t* panel, uint16_t* scales) {
  const uint8_t *low = from, *high = from + 128, *step = from + 192;
  const uint16_t d = load_as<uint16_t>(from + 208);
  scales[lane] = d;
  auto* steps = reinterpret_cast<uint8_t*>(scales + kFactorHalves<Format::kSuperBytes>);
  for (int i = 0; i < 2 * kSuperBlocks; i++) steps[i * kWidth + lane] = step[i];
  for (int block = 0; block < kSuperBlocks; block++) {
    const int half = block / 4, quarter = block % 4;
    uint8_t value[kBlockValues];
    for (int k = 0; k < kBlockValues; k++) {
      const int nibble = low[half * 64 + quarter % 2 * 32 + k] >> (quarter / 2 * 4) & 15;
      const int pair = high[half * 32 + k] >> (quarter * 2) & 3;
      value[k] = (uint8_t)((nibble | pair << 4) - 32 + 128);
    }
    for (int w = 0; w < kBlockWords; w++) put_word(panel, block * kBlockWords + w, lane, value + w * kWordBytes);
  }
  return is_finite(d);
}

template <Format F>
bool pack_panel(const PackSuperBlocks& op, int64_t panel) {
  constexpr int kBytes = F == Format::kSuperNibbles ? 144 : 210;
  bool finite = true;
  for (int lane = 0; lane < kWidth; lane++) {
    const int64_t column = std::min(panel * kWidth + lane, op.columns - 1);
    for (int64_t i = 0; i < op.supers; i++) {
      const uint8_t* from = op.rows + (column * op.supers + i) * kBytes;
      uint32_t* to = op.panels + (panel * op.supers + i) * kSuperBlocks * kPanelWords<F>;
      uint16_t* scales = op.scales + (panel * op.supers + i) * kSuperHalves<F>;
      finite &= F == Format::kSuperNibbles ? pack_q4_k(from, lane, to, scales) : pack_q6_k(from, lane, to, scales);
    }
  }
  return finite;
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int pack_super_blocks(const PackSuperBlocks* op) {
  std::atomic<bool> finite{true};
  parallel_ranges((int)op->threads, (op->columns + kWidth - 1) / kWidth, [&](int64_t panel, int64_t end) {
    for (; panel < end; panel++) {
      const bool sound = op->is_nibbles ? pack_panel<Format::kSuperNibbles>(*op, panel)
                                        : pack_panel<Format::kSuperBytes>(*op, panel);
      if (!sound) finite = false;
    }
  });
  return finite ? 0 : kRefused;
}

extern "C" int64_t pack_super_blocks_size() { return sizeof(PackSuperBlocks); }
