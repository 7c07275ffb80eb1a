// Products of a weight that is in memory in two forms: as blocks, used for few rows, and widened, used for more rows.
#include "gguf/widened_blocks.h"

#include "gemm/linear.h"
#include "gguf/widening.h"
#include "simd/parallel.h"

namespace rootgraft {
namespace {

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct BothForms {
  QuantisedLinear blocks;   // its planes are 0
  const uint32_t* panels;   // of the widened form: see gemm/linear.h
  const void* bias;         // [columns] of x's type or null, the same as that of the blocks
  int64_t few;              // largest number of rows of x that are multiplied with the blocks
};

int multiply_panels(const BothForms& op) {
  const QuantisedLinear& b = op.blocks;
  const auto* x = static_cast<const uint32_t*>(b.x);
  const int64_t steps = b.width / (b.is_bf16 ? Bf16::kPerWord : Fp32::kPerWord);
  if (b.gate) {
    const GatedLinear gated = {x, op.panels, b.out, b.rows, b.out_columns(), steps, b.gate - 1, b.is_bf16, b.threads};
    return gated_linear(&gated);
  }
  const Linear plain = {x,      op.panels, op.bias,   b.out,         b.at,     b.rows,
                        b.columns, steps,     b.is_bf16, b.out_is_bf16, b.threads};
  return linear(&plain);
}

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct WidenBlocks {
  const uint32_t* panels;  // see Format
  const uint16_t* scales;
  uint32_t* out;           // panels of the widened form
  int64_t columns, width;
  Format format;
  int64_t is_bf16, threads;
};

template <class E>
void widen_panels(const WidenBlocks& op) {
  const int64_t blocks = op.width / kBlockValues, words = op.width / E::kPerWord * kWidth;
  const Widener widener = widener_of<E>(op.format);
  parallel_ranges((int)op.threads, (op.columns + kWidth - 1) / kWidth, [&](int64_t panel, int64_t end) {
    BlockPlace place = widener.place(op.panels, op.scales, panel * blocks);
    for (uint32_t* to = op.out + panel * words; panel < end; panel++) {
      for (int64_t i = 0; i < blocks; i++, to += kBlockValues / E::kPerWord * kWidth) widener.widen(place, kAhead, to);
      for (int64_t lane = op.columns - panel * kWidth; lane < kWidth; lane++) {  // after the last column
        for (int64_t i = lane; i < words; i += kWidth) op.out[panel * words + i] = 0;
      }
    }
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int both_forms_linear(const BothForms* op) {
  return op->blocks.rows > op->few ? multiply_panels(*op) : quantised_linear(&op->blocks);
}

extern "C" int64_t both_forms_linear_size() { return sizeof(BothForms); }

extern "C" int widen_blocks(const WidenBlocks* op) {
  with_types([&](auto element) { widen_panels<decltype(element)>(*op); }, op->is_bf16);
  return 0;
}

extern "C" int64_t widen_blocks_size() { return sizeof(WidenBlocks); }
