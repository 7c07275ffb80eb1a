// Layout of 8-bit keys and values in their pages. Each has its own scale in fp32: its largest magnitude / 127, or a
// static scale of its head.
//
//   a KV head of a page   [page_size][head_dim] bytes, then [page_size] scales; page_size is a multiple of 16
//   keys                  bytes of value + 128, 16 keys a panel: [panel][word of the head][key], words of 4 neighbours
//   values                signed bytes, 4 keys a word: [four keys][dimension][key]
//
// So products of bytes read both in place: scores loop over the words of a head with 16 keys side by side, and the
// output loops over words of keys with 16 dimensions side by side.
#pragma once

#include "int8/quantise.h"

namespace rootgraft {

constexpr int kMaxHeadDim = 576;
constexpr int64_t kScaleBytes = sizeof(float);

// Offset of a cell's panel of 16 keys or values in its KV head of a page.
INLINE int64_t int8_panel(int64_t cell, int64_t head_dim) { return cell / kWidth * kWidth * head_dim; }

// Offset of a cell's scale, from the same base.
INLINE int64_t int8_scale(int64_t cell, int64_t page_size, int64_t head_dim) {
  return page_size * head_dim + cell * kScaleBytes;
}

// Writes the bytes of a key or value with a static scale, or with its own scale if `scale` is 0; returns the scale.
template <class E>
INLINE float quantise_kv(const typename E::Value* from, int64_t dims, float scale, int8_t (&bytes)[kMaxHeadDim]) {
  int32_t totals[1];
  return scale > 0.0f ? quantise_by<E>(from, dims, scale, bytes) : quantise_block<E>(from, dims, {bytes}, totals);
}

// Writes the key of a cell to a KV head of a page. The bytes of other cells are not written, as another thread may
// write them.
template <class E>
INLINE void store_int8_key(const typename E::Value* key, uint8_t* head, int64_t cell, int64_t page_size, int64_t dims,
                           float static_scale) {
  int8_t bytes[kMaxHeadDim];
  const float scale = quantise_kv<E>(key, dims, static_scale, bytes);
  uint8_t* to = head + int8_panel(cell, dims) + cell % kWidth * kWordBytes;
  for (int64_t d = 0; d < dims; d += kWordBytes, to += kWidth * kWordBytes) {
    const uint32_t word = load_as<uint32_t>(bytes + d) ^ 0x80808080u;
    std::memcpy(to, &word, sizeof(word));
  }
  std::memcpy(head + int8_scale(cell, page_size, dims), &scale, sizeof(scale));
}

// Writes the value of a cell, likewise.
template <class E>
INLINE void store_int8_value(const typename E::Value* value, uint8_t* head, int64_t cell, int64_t page_size,
                             int64_t dims, float static_scale) {
  int8_t bytes[kMaxHeadDim];
  const float scale = quantise_kv<E>(value, dims, static_scale, bytes);
  uint8_t* to = head + cell / kWordBytes * kWordBytes * dims;
  const int64_t key = cell % kWordBytes;
  int64_t d = 0;
#if defined(__AVX512BW__)
  for (; d + kWidth <= dims; d += kWidth) {  // each byte has a word of its own, of which nothing else is written
    const __m512i words = _mm512_cvtepu8_epi32(load_as<__m128i>(bytes + d));
    const __m512i placed = _mm512_sll_epi32(words, _mm_cvtsi64_si128(8 * key));
    _mm512_mask_storeu_epi8(to + d * kWordBytes, 0x1111111111111111ull << key, placed);
  }
#endif
  for (; d < dims; d++) to[d * kWordBytes + key] = (uint8_t)bytes[d];
  std::memcpy(head + int8_scale(cell, page_size, dims), &scale, sizeof(scale));
}

}  // namespace rootgraft
