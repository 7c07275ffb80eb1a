// Adds to the residual stream, with a factor for each of the two; and converts the stream to the model's type.
#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of elements below which one thread is faster

// Arguments of the calls, packed by Python: fields of 8 bytes in this order.
struct AddScaled {
  const void* x;    // [rows][width]
  float* residual;  // [rows][width]
  int64_t rows, width, is_bf16, threads;
  double factor, kept;
};

struct CopyResidual {
  const float* residual;  // [rows][width]
  void* out;              // [rows][width]
  int64_t rows, width, is_bf16, threads;
};

template <class Op, class F>
void in_ranges(const Op& op, F run) {
  const int64_t count = op.rows * op.width;
  parallel_ranges(threads_for(count, kSmall, op.threads), op.rows, [&](int64_t row, int64_t end) {
    if (row < end) run(row * op.width, end * op.width);
  });
}

template <class E>
void add(const AddScaled& op) {
  const auto* x = static_cast<const typename E::Value*>(op.x);
  const float factor = (float)op.factor, kept = (float)op.kept;
  in_ranges(op, [&](int64_t i, int64_t end) {
    for (; i + kWidth <= end; i += kWidth) {
      store(op.residual + i, broadcast(kept) * load(op.residual + i) + broadcast(factor) * E::load(x + i));
    }
    for (; i < end; i++) op.residual[i] = kept * op.residual[i] + factor * E::widen(x[i]);
  });
}

template <class E>
void copy(const CopyResidual& op) {
  auto* out = static_cast<typename E::Value*>(op.out);
  in_ranges(op, [&](int64_t i, int64_t end) {
    for (; i + kWidth <= end; i += kWidth) E::store(out + i, load(op.residual + i));
    for (; i < end; i++) out[i] = E::narrow(op.residual[i]);
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int add_scaled(const AddScaled* op) {
  if (op->is_bf16) add<Bf16>(*op);
  else add<Fp32>(*op);
  return 0;
}

extern "C" int copy_residual(const CopyResidual* op) {
  if (op->is_bf16) copy<Bf16>(*op);
  else copy<Fp32>(*op);
  return 0;
}

extern "C" int64_t add_scaled_size() { return sizeof(AddScaled); }
extern "C" int64_t copy_residual_size() { return sizeof(CopyResidual); }
