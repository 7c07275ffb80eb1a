// The inner loop of quantised products, one instance for each format and shape of tile.
#include "byte_tile.h"

#include "quantise.h"
#include "tile.h"

namespace rootgraft {
namespace {

template <int MR, int NV>
struct Sums {
  Ints value[MR][NV];

  template <class Start>
  explicit INLINE Sums(Start start) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) value[m][v] = start(m);
    }
  }

  // Adds the products of column[v] with word a[m * stride].
  template <bool kBiased>
  INLINE void add(const Words* column, const uint32_t* a, ptrdiff_t stride) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      const Words row = broadcast_word(load_as<uint32_t>(a + m * stride));
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) {
        value[m][v] = kBiased ? dot_biased(column[v], row, value[m][v]) : dot_bytes(column[v], row, value[m][v]);
      }
    }
  }
};

template <int MR, int NV>
INLINE void add_nibbles(Sums<MR, NV>& sums, const ByteProduct& p, ptrdiff_t block) {
  constexpr int kHalf = kBlockWords / 2;
  const uint32_t *a = p.a + block * kBlockWords, *b = p.b + block * kHalf * kWidth;
#pragma GCC unroll 4
  for (int i = 0; i < kHalf; i++) {
    Words low[NV], high[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      const Words both = load_words(b + v * p.b_stride + i * kWidth);
      for (int part = 0; part < kParts; part++) {
        low[v].part[part] = both.part[part] & 0x0F0F0F0F;
        high[v].part[part] = both.part[part] >> 4 & 0x0F0F0F0F;
      }
    }
    sums.template add<false>(low, a + i, p.a_stride);
    sums.template add<false>(high, a + kHalf + i, p.a_stride);
  }
}

template <int MR, int NV>
INLINE void add_words(Sums<MR, NV>& sums, const ByteProduct& p, ptrdiff_t first, ptrdiff_t count) {
#pragma GCC unroll 8
  for (ptrdiff_t i = first; i < first + count; i++) {
    Words column[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) column[v] = load_words(p.b + v * p.b_stride + i * kWidth);
    sums.template add<true>(column, p.a + i, p.a_stride);
  }
}

// The sum of row m of C: of its only plane, or of both.
template <int kPlanes, int MR, int NV>
INLINE Ints joined(const Sums<MR, NV>& sums, int m, int v) {
  const Ints& high = sums.value[m * kPlanes][v];
  if constexpr (kPlanes == 1) return high;
  else return map_ints([&](int i) { return (high.part[i] << kPlaneBits) + sums.value[m * 2 + 1][v].part[i]; });
}

// C += sums * (scale of B * scale of A) + (minimum of B * sum of A), or without the minimum.
template <bool kMinimum, int kPlanes, int MR, int NV>
INLINE void add_block(const Sums<MR, NV>& sums, const ByteProduct& p, ptrdiff_t block) {
  const uint16_t* half = static_cast<const uint16_t*>(p.b_scale) + block * (kMinimum ? 2 : 1) * kWidth;
  Floats scale[NV], minimum[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) {
    scale[v] = load_half(half + v * p.b_scale_stride);
    if (kMinimum) minimum[v] = load_half(half + v * p.b_scale_stride + kWidth);
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR / kPlanes; m++) {
    const Floats factor = broadcast(p.a_scale[m * p.blocks + block]);
    const Floats offset = broadcast(p.a_offset[m * p.blocks + block]);
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      float* c = p.c + m * p.c_stride + v * kWidth;
      Floats total = fma(to_floats(joined<kPlanes>(sums, m, v)), scale[v] * factor, load(c));
      if (kMinimum) total = fma(minimum[v], offset, total);
      store(c, total);
    }
  }
}

template <Format F, int kPlanes, int MR, int NV>
void run_blocks(const ByteProduct& p) {
  for (int m = 0; m < MR / kPlanes; m++) {
    for (int v = 0; v < NV; v++) store(p.c + m * p.c_stride + v * kWidth, broadcast(0.0f));
  }
  for (ptrdiff_t block = 0; block < p.blocks; block++) {
    if constexpr (F == Format::kNibbles) {
      Sums<MR, NV> sums([](int) { return broadcast_int(0); });
      add_nibbles(sums, p, block);
      add_block<true, kPlanes>(sums, p, block);
    } else {
      Sums<MR, NV> sums([&](int m) { return start_biased(p.a_sum[m * p.blocks + block]); });
      add_words(sums, p, block * kBlockWords, kBlockWords);
      add_block<false, kPlanes>(sums, p, block);
    }
  }
}

template <int MR, int NV>
void run_channels(const ByteProduct& p) {
  Sums<MR, NV> sums([&](int m) { return start_biased(p.a_sum[m]); });
  add_words(sums, p, 0, p.words);
  for (int m = 0; m < MR; m++) {
    for (int v = 0; v < NV; v++) {
      const Floats scale = load(static_cast<const float*>(p.b_scale) + v * p.b_scale_stride) * broadcast(p.a_scale[m]);
      store(p.c + m * p.c_stride + v * kWidth, to_floats(sums.value[m][v]) * scale);
    }
  }
}

}  // namespace

template <Format F, int kPlanes>
void multiply_byte_tile(const ByteProduct& product, int rows, int panels) {
  with_constant<kByteRows / kPlanes>(rows, [&](auto mr) {
    with_constant<kBytePanels>(panels, [&](auto nv) {
      if constexpr (F == Format::kChannels) run_channels<mr.value, nv.value>(product);
      else run_blocks<F, kPlanes, mr.value * kPlanes, nv.value>(product);
    });
  });
}

template void multiply_byte_tile<Format::kNibbles, 1>(const ByteProduct&, int, int);
template void multiply_byte_tile<Format::kNibbles, 2>(const ByteProduct&, int, int);
template void multiply_byte_tile<Format::kBytes, 1>(const ByteProduct&, int, int);
template void multiply_byte_tile<Format::kBytes, 2>(const ByteProduct&, int, int);
template void multiply_byte_tile<Format::kChannels, 1>(const ByteProduct&, int, int);

}  // namespace rootgraft
