// RMS norm of groups of columns, after or before a gate: rms(x * act(gate)) * weight, or rms(x) * weight * act(gate).
#include <cmath>

#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of outputs below which one thread is faster

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct GatedNorm {
  const void* x;       // [tokens][width]
  const void* gate;    // [tokens][gate_columns]; the gate is `width` of them from `gate_first` on
  const void* weight;  // [width]
  void* out;           // [tokens][width]
  int64_t tokens, width, groups, gate_columns, gate_first, is_norm_first;
  int64_t is_sigmoid;  // whether the gate's function is a sigmoid; otherwise it is SiLU
  int64_t is_bf16, threads;
  double eps;
};

template <class E>
void run_token(const GatedNorm& op, int64_t token) {
  using Value = typename E::Value;
  const Value* x = static_cast<const Value*>(op.x) + token * op.width;
  const Value* gate = static_cast<const Value*>(op.gate) + token * op.gate_columns + op.gate_first;
  const Value* weight = static_cast<const Value*>(op.weight);
  Value* out = static_cast<Value*>(op.out) + token * op.width;
  const auto open = [&](int64_t i) {
    const Floats value = E::load(gate + i);
    return op.is_sigmoid ? sigmoid(value) : value * sigmoid(value);
  };
  const auto before = [&](int64_t i) { return op.is_norm_first ? E::load(x + i) : E::load(x + i) * open(i); };
  const int64_t size = op.width / op.groups;
  for (int64_t first = 0; first < op.width; first += size) {
    Floats squares = broadcast(0.0f);
    for (int64_t i = first; i < first + size; i += kWidth) {
      const Floats value = before(i);
      squares = fma(value, value, squares);
    }
    const Floats scale = broadcast(1.0f / std::sqrt(sum(squares) / (float)size + (float)op.eps));
    for (int64_t i = first; i < first + size; i += kWidth) {
      const Floats normed = before(i) * scale * E::load(weight + i);
      E::store(out + i, op.is_norm_first ? normed * open(i) : normed);
    }
  }
}

template <class E>
void run(const GatedNorm& op) {
  const int threads = threads_for(op.tokens * op.width, kSmall, op.threads);
  parallel_ranges(threads, op.tokens, [&](int64_t token, int64_t end) {
    for (; token < end; token++) run_token<E>(op, token);
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int gated_norm(const GatedNorm* op) {
  if (op->is_bf16) run<Bf16>(*op);
  else run<Fp32>(*op);
  return 0;
}

extern "C" int64_t gated_norm_size() { return sizeof(GatedNorm); }
