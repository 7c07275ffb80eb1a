// The ops of plain weights, for Python and for ops that are made of such products.
#pragma once

#include "simd/simd.h"

namespace rootgraft {

constexpr int64_t kSmallProduct = 1 << 14;  // multiplications below which one thread is faster
constexpr int64_t kManyProductRows = 256;  // for a thread: it then multiplies its rows with all panels
constexpr int64_t kManyAmxRows = 128;      // the same by AMX

// Argument structure packed by Python: fields of 8 bytes in this order.
struct Linear {
  const uint32_t* x;       // [rows][steps] words
  const uint32_t* panels;  // [ceil(columns / 16)][steps][16] words
  const void* bias;        // [columns] or null
  void* out;               // [rows][columns], of x's type or fp32; or [rows] fp32, the largest of each row
  int64_t* at;             // null, or the columns of the largest
  int64_t rows, columns, steps, is_bf16, out_is_bf16, threads;
};

// Argument structure packed by Python: fields of 8 bytes in this order.
struct GatedLinear {
  const uint32_t* x;       // [rows][steps] words
  const uint32_t* panels;  // [2][width / 16][steps][16] words, those of gates first
  void* out;               // [rows][width], of x's type
  int64_t rows, width, steps, kind, is_bf16, threads;

  int64_t panel_size() const { return steps * kWidth; }
  int64_t apart() const { return width / kWidth * panel_size(); }  // words from a panel of gates to its factors'
  const uint32_t* panel(int64_t index) const { return panels + index * panel_size(); }
};

}  // namespace rootgraft

extern "C" int linear(const rootgraft::Linear* op);
extern "C" int gated_linear(const rootgraft::GatedLinear* op);
