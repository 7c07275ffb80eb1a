// Checks the rows of ops with a recurrent state: the slots that they read and write.
#pragma once

#include <cstdint>

namespace rootgraft {

// Whether all slots are in the pool, and the rows cover all tokens in order. An op must have these fields:
//
//   int64_t tokens, rows, slots
//   const int32_t *source, *target        [rows], slots; source -1 for zeros
//   const int32_t *checkpoints, *starts   [tokens], slots or -1; [rows + 1], first token of each row
template <class Op>
bool in_bounds(const Op& op) {
  if (op.starts[0] != 0 || op.starts[op.rows] != op.tokens) return false;
  for (int64_t row = 0; row < op.rows; row++) {
    if (op.starts[row] > op.starts[row + 1]) return false;
    if (op.source[row] < -1 || op.source[row] >= op.slots) return false;
    if (op.target[row] < 0 || op.target[row] >= op.slots) return false;
  }
  for (int64_t token = 0; token < op.tokens; token++) {
    if (op.checkpoints[token] < -1 || op.checkpoints[token] >= op.slots) return false;
  }
  return true;
}

}  // namespace rootgraft
