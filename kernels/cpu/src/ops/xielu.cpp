// The activation of Apertus, xIELU: two curves that meet at 0. Each layer has trained factors for them.
#include <cstring>

#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of outputs below which one thread is faster

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct Xielu {
  const void* x;         // [rows][width]
  void* out;             // [rows][width]
  const float* factors;  // [4]: factor of x^2 above 0, factor of the exponential below 0, factor of x, largest exponent
  int64_t rows, width, is_bf16, threads;
};

// e^x - 1 - x for x <= 0. Near 0 it is computed by its series, so that nothing cancels.
INLINE Floats exp_beyond_line(const Floats& x) {
  const Floats far = exp2(x * broadcast(1.4426950408889634f)) - broadcast(1.0f) - x;
  Floats series = broadcast(1.0f / 5040.0f);
  for (const float term : {720.0f, 120.0f, 24.0f, 6.0f, 2.0f}) series = fma(series, x, broadcast(1.0f / term));
  const Floats near = series * x * x;
  return map([&](int i) { return x.part[i] > -0.5f ? near.part[i] : far.part[i]; });
}

INLINE Floats apply(const Xielu& op, const Floats& x) {
  const Floats positive = max(broadcast(0.0f), x), negative = x - positive;
  const Floats highest = broadcast(op.factors[3]);
  const Floats exponent = map([&](int i) {
    return negative.part[i] < highest.part[i] ? negative.part[i] : highest.part[i];
  });
  const Floats below = (exp_beyond_line(exponent) + (exponent - negative)) * broadcast(op.factors[1]);
  const Floats above = positive * positive * broadcast(op.factors[0]);
  const Floats curve = map([&](int i) { return x.part[i] > 0.0f ? above.part[i] : below.part[i]; });
  return fma(x, broadcast(op.factors[2]), curve);
}

template <class E>
void run(const Xielu& op) {
  using Value = typename E::Value;
  parallel_ranges(threads_for(op.rows * op.width, kSmall, op.threads), op.rows, [&](int64_t row, int64_t end) {
    const Value* x = static_cast<const Value*>(op.x) + row * op.width;
    Value* out = static_cast<Value*>(op.out) + row * op.width;
    const int64_t count = (end - row) * op.width;
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) E::store(out + i, apply(op, E::load(x + i)));
    if (i == count) return;
    Value padded[2][kWidth] = {};
    const size_t bytes = (count - i) * sizeof(Value);
    std::memcpy(padded[0], x + i, bytes);
    E::store(padded[1], apply(op, E::load(padded[0])));
    std::memcpy(out + i, padded[1], bytes);
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int xielu(const Xielu* op) {
  if (op->is_bf16) run<Bf16>(*op);
  else run<Fp32>(*op);
  return 0;
}

extern "C" int64_t xielu_size() { return sizeof(Xielu); }
