// Queries, keys and values of a block laid out as operands of its two products.
#pragma once

#include "attention/attention_direct.h"
#include "attention/attention_softmax.h"
#include "simd/amx.h"

namespace rootgraft {

// Queries as words of W.
template <class E, class W = E>
void gather_queries(const Attention& op, const QueryTile& tile, Scratch& scratch) {
  using Value = typename E::Value;
  const int64_t group = op.group(), words = op.head_dim / W::kPerWord;
  for (int head = 0; head < tile.heads; head++) {
    for_tokens(op, tile, [&](int m, int count, int64_t row, int64_t token, int64_t mate) {
      const int64_t first = (op.query_start[row] + token) * op.heads + (tile.first_head + head) * group + mate;
      const Value* from = static_cast<const Value*>(op.q) + first * op.head_dim;
      uint32_t* to = scratch.queries + (head * tile.count + m) * words;
      if constexpr (W::kPerWord == E::kPerWord) {
        std::memcpy(to, from, count * op.head_dim * sizeof(Value));
      } else {
        for (int64_t d = 0; d < count * op.head_dim; d += kWidth) {
          W::store(reinterpret_cast<typename W::Value*>(to) + d, E::load(from + d));
        }
      }
    });
  }
}

// Writes the keys of the block to scratch.keys, in panels of Operands.
template <class E>
void lay_out_keys(const Block<E>& block) {
  using W = typename Operands<E>::Type;
  const int words = (int)(block.op.head_dim / E::kPerWord), panel_words = (int)block.op.head_dim / W::kPerWord * kWidth;
  for (int panel = 0; panel < block.rows.panels; panel++) {
    const uint32_t* keys[kWidth];
    for (int i = 0; i < kWidth; i++) keys[i] = block.rows.row(block.op.k_cache, block.head, panel * kWidth + i);
    block.ahead.step(kWidth);
    uint32_t* to = block.scratch.keys + panel * panel_words;
    if constexpr (W::kPerWord == E::kPerWord) {
      transpose_rows(keys, words, to);
    } else {
      transpose_rows(keys, words, block.scratch.values);  // free, as values are written later
      widen_panel(block.scratch.values, words, reinterpret_cast<float*>(to));
    }
  }
}

// Writes the values of the block to scratch.values, in panels of Operands.
template <class E>
void lay_out_values(const Block<E>& block) {
  using W = typename Operands<E>::Type;
  constexpr int64_t kWords = kBlock / W::kPerWord;
  const Attention& op = block.op;
  for (int key = 0; key < block.rows.panels * kWidth; key += W::kPerWord) {
    uint32_t* out = block.scratch.values + key / W::kPerWord * kWidth;
    const uint32_t* first = block.rows.row(op.v_cache, block.head, key);
    const uint32_t* second = block.rows.row(op.v_cache, block.head, key + W::kPerWord - 1);
    block.ahead.step(W::kPerWord);
    for (int64_t d = 0; d < op.value_dim; d += kWidth, out += kWords * kWidth) {
      if constexpr (W::kPerWord == E::kPerWord) store_words(out, value_words<E>(first, second, d));
      else W::store(reinterpret_cast<float*>(out), E::load(reinterpret_cast<const typename E::Value*>(first) + d));
    }
  }
}

#if ROOTGRAFT_AMX
// Whether AMX computes the sums of a call in bf16. If so, it does for all its queries, as AMX rounds differently.
inline bool attends_by_amx(const Attention& op) { return op.head_dim / Bf16::kPerWord % kAmxWords == 0 && has_amx(); }

// Whether sums of values have the order in which values are unpacked: two panels share 32 dimensions, alternating by
// four.
inline bool are_unpacked(const Attention& op) {
  return op.is_bf16 && !op.kv_is_int8 && op.value_dim % (2 * kWidth) == 0 && attends_by_amx(op);
}

// Changes two such panels to the order of dimensions.
INLINE void repack_sums(Floats& first, Floats& second) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 a = (__m512)first.part[0], b = (__m512)second.part[0];
  first.part[0] = (FloatPart)_mm512_permutex2var_ps(a, low, b);
  second.part[0] = (FloatPart)_mm512_permutex2var_ps(a, high, b);
}

// attend() for such a call.
void attend_by_amx(const Attention& op, const Stretch& stretch, const Stretch& next, const Partial& result,
                   bool resumes, Scratch& scratch);
#else
constexpr bool are_unpacked(const Attention&) { return false; }
INLINE void repack_sums(Floats&, Floats&) {}
#endif

}  // namespace rootgraft
