// Selective scan of a state space layer (Mamba-2): updates the state token by token, from before a row to after it.
#include <algorithm>
#include <cmath>

#include "ops/state_rows.h"
#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of cells of states below which one thread is faster
constexpr int64_t kMostState = 256;

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct SsmScan {
  const void* inputs;                   // [tokens][heads * head_dim + 2 * groups * state_size]: x, B and C
  const void* steps;                    // [tokens][step_columns]; the heads' steps start at column `first_step`
  const float *decay, *step_bias, *skip;  // [heads]
  float* state;                         // [slots][heads][state_size][head_dim]
  const int32_t *source, *target;       // [rows], slots; source -1 for zeros
  const int32_t *checkpoints, *starts;  // [tokens], slots or -1; [rows + 1], first token of each row
  void* out;                            // [tokens][heads * head_dim]
  int64_t tokens, rows, heads, head_dim, groups, state_size, slots, first_step, step_columns, is_bf16, threads;
};

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class E>
struct Scan {
  using Value = typename E::Value;
  const SsmScan& op;

  // The cells of sixteen dimensions of a head in a slot; rows are `head_dim` apart.
  float* cells(int64_t slot, int64_t head, int64_t dim) const {
    return op.state + (slot * op.heads + head) * op.state_size * op.head_dim + dim;
  }

  void save(const float* kept, float* to) const {
    for (int64_t n = 0; n < op.state_size; n++) store(to + n * op.head_dim, load(kept + n * kWidth));
  }

  // Computes sixteen dimensions of a head over all tokens of a row.
  void run(int64_t row, int64_t head, int64_t dim) const {
    const int64_t begin = op.starts[row], end = op.starts[row + 1];
    if (begin == end) return;
    float kept[kMostState * kWidth];
    if (op.source[row] < 0) {
      std::fill(kept, kept + op.state_size * kWidth, 0.0f);
    } else {
      const float* from = cells(op.source[row], head, dim);
      for (int64_t n = 0; n < op.state_size; n++) store(kept + n * kWidth, load(from + n * op.head_dim));
    }
    const int64_t width = op.heads * op.head_dim, group = head / (op.heads / op.groups);
    const int64_t columns = width + 2 * op.groups * op.state_size;
    for (int64_t token = begin; token < end; token++) {
      const Value* inputs = static_cast<const Value*>(op.inputs) + token * columns;
      const Value* into = inputs + width + group * op.state_size;
      const Value* from = into + op.groups * op.state_size;
      const Value* steps = static_cast<const Value*>(op.steps) + token * op.step_columns + op.first_step;
      const float step = softplus(E::widen(steps[head]) + op.step_bias[head]);
      const Floats decay = broadcast(std::exp(step * op.decay[head]));
      const Floats x = E::load(inputs + head * op.head_dim + dim);
      const Floats scaled = x * broadcast(step);
      Floats sum = broadcast(0.0f);
      for (int64_t n = 0; n < op.state_size; n++) {
        const Floats cell = fma(load(kept + n * kWidth), decay, scaled * broadcast(E::widen(into[n])));
        store(kept + n * kWidth, cell);
        sum = fma(cell, broadcast(E::widen(from[n])), sum);
      }
      Value* out = static_cast<Value*>(op.out) + token * width + head * op.head_dim + dim;
      E::store(out, fma(x, broadcast(op.skip[head]), sum));
      if (op.checkpoints[token] >= 0) save(kept, cells(op.checkpoints[token], head, dim));
    }
    save(kept, cells(op.target[row], head, dim));
  }

  // No two work items access the same cells, except that several rows may read the same state.
  void run_all() const {
    const int64_t blocks = op.head_dim / kWidth, each = op.heads * blocks;
    const int threads = threads_for(op.tokens * each * op.state_size * kWidth, kSmall, op.threads);
    parallel_items(threads, op.rows * each, [&](int64_t item) {
      run(item / each, item % each / blocks, item % blocks * kWidth);
    });
  }
};

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if a slot or a row is outside of its tensor, and then writes nothing; else 0.
extern "C" int ssm_scan(const SsmScan* op) {
  if (op->state_size > kMostState || !in_bounds(*op)) return 1;
  if (op->is_bf16) Scan<Bf16>{*op}.run_all();
  else Scan<Fp32>{*op}.run_all();
  return 0;
}

extern "C" int64_t ssm_scan_size() { return sizeof(SsmScan); }
