// Weights in super-blocks of 256 values (K-quants): scales of blocks are integers with a common factor for each
// super-block.
//
//   kSuperNibbles   (d s) q - (e t)   eight blocks of 32 with q of 4 bits; s and t of 6 bits (Q4_K)
//   kSuperBytes     (d s) q           sixteen blocks of 16 with q of 6 bits, stored + 128; s a signed byte (Q6_K)
//
// Words of a panel lie as those of kNibbles and kBytes, in blocks of 32. Its scales, in the words of half precision of a
// super-block: d of 16 columns, for kSuperNibbles e of 16 columns; then for each block of 32 two times 16 bytes: s and
// t, or s of the first 16 values and of the others.
#pragma once

#include <type_traits>

#include "gguf/block_tile.h"

namespace rootgraft {

constexpr int kSuperValues = 256, kSuperBlocks = kSuperValues / kBlockValues;

template <Format F>
constexpr int kFactorHalves = kIsNibbles<F> ? 2 * kWidth : kWidth;  // d, or d and e
constexpr int kStepHalves = kWidth;                                             // two times 16 bytes
template <Format F>
constexpr int kSuperHalves = kFactorHalves<F> + kSuperBlocks * kStepHalves;
template <Format F>
constexpr int kBlockHalves = kIsSuper<F> ? kSuperHalves<F> / kSuperBlocks : kPanelScales<F>;  // of scales, on average

// Halves of the scales of so many blocks of a panel: whole super-blocks.
template <Format F>
constexpr int64_t scale_halves(int64_t blocks) {
  return kIsSuper<F> ? blocks / kSuperBlocks * kSuperHalves<F> : blocks * kPanelScales<F>;
}

// Sixteen bytes as numbers.
template <class Byte>
INLINE Floats load_bytes(const Byte* from) {
#if defined(__AVX512F__)
  const __m128i bytes = load_as<__m128i>(from);
  const __m512i wide = std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  return Floats{{(FloatPart)_mm512_cvtepi32_ps(wide)}};
#else
  float wide[kWidth];
  for (int i = 0; i < kWidth; i++) wide[i] = from[i];
  return load(wide);
#endif
}

}  // namespace rootgraft
