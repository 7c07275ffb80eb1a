// Causal convolution with a few taps over each channel. The state of a row is its last inputs.
#include <algorithm>

#include "ops/state_rows.h"
#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of outputs below which one thread is faster
constexpr int64_t kMostTaps = 8;

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct CausalConv {
  const void* x;  // [tokens][columns]: from column `first` on B, C and x of `width` each, or the inputs alone
  const void *weight, *bias;             // [taps][width]; [width] or null
  void* state;                           // [slots][taps - 1][width], oldest input first
  const int32_t *source, *target;        // [rows], slots; source -1 for zeros
  const int32_t *checkpoints, *starts;   // [tokens], slots or -1; [rows + 1], first token of each row
  void* out;                             // [tokens][width]
  int64_t tokens, rows, width, taps, slots, first, columns, is_gated, is_bf16, threads;
};

template <class E>
struct Conv {
  using Value = typename E::Value;
  const CausalConv& op;

  Value* slot(int64_t index, int64_t input) const {
    return static_cast<Value*>(op.state) + (index * (op.taps - 1) + input) * op.width;
  }

  const Value* columns(int64_t token) const {
    return static_cast<const Value*>(op.x) + token * op.columns + op.first;
  }

  // Inputs of sixteen channels of a token, rounded to the type of x, in which the state holds them.
  INLINE Floats input(const Value* x, int64_t channel) const {
    if (!op.is_gated) return E::load(x + channel);
    Value rounded[kWidth];
    E::store(rounded, E::load(x + channel) * E::load(x + 2 * op.width + channel));
    return E::load(rounded);
  }

  void run_token(int64_t row, int64_t token) const {
    const Value* from[kMostTaps];  // the columns of a token of this step, or a stored input, or null for zeros
    bool is_kept[kMostTaps];
    for (int64_t tap = 0; tap < op.taps; tap++) {
      const int64_t at = token - op.starts[row] - (op.taps - 1) + tap;
      is_kept[tap] = at < 0;
      if (at >= 0) from[tap] = columns(op.starts[row] + at);
      else from[tap] = op.source[row] < 0 ? nullptr : slot(op.source[row], op.taps - 1 + at);
    }
    const Value* x = columns(token);
    Value* out = static_cast<Value*>(op.out) + token * op.width;
    for (int64_t channel = 0; channel < op.width; channel += kWidth) {
      Floats sum = op.bias ? E::load(static_cast<const Value*>(op.bias) + channel) : broadcast(0.0f);
      for (int64_t tap = 0; tap < op.taps; tap++) {
        if (!from[tap]) continue;
        const Floats value = is_kept[tap] ? E::load(from[tap] + channel) : input(from[tap], channel);
        sum = fma(E::load(static_cast<const Value*>(op.weight) + tap * op.width + channel), value, sum);
      }
      E::store(out + channel, op.is_gated ? sum * E::load(x + op.width + channel) : sum * sigmoid(sum));
    }
  }

  // Saves the state after a row's token. Inputs move towards the front, so a slot may be saved to itself.
  void save(int64_t row, int64_t token, int64_t to) const {
    for (int64_t kept = 0; kept < op.taps - 1; kept++) {
      const int64_t at = token - op.starts[row] - (op.taps - 2) + kept;
      Value* target = slot(to, kept);
      if (at >= 0) {
        const Value* x = columns(op.starts[row] + at);
        for (int64_t channel = 0; channel < op.width; channel += kWidth) {
          E::store(target + channel, input(x, channel));
        }
      } else if (op.source[row] < 0) {
        std::memset(target, 0, op.width * sizeof(Value));
      } else {
        std::memmove(target, slot(op.source[row], op.taps - 1 + at), op.width * sizeof(Value));
      }
    }
  }

  void run() const {
    const int threads = threads_for(op.tokens * op.width, kSmall, op.threads);
    parallel_ranges(threads, op.tokens, [&](int64_t token, int64_t end) {
      int64_t row = std::upper_bound(op.starts, op.starts + op.rows + 1, (int32_t)token) - op.starts - 1;
      for (; token < end; token++) {
        while (op.starts[row + 1] <= token) row++;
        run_token(row, token);
      }
    });
    // All outputs are computed, so the states before the step may be overwritten, each by its own row.
    parallel_ranges(threads, op.rows, [&](int64_t row, int64_t end) {
      for (; row < end; row++) {
        for (int64_t token = op.starts[row]; token < op.starts[row + 1]; token++) {
          if (op.checkpoints[token] >= 0) save(row, token, op.checkpoints[token]);
        }
        if (op.starts[row] < op.starts[row + 1]) save(row, op.starts[row + 1] - 1, op.target[row]);
      }
    });
  }
};

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if a slot or a row is outside of its tensor, and then writes nothing; else 0.
extern "C" int causal_conv(const CausalConv* op) {
  if (op->taps > kMostTaps || !in_bounds(*op)) return 1;
  if (op->is_bf16) Conv<Bf16>{*op}.run();
  else Conv<Fp32>{*op}.run();
  return 0;
}

extern "C" int64_t causal_conv_size() { return sizeof(CausalConv); }
