// The op of many adapters, for Python and for the op on experts, which uses it.
#pragma once

#include <cstdint>

namespace rootgraft {

constexpr int kModules = 3;

// The factors of one adapter for this projection: a row of the slots' table.
struct Slot {
  const char* a;       // [R][K]; for an embedding [V][R]; null if the adapter does not change this projection
  const float* scale;  // [R]
  const char* b;       // for each module, one after another: [blocks of columns][rank][columns of a block]
  const float* gain;   // [N] or null for 1
  const float* add;    // [N] or null for 0
  int64_t rank[kModules];

  int64_t total() const { return rank[0] + rank[1] + rank[2]; }
};

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct LoraOp {
  const char* x;           // [rows][width], or null
  const int64_t* ids;      // [rows], the row of A that each token takes in place of a product with x; or null
  char* y;                 // [rows][sum of columns], changed in place
  const int32_t* tokens;   // row of each token with an adapter, by segment
  const int32_t* slots;    // [segments]
  const int32_t* starts;   // [segments + 1]
  const Slot* table;       // [num_slots]
  int64_t columns[kModules];
  int64_t rows, width, segments, num_slots;
  int64_t num_tokens;  // length of `tokens`
  int64_t is_bf16;    // type of x, A and B; otherwise fp32
  int64_t y_is_bf16;  // type of y; otherwise fp32
  int64_t threads;
};

}  // namespace rootgraft

extern "C" int lora_shrink_expand(const rootgraft::LoraOp* op);
