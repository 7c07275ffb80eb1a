// The rows of a step and the index keys of their tokens, which the ops of indexed attention read.
#pragma once

#include <cstdint>

#include "simd/simd.h"

namespace rootgraft {

// Fields of the arguments of an op: page_table [rows][table_width], query_start [rows + 1] and context_len [rows], all
// int32, the numbers tokens, rows, table_width, num_pages and page_size; keys [num_pages * page_size][dim].
template <class Op>
bool rows_in_bounds(const Op& op) {
  if (op.query_start[0] != 0 || op.query_start[op.rows] != op.tokens) return false;
  for (int64_t row = 0; row < op.rows; row++) {
    const int64_t queries = (int64_t)op.query_start[row + 1] - op.query_start[row], context = op.context_len[row];
    const int64_t pages = (context + op.page_size - 1) / op.page_size;
    if (queries < 0 || context < queries || pages > op.table_width) return false;
    for (int64_t i = 0; i < pages; i++) {
      const int32_t page = op.page_table[row * op.table_width + i];
      if (page < 0 || page >= op.num_pages) return false;
    }
  }
  return true;
}

// The cell of a position of a row.
template <class Op>
INLINE int64_t cell_of(const Op& op, int64_t row, int64_t position) {
  const int64_t page = op.page_table[row * op.table_width + position / op.page_size];
  return page * op.page_size + position % op.page_size;
}

// Writes the keys of `count` positions from `first` on to a panel [dim][kWidth], a key in each column.
template <class E, class Op>
INLINE void fill_panel(const Op& op, int64_t row, int64_t first, int64_t count, float* panel) {
  const auto* keys = static_cast<const typename E::Value*>(op.keys);
  for (int64_t lane = 0; lane < count; lane++) {
    const auto* key = keys + cell_of(op, row, first + lane) * op.dim;
    for (int64_t d = 0; d < op.dim; d++) panel[d * kWidth + lane] = E::widen(key[d]);
  }
}

}  // namespace rootgraft
