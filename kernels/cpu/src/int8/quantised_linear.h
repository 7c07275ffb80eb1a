// The op of weights in four or eight bits, for Python and for ops that use such products.
#pragma once

#include "gguf/block_tile.h"
#include "simd/parallel.h"

namespace rootgraft {

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct QuantisedLinear {
  static constexpr int64_t kSmall = 1 << 15;  // number of multiplications below which one thread is faster

  const void* x;           // [rows][width]
  const uint32_t* panels;  // see Format
  const void* scales;
  const float* bias;       // [columns] or null; null with a gate
  void* out;  // [rows][columns], of x's type or fp32; or [rows] fp32, the largest of each row; with a gate see below
  int64_t* at;             // null, or the columns of the largest values
  int64_t rows, columns, width;
  Format format;
  int64_t planes;  // planes of x; 0: the numbers of blocks are rounded to x's type instead (gguf/widened_blocks.h)
  int64_t is_bf16, out_is_bf16, threads;
  const QuantisedLinear* next;  // the call that comes after this one, null if it is not known
  // 0, or 1 + the kind of activation: out is then act(first half) * second half [rows][columns / 2], of x's type; the
  // halves are whole panels. Not supported for blocks with quantised x.
  int64_t gate;

  int64_t out_columns() const { return gate ? columns / 2 : columns; }

  int used_threads() const { return threads_for(rows * width * columns, kSmall, threads); }
};

}  // namespace rootgraft

extern "C" int quantised_linear(const rootgraft::QuantisedLinear* op);
