// Products of a few rows of quantised activations with a panel of weights that are quantised in blocks.
//
//   A        rows of blocks of 32 signed bytes, each block with a scale, in one plane; or two such planes for each row,
// the            second with a 128th of the scale of the first; see quantise.h   B panel  16 columns side by side in
// blocks along K, each block with a scale (and a minimum) for every column   C        rows of 16 sums in fp32 or bf16
//
// The products of a block are summed exactly, as integers; blocks are added in order, in fp32. So the bits of a sum
// depend only on its row and its column.
#pragma once

#include "simd/amx.h"
#include "int8/int8_dot.h"
#include "gemm/tile_rows.h"

namespace rootgraft {

constexpr int kBlockValues = 32;  // values along K
constexpr int kBlockWords = kBlockValues / kWordBytes;

// How a quantised weight is stored. The blocks of a panel are in the order of K: [block][words][16 columns].
enum class Format : int64_t {
  kNibbles,   // blocks of 32: d * q + m, q of 4 bits: word i has values 4 i .. in low halves, 16 + 4 i .. in high ones
  kBytes,     // blocks of 32: d * q, q a signed byte, stored + 128
  kChannels,  // q as in kBytes, d in fp32 for each column; see int8_tile.h
  kWidened,   // the same, for products in the type of x
  kSuperNibbles,  // blocks with common factors, for products that widen them; see super_blocks.h
  kSuper6Bits,
  kSymmetric,  // blocks of 32: d * (q - 8), words as in kNibbles
  kZeroPoints,  // blocks of 32: d * (q - z), z in half precision in place of m, words as in kNibbles
  // The five formats with blocks, with words arranged by columns; see block_rows.h. Others of this kind are at the end.
  kNibbleRows,
  kByteRows,
  kSuperNibbleRows,
  kSymmetricRows,
  kZeroPointRows,
  kFloat8,  // q in E4M3, d as in kChannels or for groups; see weight_only_linear.h
  kTable,   // blocks of 32: d * t[q], t the sixteen integers of IQ4_NL, words as in kNibbles
  kFloat4,      // the same with t twice the numbers of E2M1
  // Further formats in super-blocks, for products that widen them or that round x to 8 bits; see super_blocks.h.
  kSuper5Bits,
  kSuper3Bits,
  kSuper2Bits,
  kSuperTable,
  kSuperFloat4,
  // Blocks of 32 of 5 bits, in planes as in kSuper5Bits.
  k5Bits,           // d * q + m
  kSymmetric5Bits,  // d * (q - 16)
  kSuperGrid,       // super-blocks of grid values, for products that widen them; see super_blocks.h
  // The formats from kTable on, and kSuper6Bits, arranged by columns.
  kTableRows,
  kFloat4Rows,
  kSuper5BitsRows,
  kSuper3BitsRows,
  kSuper2BitsRows,
  kSuperTableRows,
  kSuperFloat4Rows,
  k5BitsRows,
  kSymmetric5BitsRows,
  kSuperGridRows,
  kSuper6BitsRows,
};

// Whether numbers of a few bits are in fields of lanes; see block_rows.h.
constexpr bool has_fields(Format format) { return format >= Format::kTableRows; }
template <Format F>
constexpr bool kHasFields = has_fields(F);
constexpr bool is_by_rows(Format format) {
  return has_fields(format) || (format >= Format::kNibbleRows && format <= Format::kZeroPointRows);
}
template <Format F>
constexpr bool kIsByRows = is_by_rows(F);

// The format of the same numbers that is not arranged by columns.
constexpr Format unarranged(Format format) {
  if (format == Format::kSuper6BitsRows) return Format::kSuper6Bits;
  if (has_fields(format)) return (Format)((int64_t)format - (int64_t)Format::kTableRows + (int64_t)Format::kTable);
  switch (format) {
    case Format::kNibbleRows: return Format::kNibbles;
    case Format::kByteRows: return Format::kBytes;
    case Format::kSuperNibbleRows: return Format::kSuperNibbles;
    case Format::kSymmetricRows: return Format::kSymmetric;
    case Format::kZeroPointRows: return Format::kZeroPoints;
    default: return format;
  }
}
static_assert(unarranged(Format::kSuperGridRows) == Format::kSuperGrid);

template <Format F>
constexpr Format kUnarranged = unarranged(F);
template <Format F>
constexpr bool kIsTable = kUnarranged<F> == Format::kTable || kUnarranged<F> == Format::kFloat4 ||
                          kUnarranged<F> == Format::kSuperTable || kUnarranged<F> == Format::kSuperFloat4;
template <Format F>
constexpr bool kIsSuperPlanes = kUnarranged<F> == Format::kSuper6Bits || kUnarranged<F> == Format::kSuper5Bits ||
                                kUnarranged<F> == Format::kSuper3Bits || kUnarranged<F> == Format::kSuper2Bits ||
                                kUnarranged<F> == Format::kSuperGrid;
// Numbers with bits in planes, if they are not arranged by columns: two or four bits of each, and one or two more.
template <Format F>
constexpr bool kIsPlanes = kIsSuperPlanes<F> || kUnarranged<F> == Format::k5Bits || kUnarranged<F> == Format::kSymmetric5Bits;
template <Format F>
constexpr bool kIsSuper = kUnarranged<F> == Format::kSuperNibbles || kUnarranged<F> == Format::kSuperTable ||
                          kUnarranged<F> == Format::kSuperFloat4 || kIsSuperPlanes<F>;
template <Format F>
constexpr bool kIsSymmetric = kUnarranged<F> == Format::kSymmetric;
template <Format F>
constexpr bool kHasZeroPoints = kUnarranged<F> == Format::kZeroPoints;
template <Format F>
constexpr bool kIsNibbles = kUnarranged<F> == Format::kNibbles || kUnarranged<F> == Format::kSuperNibbles || kIsSymmetric<F> ||
                            kHasZeroPoints<F> || kIsTable<F>;

// Whether AMX can be used for products with x in 8 bits.
template <Format F>
constexpr bool kTakesAmx = !kIsSuper<F> && !kIsPlanes<F>;

template <Format F>
constexpr int bits_of() {
  switch (kUnarranged<F>) {
    case Format::kSuper6Bits: return 6;
    case Format::kSuper5Bits:
    case Format::k5Bits:
    case Format::kSymmetric5Bits: return 5;
    case Format::kSuper3Bits:
    case Format::kSuperGrid: return 3;
    case Format::kSuper2Bits: return 2;
    default: return kIsNibbles<F> ? 4 : 8;
  }
}

// Bits of a number in the lower planes, and in those above them.
template <Format F>
constexpr int kLowBits = kIsPlanes<F> ? (bits_of<F>() > 4 ? 4 : 2) : bits_of<F>();
template <Format F>
constexpr int kTopBits = bits_of<F>() - kLowBits<F>;

// A block of a row of A. Aligned because AMX reads several at once: no word may cross a cache line.
template <int kPlanes>
struct alignas(kBlockValues) ByteBlock {
  uint32_t words[kPlanes][kBlockWords];
  int32_t starts[kPlanes];  // kBiasedStart times the sum of the plane's bytes
  int32_t first_starts[kPlanes];  // the same for the first half, for weights whose halves have separate scales
  float scale, offset;      // of the row of C; offset: the scale times the sum of the integers
  float half_offsets[2];    // the same as offset, for each half
};

template <int kPlanes>
struct ByteProduct {
  const ByteBlock<kPlanes>* a;  // [blocks][a_rows]
  ptrdiff_t a_rows;
  const uint32_t* b;
  // [blocks][16], for kNibbles with minima [blocks][2][16], in half precision; for super-blocks
  const uint16_t* b_scale;
                            // see super_blocks.h
  ptrdiff_t blocks;
  TileRows c;
  // Lines of 64 bytes to prefetch while a block is multiplied: those of the block `ahead` blocks further on. The next
  // panel follows this one in memory, and its scales follow these.
  int64_t first_line, end_line, ahead;
};

// Sizes of a block of a panel: number of words, and of half-precision scales.
template <Format F>
constexpr int kPanelWords = kBlockValues * bits_of<F>() / 32 * kWidth;
template <Format F>
constexpr int kPanelScales =
    kWidth * (kUnarranged<F> == Format::kNibbles || kUnarranged<F> == Format::k5Bits || kHasZeroPoints<F> ? 2 : 1);
template <Format F>
constexpr int kPanelLines = kPanelWords<F> / kWidth;

// The minimum of sixteen columns of a block that does not belong to a super-block.
template <Format F>
INLINE Floats minimum_of(const Floats& scale, const uint16_t* scales) {
  if constexpr (kIsSymmetric<F>) return scale * broadcast(-8.0f);
  else if constexpr (kUnarranged<F> == Format::kSymmetric5Bits) return scale * broadcast(-16.0f);
  else if constexpr (kIsTable<F>) return broadcast(0.0f);
  else if constexpr (kHasZeroPoints<F>) return scale * load_half(scales + kWidth) * broadcast(-1.0f);
  else return load_half(scales + kWidth);
}

#if defined(__AVX512F__)
constexpr int kByteRows = 8;
#else
constexpr int kByteRows = 4;
#endif

// Computes one tile, rows <= kByteRows. For formats with blocks that are not arranged by columns.
template <Format F, int kPlanes>
void multiply_byte_tile(const ByteProduct<kPlanes>& product, int rows);

#if ROOTGRAFT_AMX
// A block of a panel in the form for AMX, with scales and, for nibbles, minima.
template <Format F>
struct alignas(64) SignedBlock {
  uint32_t words[kBlockWords * kWidth];
  float scales[kWidth * (kIsNibbles<F> ? 2 : 1)];
};

template <Format F>
void unpack_panel(const uint32_t* b, const uint16_t* b_scale, ptrdiff_t blocks, SignedBlock<F>* to);

// Gives the same bits as multiply_byte_tile, for rows <= kAmxRows and a panel that is unpacked (b and b_scale are only
// prefetched). To be called in an AmxScope of amx_shapes(rows or more, kBlockWords); A must have as many rows.
template <Format F, int kPlanes>
void multiply_byte_amx(const ByteProduct<kPlanes>& product, const SignedBlock<F>* panel, int rows);
#endif

}  // namespace rootgraft
