// The op of weights in eight bits that are widened, for Python and for ops that use such products.
#pragma once

#include "int8/int8_dot.h"

namespace rootgraft {

constexpr int64_t kGroupInputs = 128;  // inputs of a group of FP8 in blocks

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct WidenedLinear {
  const uint32_t* x;       // [rows][words of x's type]
  const uint32_t* panels;  // [ceil(columns / 16)][ceil(width / 4)][16] words of bytes, each a signed number + 128
  const float* scales;     // [ceil(columns / 16)][16], for FP8 [ceil(columns / 16)][groups][16]
  const float* bias;       // [columns] or null
  void* out;               // [rows][columns], of x's type or fp32
  int64_t rows, columns, width, is_bf16, out_is_bf16, threads;
  int64_t groups;  // 0 for signed bytes; for E4M3 the number of scales of a column: 1, or one for each 128 inputs

  // Number of words of a column that have one scale.
  int64_t group_words() const { return groups == 1 ? panel_words() / kWidth : kGroupInputs / kWordBytes; }
  int64_t panel_words() const { return (width + kWordBytes - 1) / kWordBytes * kWidth; }
};

}  // namespace rootgraft

extern "C" int widened_linear(const rootgraft::WidenedLinear* op);
