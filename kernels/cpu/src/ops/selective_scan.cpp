// Selective scan of a layer of Mamba: each channel has its own step, and its own decay for every number of its state.
#include <algorithm>
#include <cmath>

#include "ops/state_rows.h"
#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

// number of cells of states below which one thread is faster; each cell takes an exponential
constexpr int64_t kSmall = 1 << 12;
constexpr int64_t kMostState = 256;

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct SelectiveScan {
  const void* x;                        // [tokens][width]
  const void* steps;                    // [tokens][width]
  const void* inputs;                   // [tokens][2 * state_size]: B, then C, for all channels
  const float *decay;                   // [state_size][width]
  const float *step_bias, *skip;        // [width]
  float* state;                         // [slots][state_size][width]
  const int32_t *source, *target;       // [rows], slots; source -1 for zeros
  const int32_t *checkpoints, *starts;  // [tokens], slots or -1; [rows + 1], first token of each row
  void* out;                            // [tokens][width]
  int64_t tokens, rows, width, state_size, slots, is_bf16, threads;
};

template <class E>
struct Scan {
  using Value = typename E::Value;
  const SelectiveScan& op;

  // The cells of sixteen channels in a slot; rows are `width` apart.
  float* cells(int64_t slot, int64_t channel) const { return op.state + slot * op.state_size * op.width + channel; }

  void save(const float* kept, float* to) const {
    for (int64_t n = 0; n < op.state_size; n++) store(to + n * op.width, load(kept + n * kWidth));
  }

  Floats step_of(int64_t token, int64_t channel) const {
    const Value* steps = static_cast<const Value*>(op.steps) + token * op.width + channel;
    float found[kWidth];
    for (int64_t i = 0; i < kWidth; i++) {
      const float x = E::widen(steps[i]) + op.step_bias[channel + i];
      found[i] = x > 20.0f ? x : std::log1p(std::exp(x));
    }
    return load(found);
  }

  // Computes sixteen channels over all tokens of a row.
  void run(int64_t row, int64_t channel) const {
    const int64_t begin = op.starts[row], end = op.starts[row + 1];
    if (begin == end) return;
    float kept[kMostState * kWidth];
    if (op.source[row] < 0) {
      std::fill(kept, kept + op.state_size * kWidth, 0.0f);
    } else {
      const float* from = cells(op.source[row], channel);
      for (int64_t n = 0; n < op.state_size; n++) store(kept + n * kWidth, load(from + n * op.width));
    }
    for (int64_t token = begin; token < end; token++) {
      const Value* into = static_cast<const Value*>(op.inputs) + token * 2 * op.state_size;
      const Value* from = into + op.state_size;
      const Floats step = step_of(token, channel), power = step * broadcast(kLog2E);
      const Floats x = E::load(static_cast<const Value*>(op.x) + token * op.width + channel);
      const Floats scaled = x * step;
      Floats sum = broadcast(0.0f);
      for (int64_t n = 0; n < op.state_size; n++) {
        const Floats decay = exp2(power * load(op.decay + n * op.width + channel));
        const Floats cell = fma(load(kept + n * kWidth), decay, scaled * broadcast(E::widen(into[n])));
        store(kept + n * kWidth, cell);
        sum = fma(cell, broadcast(E::widen(from[n])), sum);
      }
      E::store(static_cast<Value*>(op.out) + token * op.width + channel, fma(x, load(op.skip + channel), sum));
      if (op.checkpoints[token] >= 0) save(kept, cells(op.checkpoints[token], channel));
    }
    save(kept, cells(op.target[row], channel));
  }

  // No two work items access the same cells, except that several rows may read the same state.
  void run_all() const {
    const int64_t blocks = op.width / kWidth;
    const int threads = threads_for(op.tokens * op.width * op.state_size, kSmall, op.threads);
    parallel_items(threads, op.rows * blocks, [&](int64_t item) { run(item / blocks, item % blocks * kWidth); });
  }
};

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if a slot or a row is outside of its tensor, and then writes nothing; else 0.
extern "C" int selective_scan(const SelectiveScan* op) {
  if (op->state_size > kMostState || !in_bounds(*op)) return 1;
  if (op->is_bf16) Scan<Bf16>{*op}.run_all();
  else Scan<Fp32>{*op}.run_all();
  return 0;
}

extern "C" int64_t selective_scan_size() { return sizeof(SelectiveScan); }
