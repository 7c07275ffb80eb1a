// Products of a few rows of quantised activations with panels of quantised weights.
//
//   A        rows of words of four signed bytes along K, in blocks, each with its scale and the sum of its bytes; or
//            two such rows (planes) for each row of C, the second worth a 128th of the first; see quantise.h
//   B panel  16 columns side by side in blocks along K, each block with a scale (and a minimum) for every column
//   C        rows of fp32
//
// A block's products are summed exactly, as integers; blocks are added in order, in fp32. So the bits of a sum depend
// on its row and its column, nothing else.
#pragma once

#include "bytes.h"

namespace rootgraft {

constexpr int kBlockValues = 32;                            // along K, in the formats with blocks
constexpr int kBlockWords = kBlockValues / kWordBytes;

// How B is stored. Blocks of one K come in order: [block][words][16 columns].
enum class Format : int64_t {
  kNibbles,   // blocks of 32: d * q + m, q of 4 bits: word i has values 4 i .. in low halves, 16 + 4 i .. in high ones
  kBytes,     // blocks of 32: d * q, q a signed byte, stored + 128
  kChannels,  // one block as long as K: q as above, d in fp32 for each column
};

struct ByteProduct {
  const uint32_t* a;
  ptrdiff_t a_stride;       // words
  const float* a_scale;     // [rows of C][blocks]
  const float* a_offset;    // [rows of C][blocks]: scale times the sum of the integers
  const int32_t* a_sum;     // [rows of A][blocks]: the sum of the bytes
  const uint32_t* b;
  ptrdiff_t b_stride;       // words from panel to panel
  const void* b_scale;      // [blocks][16] half, with minima [blocks][2][16]; or [16] fp32
  ptrdiff_t b_scale_stride; // elements from panel to panel
  ptrdiff_t blocks;
  ptrdiff_t words;          // in a row of A's block
  float* c;
  ptrdiff_t c_stride;       // floats
};

#if defined(__AVX512F__)
constexpr int kByteRows = 6, kBytePanels = 3;  // rows of A
#else
constexpr int kByteRows = 4, kBytePanels = 1;
#endif

// One tile, rows of C <= kByteRows / kPlanes and panels <= kBytePanels. Formats with blocks take one or two planes.
template <Format F, int kPlanes>
void multiply_byte_tile(const ByteProduct& product, int rows, int panels);

}  // namespace rootgraft
