// Reorders columns of one or two matrices, and multiplies columns by the sigmoid or softplus of others.
#include <algorithm>
#include <cstring>

#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of values below which one thread is faster

// Arguments of the calls, packed by Python: fields of 8 bytes in this order.
struct TakeColumns {
  // [tokens][first_columns], [tokens][second_columns] or null; with second_columns 0 one row for all tokens
  const void *first, *second;
  const int64_t* runs;         // [count][3]: 0 or 1 for the matrix, first column, number of columns
  const float* factors;        // [count], a factor for each run's columns, or null
  void* out;                   // [tokens][columns], as many as the runs have together
  int64_t tokens, count, first_columns, second_columns, columns, value_bytes, is_bf16, threads;
};

struct OutputGate {
  const void* x;     // [tokens][width]
  const void* gate;  // [tokens][gate_columns]; the gate is `width / repeat` of them from `gate_first` on
  void* out;         // [tokens][width]
  int64_t tokens, width, gate_columns, gate_first;
  int64_t repeat;  // number of adjacent columns of x with the same gate: 1 or a multiple of a register's width
  int64_t is_softplus, is_bf16, threads;
};

void take(const TakeColumns& op, int64_t token) {
  char* out = static_cast<char*>(op.out) + token * op.columns * op.value_bytes;
  for (int64_t run = 0; run < op.count; run++) {
    const int64_t* at = op.runs + 3 * run;
    const char* from = static_cast<const char*>(at[0] ? op.second : op.first);
    const int64_t columns = at[0] ? op.second_columns : op.first_columns, bytes = at[2] * op.value_bytes;
    std::memcpy(out, from + (token * columns + at[1]) * op.value_bytes, bytes);
    out += bytes;
  }
}

template <class E>
void take_scaled(const TakeColumns& op, int64_t token) {
  using Value = typename E::Value;
  Value* out = static_cast<Value*>(op.out) + token * op.columns;
  for (int64_t run = 0; run < op.count; run++) {
    const int64_t* at = op.runs + 3 * run;
    const int64_t columns = at[0] ? op.second_columns : op.first_columns, width = at[2];
    const Value* from = static_cast<const Value*>(at[0] ? op.second : op.first) + token * columns + at[1];
    const Floats factor = broadcast(op.factors[run]);
    int64_t i = 0;
    for (; i + kWidth <= width; i += kWidth) E::store(out + i, E::load(from + i) * factor);
    if (i < width) {
      Value rest[kWidth] = {};
      std::memcpy(rest, from + i, (width - i) * sizeof(Value));
      E::store(rest, E::load(rest) * factor);
      std::memcpy(out + i, rest, (width - i) * sizeof(Value));
    }
    out += width;
  }
}

template <class E, bool kSoftplus>
void run(const OutputGate& op) {
  using Value = typename E::Value;
  const auto activated = [](const Floats& value) { return kSoftplus ? softplus(value) : sigmoid(value); };
  const int threads = threads_for(op.tokens * op.width, kSmall, op.threads);
  parallel_ranges(threads, op.tokens, [&](int64_t token, int64_t end) {
    for (; token < end; token++) {
      const Value* x = static_cast<const Value*>(op.x) + token * op.width;
      const Value* gate = static_cast<const Value*>(op.gate) + token * op.gate_columns + op.gate_first;
      Value* out = static_cast<Value*>(op.out) + token * op.width;
      if (op.repeat == 1) {
        for (int64_t i = 0; i < op.width; i += kWidth) E::store(out + i, E::load(x + i) * activated(E::load(gate + i)));
        continue;
      }
      for (int64_t at = 0; at < op.width; at += op.repeat) {
        const Floats factor = activated(broadcast(E::widen(gate[at / op.repeat])));
        for (int64_t i = at; i < at + op.repeat; i += kWidth) E::store(out + i, E::load(x + i) * factor);
      }
    }
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int take_columns(const TakeColumns* op) {
  const int threads = threads_for(op->tokens * op->columns, kSmall, op->threads);
  parallel_ranges(threads, op->tokens, [&](int64_t token, int64_t end) {
    for (; token < end; token++) {
      if (!op->factors) take(*op, token);
      else if (op->is_bf16) take_scaled<Bf16>(*op, token);
      else take_scaled<Fp32>(*op, token);
    }
  });
  return 0;
}

extern "C" int64_t take_columns_size() { return sizeof(TakeColumns); }

extern "C" int output_gate(const OutputGate* op) {
  if (op->is_softplus) op->is_bf16 ? run<Bf16, true>(*op) : run<Fp32, true>(*op);
  else op->is_bf16 ? run<Bf16, false>(*op) : run<Fp32, false>(*op);
  return 0;
}

extern "C" int64_t output_gate_size() { return sizeof(OutputGate); }
