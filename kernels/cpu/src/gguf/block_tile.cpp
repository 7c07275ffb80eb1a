// The inner loop of products with quantised blocks, one instance for each format and number of rows.
//
// A block of the panel stays in registers while the tile's rows are multiplied, each with its own sums. Multiplications
// with a scale and those of bytes go through the same units (Zen 4), so there are 10 or 11 such instructions for 8 of
// bytes.
#include "gguf/block_tile.h"

#include "int8/quantise.h"
#include "gemm/tile.h"

namespace rootgraft {
namespace {

constexpr int kHalf = kBlockWords / 2;
// A block of a panel.
template <Format F>
struct Weights {
  Words words[kBlockWords];
  Floats scale, minimum;

  INLINE Weights(const uint32_t* b, const uint16_t* b_scale) : scale(load_half(b_scale)) {
    if constexpr (kIsNibbles<F>) {
      minimum = minimum_of<F>(scale, b_scale);
#pragma GCC unroll 4
      for (int i = 0; i < kHalf; i++) {
        const Words both = load_words(b + i * kWidth);
        for (int part = 0; part < kParts; part++) {
          words[i].part[part] = both.part[part] & 0x0F0F0F0F;
          words[kHalf + i].part[part] = both.part[part] >> 4 & 0x0F0F0F0F;
        }
      }
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < kBlockWords; i++) words[i] = load_words(b + i * kWidth);
    }
  }

  // The products of one plane of a row, in two chains, for an instruction takes four cycles.
  INLINE Ints dot(const uint32_t* row, int32_t start) const {
    Ints sum = broadcast_int(F == Format::kBytes ? start : 0), other = broadcast_int(0);
#pragma GCC unroll 4
    for (int i = 0; i < kHalf; i++) {
      sum = add(words[i], row[i], sum);
      other = add(words[kHalf + i], row[kHalf + i], other);
    }
    return sum + other;
  }

 private:
  static INLINE Ints add(const Words& column, uint32_t row, const Ints& sum) {
    if constexpr (F == Format::kBytes) return dot_biased(column, broadcast_word(row), sum);
    else return dot_bytes(column, broadcast_word(row), sum);
  }
};

// Sum of a row over its one or two planes.
template <Format F, int kPlanes>
INLINE Ints joined(const Weights<F>& weights, const ByteBlock<kPlanes>& row) {
  const Ints high = weights.dot(row.words[0], row.starts[0]);
  if constexpr (kPlanes == 1) return high;
  else return map_ints([&](int i) { return high.part[i] << kPlaneBits; }) + weights.dot(row.words[1], row.starts[1]);
}

template <Format F, int kPlanes, int MR>
void run_tile(const ByteProduct<kPlanes>& product) {
  constexpr bool kMinimum = kIsNibbles<F>;
  const ByteProduct<kPlanes> p = product;  // where no store can change it
  const ptrdiff_t next = p.ahead * kPanelWords<F>, next_scales = p.ahead * kPanelScales<F>;
  Floats sums[MR][1];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++) sums[m][0] = broadcast(0.0f);
  const ByteBlock<kPlanes>* a = p.a;
  const uint32_t* b = p.b;
  const uint16_t* b_scale = p.b_scale;
  for (ptrdiff_t block = 0; block < p.blocks; block++) {
    for (int64_t i = p.first_line; i < p.end_line; i++) __builtin_prefetch(b + next + i * kWidth, 0, 2);
    if (p.first_line < p.end_line) __builtin_prefetch(b_scale + next_scales, 0, 2);
    const Weights<F> weights(b, b_scale);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      Floats& sum = sums[m][0];
      sum = fma(to_floats(joined(weights, a[m])), weights.scale * broadcast(a[m].scale), sum);
      if (kMinimum) sum = fma(weights.minimum, broadcast(a[m].offset), sum);
    }
    a += p.a_rows;
    b += kPanelWords<F>;
    b_scale += kPanelScales<F>;
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

}  // namespace rootgraft
