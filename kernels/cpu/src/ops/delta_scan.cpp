// Gated delta rule of a layer: updates the state token by token, from the state before a row to the one after it.
#include <algorithm>
#include <cmath>

#include "ops/state_rows.h"
#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of cells of states below which one thread is faster
constexpr int64_t kMostKey = 256;    // limit of the dimensions of a key
constexpr float kNormEps = 1e-6f;    // epsilon in the lengths of q and k
constexpr int kPartials = 4;  // number of sums that are computed beside one another, to hide the latency of additions

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct DeltaScan {
  const void* inputs;                   // [tokens][2 * key_heads * key_dim + heads * head_dim]: q, k and v
  const void* gates;                    // [tokens][gate_columns], steps from `first_step` on, rates from `first_rate` on
  const float *decay, *step_bias;       // [heads]; [heads][key_dim] biases if each row of a state has a step of its own
  float* state;                         // [slots][heads][key_dim][head_dim]
  const int32_t *source, *target;       // [rows], slots; source -1 for zeros
  const int32_t *checkpoints, *starts;  // [tokens], slots or -1; [rows + 1], first token of each row
  void* out;                            // [tokens][heads * head_dim]
  int64_t tokens, rows, heads, head_dim, key_heads, key_dim, slots;
  int64_t first_step, first_rate, gate_columns;
  int64_t by_channel;  // whether each row of a state has a step of its own; otherwise each head has one
  int64_t is_bf16, threads;
  double rate_factor;  // factor of the sigmoid of the rates
  double lower_bound;  // below 0: the least logarithm of a row's decay factor, which is by a sigmoid; 0: by a softplus
};

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

INLINE Floats exp(const Floats& x) { return exp2(x * broadcast(kLog2E)); }

// Computes `kBlocks` times sixteen dimensions of a head. No other work item reads or writes their states.
template <class E, int kBlocks, bool kByChannel>
struct Scan {
  using Value = typename E::Value;
  static constexpr int64_t kColumns = kBlocks * kWidth;
  const DeltaScan& op;

  float* cells(int64_t slot, int64_t head, int64_t dim) const {
    return op.state + (slot * op.heads + head) * op.key_dim * op.head_dim + dim;
  }

  void restore(const float* from, float* kept) const {
    for (int64_t n = 0; n < op.key_dim; n++) {
      for (int64_t i = 0; i < kColumns; i += kWidth) store(kept + n * kColumns + i, load(from + n * op.head_dim + i));
    }
  }

  void save(const float* kept, float* to) const {
    for (int64_t n = 0; n < op.key_dim; n++) {
      for (int64_t i = 0; i < kColumns; i += kWidth) store(to + n * op.head_dim + i, load(kept + n * kColumns + i));
    }
  }

  // Scales a head of q or k to unit length, times a factor.
  void normalise(const Value* from, float factor, float* to) const {
    Floats squares = broadcast(0.0f);
    for (int64_t n = 0; n < op.key_dim; n += kWidth) {
      const Floats value = E::load(from + n);
      squares = fma(value, value, squares);
    }
    const Floats scale = broadcast(factor / std::sqrt(sum(squares) + kNormEps));
    for (int64_t n = 0; n < op.key_dim; n += kWidth) store(to + n, E::load(from + n) * scale);
  }

