// The inner loop of products with quantised blocks, one instance for each format and number of rows.
//
// A block of the panel stays in registers while the tile's rows are multiplied, each with its own sums. Multiplications
// with a scale use the same units as those of bytes (Zen 4). So 8 instructions for bytes need 10 or 11 such
// instructions in all.
#include "gguf/block_numbers.h"
#include "int8/quantise.h"
#include "gemm/tile.h"

namespace rootgraft {
namespace {

constexpr int kHalf = kBlockWords / 2;

// Whether numbers are bytes with 128 added.
template <Format F>
constexpr bool kIsBiased = !kHasMinima<F>;

// A block of a panel.
template <Format F>
struct Weights {
  Words words[kBlockWords];
  Floats scales[2], minima[2];  // of both halves; equal without kHasHalfScales

  // Reads the block at a position, which is advanced to the next block.
  INLINE explicit Weights(BlockPlace& place) {
    const auto block = next_block<F>(place);
    if constexpr (kIsPlanes<F>) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) scales[half] = block.scales[half], minima[half] = block.minima[half];
#pragma GCC unroll 8
      for (int i = 0; i < kBlockWords; i++) words[i] = block.four(i);
    } else if constexpr (kIsTable<F>) {
      scales[0] = scales[1] = block.scale;
#pragma GCC unroll 8
      for (int i = 0; i < kBlockWords; i++) words[i] = block.four(i);
    } else if constexpr (kIsNibbles<F>) {
      scales[0] = scales[1] = block.scale;
      minima[0] = minima[1] = block.minimum;
#pragma GCC unroll 4
      for (int i = 0; i < kHalf; i++) {
        const Words both = load_words(block.from + i * kWidth);
        for (int part = 0; part < kParts; part++) {
          words[i].part[part] = both.part[part] & 0x0F0F0F0F;
          words[kHalf + i].part[part] = both.part[part] >> 4 & 0x0F0F0F0F;
        }
      }
    } else {
      scales[0] = scales[1] = block.scale;
#pragma GCC unroll 8
      for (int i = 0; i < kBlockWords; i++) words[i] = load_words(block.from + i * kWidth);
    }
  }

  // The products of one plane of a row, in two chains, as an instruction takes four cycles.
  INLINE Ints dot(const uint32_t* row, int32_t start) const {
    return half<0>(row, kIsBiased<F> ? start : 0) + half<1>(row, 0);
  }

  // The products of one half of the block.
  template <int kSecond>
  INLINE Ints half(const uint32_t* row, int32_t start) const {
    Ints sum = broadcast_int(start);
#pragma GCC unroll 4
    for (int i = kSecond * kHalf; i < (kSecond + 1) * kHalf; i++) sum = add(words[i], row[i], sum);
    return sum;
  }

 private:
  static INLINE Ints add(const Words& column, uint32_t row, const Ints& sum) {
    if constexpr (kIsBiased<F>) return dot_biased(column, broadcast_word(row), sum);
    else return dot_bytes(column, broadcast_word(row), sum);
  }
};

// Combines the sums of a row's one or two planes.
template <Format F, int kPlanes>
INLINE Ints joined(const Weights<F>& weights, const ByteBlock<kPlanes>& row) {
  const Ints high = weights.dot(row.words[0], row.starts[0]);
  if constexpr (kPlanes == 1) return high;
  else return map_ints([&](int i) { return high.part[i] << kPlaneBits; }) + weights.dot(row.words[1], row.starts[1]);
}

// Adds a block to the sum of a row of C.
template <Format F, int kPlanes>
INLINE Floats add_block(const Weights<F>& weights, const ByteBlock<kPlanes>& row, Floats sum) {
  const Floats scale = broadcast(row.scale);
  if constexpr (kHasHalfScales<F>) {
    static_assert(kPlanes == 1);
    const int32_t start = kIsBiased<F> ? row.first_starts[0] : 0, other = kIsBiased<F> ? row.starts[0] - start : 0;
    sum = fma(to_floats(weights.template half<0>(row.words[0], start)), weights.scales[0] * scale, sum);
    sum = fma(to_floats(weights.template half<1>(row.words[0], other)), weights.scales[1] * scale, sum);
    if constexpr (kIsBiased<F>) return sum;
    sum = fma(weights.minima[0], broadcast(row.half_offsets[0]), sum);
    return fma(weights.minima[1], broadcast(row.half_offsets[1]), sum);
  }
  sum = fma(to_floats(joined(weights, row)), weights.scales[0] * scale, sum);
  return kIsBiased<F> ? sum : fma(weights.minima[0], broadcast(row.offset), sum);
}

template <Format F, int kPlanes, int MR>
void run_tile(const ByteProduct<kPlanes>& product) {
  const ByteProduct<kPlanes> p = product;  // a local copy, which no store can change
  const ptrdiff_t next = p.ahead * kPanelWords<F>, next_scales = p.ahead * kBlockHalves<F>;
  Floats sums[MR][1];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) sums[m][0] = broadcast(0.0f);
  const ByteBlock<kPlanes>* a = p.a;
  BlockPlace place = {p.b, p.b_scale};
  for (ptrdiff_t block = 0; block < p.blocks; block++) {
    for (int64_t i = p.first_line; i < p.end_line; i++) __builtin_prefetch(place.words + next + i * kWidth, 0, 2);
    if (p.first_line < p.end_line) __builtin_prefetch(place.scales + next_scales, 0, 2);
    const Weights<F> weights(place);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) sums[m][0] = add_block(weights, a[m], sums[m][0]);
    a += p.a_rows;
  }
  p.c.store(sums);
}

}  // namespace

template <Format F, int kPlanes>
void multiply_byte_tile(const ByteProduct<kPlanes>& product, int rows) {
  with_constant<kByteRows>(rows, [&](auto mr) { run_tile<F, kPlanes, mr.value>(product); });
}

template void multiply_byte_tile<Format::kNibbles, 1>(const ByteProduct<1>&, int);
template void multiply_byte_tile<Format::kNibbles, 2>(const ByteProduct<2>&, int);
template void multiply_byte_tile<Format::kSymmetric, 1>(const ByteProduct<1>&, int);
template void multiply_byte_tile<Format::kSymmetric, 2>(const ByteProduct<2>&, int);
template void multiply_byte_tile<Format::kBytes, 1>(const ByteProduct<1>&, int);
template void multiply_byte_tile<Format::kBytes, 2>(const ByteProduct<2>&, int);
template void multiply_byte_tile<Format::kSuperNibbles, 1>(const ByteProduct<1>&, int);
template void multiply_byte_tile<Format::kSuper6Bits, 1>(const ByteProduct<1>&, int);
template void multiply_byte_tile<Format::kSuper5Bits, 1>(const ByteProduct<1>&, int);
template void multiply_byte_tile<Format::kSuper3Bits, 1>(const ByteProduct<1>&, int);
template void multiply_byte_tile<Format::kSuper2Bits, 1>(const ByteProduct<1>&, int);
template void multiply_byte_tile<Format::kSuperTable, 1>(const ByteProduct<1>&, int);
template void multiply_byte_tile<Format::k5Bits, 1>(const ByteProduct<1>&, int);
template void multiply_byte_tile<Format::kSymmetric5Bits, 1>(const ByteProduct<1>&, int);

}  // namespace rootgraft
