// The ops of plain weights, for Python and for ops that use such products.
#pragma once

#include "simd/simd.h"

namespace rootgraft {

constexpr int64_t kSmallProduct = 1 << 14;  // number of multiplications below which one thread is faster
// number of rows for each thread from which a thread multiplies its rows with all panels
constexpr int64_t kManyProductRows = 256;
constexpr int64_t kManyAmxRows = 128;      // the same for AMX

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct Linear {
  const uint32_t* x;       // [rows][steps] words
  const uint32_t* panels;  // [ceil(columns / 16)][steps][16] words
  const void* bias;        // [columns] or null
  void* out;               // [rows][columns], of x's type or fp32; or [rows] fp32, the largest of each row
  int64_t* at;             // null, or the columns of the largest values
  int64_t rows, columns, steps, is_bf16, out_is_bf16, threads;
};

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct GatedLinear {
  const uint32_t* x;       // [rows][steps] words
  const uint32_t* panels;  // [2][width / 16][steps][16] words; the panels of the gate come first
  void* out;               // [rows][width], of x's type
  int64_t rows, width, steps, kind, is_bf16, threads;

  int64_t panel_size() const { return steps * kWidth; }
  // words from a panel of the gate to the panel of its factor
  int64_t apart() const { return width / kWidth * panel_size(); }
  const uint32_t* panel(int64_t index) const { return panels + index * panel_size(); }
};

}  // namespace rootgraft

extern "C" int linear(const rootgraft::Linear* op);
extern "C" int gated_linear(const rootgraft::GatedLinear* op);