  // Reads the value of a key from the state: the sum over its dimensions n of key[n] * kept[n].
  INLINE void recall(const float* kept, const float* key, Floats* found) const {
    Floats part[kPartials][kBlocks];
    for (auto& each : part) for (auto& cell : each) cell = broadcast(0.0f);
    for (int64_t n = 0; n < op.key_dim; n += kPartials) {
#pragma GCC unroll 4
      for (int p = 0; p < kPartials; p++) {
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; b++) {
          part[p][b] = fma(load(kept + (n + p) * kColumns + b * kWidth), broadcast(key[n + p]), part[p][b]);
        }
      }
    }
    for (int b = 0; b < kBlocks; b++) found[b] = (part[0][b] + part[1][b]) + (part[2][b] + part[3][b]);
  }

  // kept = decay * kept + key x delta; found = the sum over n of query[n] * kept[n]. One decay for all n, or one for
  // each.
  INLINE void update(float* kept, const float* decay, const float* key, const Floats* delta, const float* query,
                     Floats* found) const {
    Floats part[kPartials][kBlocks];
    for (auto& each : part) for (auto& cell : each) cell = broadcast(0.0f);
    const Floats all = broadcast(decay[0]);
    for (int64_t n = 0; n < op.key_dim; n += kPartials) {
#pragma GCC unroll 4
      for (int p = 0; p < kPartials; p++) {
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; b++) {
          float* at = kept + (n + p) * kColumns + b * kWidth;
          const Floats shrink = kByChannel ? broadcast(decay[n + p]) : all;
          const Floats cell = fma(broadcast(key[n + p]), delta[b], load(at) * shrink);
          store(at, cell);
          part[p][b] = fma(cell, broadcast(query[n + p]), part[p][b]);
        }
      }
    }
    for (int b = 0; b < kBlocks; b++) found[b] = (part[0][b] + part[1][b]) + (part[2][b] + part[3][b]);
  }

  // Computes the decay factors of a state's rows, and the key times these, with which the decayed state is read.
  void shrink_rows(const Value* steps, int64_t head, const float* key, float* decay, float* shrunk) const {
    const float* bias = op.step_bias + head * op.key_dim;
    const Floats rate = broadcast(op.decay[head]), bound = broadcast((float)op.lower_bound);
    for (int64_t n = 0; n < op.key_dim; n += kWidth) {
      const Floats step = E::load(steps + n) + load(bias + n);
      const Floats log = op.lower_bound < 0 ? bound * sigmoid(broadcast(0.0f) - step * rate) : softplus(step) * rate;
      const Floats factor = exp(log);
      store(decay + n, factor);
      store(shrunk + n, load(key + n) * factor);
    }
  }

  void run_token(int64_t token, int64_t head, int64_t dim, float* kept) const {
    const int64_t key_width = op.key_heads * op.key_dim, width = op.heads * op.head_dim;
    const int64_t key_head = head / (op.heads / op.key_heads);
    const Value* inputs = static_cast<const Value*>(op.inputs) + token * (2 * key_width + width);
    const Value* gates = static_cast<const Value*>(op.gates) + token * op.gate_columns;
    float query[kMostKey], key[kMostKey];
    normalise(inputs + key_head * op.key_dim, 1.0f / std::sqrt((float)op.key_dim), query);
    normalise(inputs + key_width + key_head * op.key_dim, 1.0f, key);
    const float factor = (float)op.rate_factor;
    const Floats rate = broadcast(factor / (1.0f + std::exp(-E::widen(gates[op.first_rate + head]))));
    const Value* values = inputs + 2 * key_width + head * op.head_dim + dim;
    Floats found[kBlocks], delta[kBlocks];
    float decay[kByChannel ? kMostKey : 1];
    if constexpr (kByChannel) {
      float shrunk[kMostKey];
      shrink_rows(gates + op.first_step + head * op.key_dim, head, key, decay, shrunk);
      recall(kept, shrunk, found);
      for (int b = 0; b < kBlocks; b++) delta[b] = rate * (E::load(values + b * kWidth) - found[b]);
    } else {
      const float step = softplus(E::widen(gates[op.first_step + head]) + op.step_bias[head]);
      decay[0] = std::exp(step * op.decay[head]);
      recall(kept, key, found);
      for (int b = 0; b < kBlocks; b++) {
        delta[b] = rate * (E::load(values + b * kWidth) - found[b] * broadcast(decay[0]));
      }
    }
    update(kept, decay, key, delta, query, found);
    Value* out = static_cast<Value*>(op.out) + token * width + head * op.head_dim + dim;
    for (int b = 0; b < kBlocks; b++) E::store(out + b * kWidth, found[b]);
  }

  void run(int64_t row, int64_t head, int64_t dim) const {
    const int64_t begin = op.starts[row], end = op.starts[row + 1];
    if (begin == end) return;
    float kept[kMostKey * kColumns];
    if (op.source[row] < 0) std::fill(kept, kept + op.key_dim * kColumns, 0.0f);
    else restore(cells(op.source[row], head, dim), kept);
    for (int64_t token = begin; token < end; token++) {
      run_token(token, head, dim, kept);
      if (op.checkpoints[token] >= 0) save(kept, cells(op.checkpoints[token], head, dim));
    }
    save(kept, cells(op.target[row], head, dim));
  }

  void run_all() const {
    const int64_t blocks = op.head_dim / kColumns, each = op.heads * blocks;
    const int threads = threads_for(op.tokens * each * op.key_dim * kColumns, kSmall, op.threads);
    parallel_items(threads, op.rows * each, [&](int64_t item) {
      run(item / each, item % each / blocks, item % blocks * kColumns);
    });
  }
};

template <class E, bool kByChannel>
void run(const DeltaScan& op) {
  if (op.head_dim % (2 * kWidth) == 0) Scan<E, 2, kByChannel>{op}.run_all();
  else Scan<E, 1, kByChannel>{op}.run_all();
}

template <class E>
void run(const DeltaScan& op) {
  if (op.by_channel) run<E, true>(op);
  else run<E, false>(op);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if a slot or a row is outside of its tensor, and then writes nothing; else 0.
extern "C" int delta_scan(const DeltaScan* op) {
  if (op->key_dim > kMostKey || !in_bounds(*op)) return 1;
  if (op->is_bf16) run<Bf16>(*op);
  else run<Fp32>(*op);
  return 0;
}

extern "C" int64_t delta_scan_size() { return sizeof(DeltaScan); }
