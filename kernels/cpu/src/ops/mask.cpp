// Applies packed token masks to rows of logits.
#include <algorithm>

#include "gemm/argmax.h"
#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 16;  // number of logits below which one thread is faster
constexpr int64_t kWordBits = 32;

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct Mask {
  float* logits;         // [rows][columns]
  const int64_t* lines;  // [masks], the row of the logits for each mask
  const uint32_t* words;  // [masks][ceil(columns / 32)]; bit j of word w says whether column 32 w + j is allowed
  int64_t masks, rows, columns, threads;
};

// Sets those of 16 logits to -infinity whose bit is not set.
INLINE void ban(float* values, uint32_t allowed) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(values, (__mmask16)~allowed, _mm512_set1_ps(kLeast));
#else
  Floats kept = load(values);
  for (int i = 0; i < kParts; i++) {
    IntPart bit;
    for (int j = 0; j < kLanes; j++) bit[j] = 1 << (i * kLanes + j);
    kept.part[i] = ((IntPart{} + (int32_t)allowed) & bit) ? kept.part[i] : FloatPart{} + kLeast;
  }
  store(values, kept);
#endif
}

void mask_line(const Mask& op, int64_t mask) {
  const int64_t num_words = (op.columns + kWordBits - 1) / kWordBits;
  const uint32_t* words = op.words + mask * num_words;
  float* values = op.logits + op.lines[mask] * op.columns;
  const int64_t whole = op.columns / kWordBits;
  for (int64_t i = 0; i < whole; i++, values += kWordBits) {
    const uint32_t word = words[i];
    if (!word) {
      store(values, broadcast(kLeast));
      store(values + kWidth, broadcast(kLeast));
    } else if (~word) {
      ban(values, word & 0xFFFF);
      ban(values + kWidth, word >> kWidth);
    }
  }
  for (int64_t bit = 0; bit < op.columns % kWordBits; bit++) {
    if (!(words[whole] >> bit & 1)) values[bit] = kLeast;
  }
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if a row is outside of the logits, else 0.
extern "C" int mask_logits(const Mask* op) {
  const auto is_inside = [&](int64_t line) { return line >= 0 && line < op->rows; };
  if (!std::all_of(op->lines, op->lines + op->masks, is_inside)) return 1;
  const int threads = threads_for(op->masks * op->columns, kSmall, op->threads);
  parallel_items(threads, op->masks, [&](int64_t mask) { mask_line(*op, mask); });
  return 0;
}

extern "C" int64_t mask_logits_size() { return sizeof(Mask); }
