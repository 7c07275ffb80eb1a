// The op of many adapters, for Python and for the op on experts, which is made of it.
#pragma once

#include <cstdint>

namespace rootgraft {

constexpr int kModules = 3;

// One adapter's factors in this projection: a row of the slots' table.
struct Slot {
  const char* a;       // [R][K]; for an embedding [V][R]; null: the adapter leaves this projection alone
  const float* scale;  // [R]
  const char* b;       // one after another for each module: [blocks of columns][rank][columns of a block]
  const float* gain;   // [N] or null for 1
  const float* add;    // [N] or null for 0
  int64_t rank[kModules];

  int64_t total() const { return rank[0] + rank[1] + rank[2]; }
};

// Argument structure packed by Python: fields of 8 bytes in this order.
struct LoraOp {
  const char* x;           // [rows][width], or null
  const int64_t* ids;      // [rows] row of A that each token takes instead of a product with x, or null
  char* y;                 // [rows][sum of columns], changed in place
  const int32_t* tokens;   // row of each adapted token, by segment
  const int32_t* slots;    // [segments]
  const int32_t* starts;   // [segments + 1]
  const Slot* table;       // [num_slots]
  int64_t columns[kModules];
  int64_t rows, width, segments, num_slots;
  int64_t num_tokens;  // room of `tokens`
  int64_t is_bf16;    // x, A and B; else fp32
  int64_t y_is_bf16;  // y; else fp32
  int64_t threads;
};

}  // namespace rootgraft

extern "C" int lora_shrink_expand(const rootgraft::LoraOp* op);
