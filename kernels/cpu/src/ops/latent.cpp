// Keys of latent attention: applies the rotary embedding to q, and stores a token's normed latent vector and rotated
// key.
#include <algorithm>

#include "attention/int8_kv.h"
#include "ops/norm.h"
#include "ops/rotate.h"
#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 13;  // number of elements below which one thread is faster

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct LatentStore {
  void* q;  // [tokens][heads][plain_dim + rotary_dim]; the rotary ones, which are last, are rotated in place
  const void* kv;            // [tokens][latent_dim + rotary_dim]
  const int64_t* positions;  // [tokens]
  const float* cos_sin;      // [max_position][rotary_dim]; null for no rotation
  const int64_t* cells;      // [tokens]
  void* cache;               // [num_pages * page_size][latent_dim + rotary_dim]
  const void* norm;          // [latent_dim] of q's type
  int64_t tokens, heads, plain_dim, latent_dim, rotary_dim, max_position, num_cells;
  int64_t is_interleaved;  // whether pairs are dimensions (2 i, 2 i + 1) instead of (i, i + half)
  int64_t is_bf16, threads;
  const float* query_scale;  // [max_position], a factor of the queries at each position; null for none
  double eps;
};

bool in_bounds(const LatentStore& op) {
  for (int64_t token = 0; token < op.tokens; token++) {
    if (op.cells[token] < 0 || op.cells[token] >= op.num_cells) return false;
    if ((op.cos_sin || op.query_scale) && (op.positions[token] < 0 || op.positions[token] >= op.max_position)) return false;
  }
  return true;
}

// to = `from` rotated; the two may be the same.
template <class E>
INLINE void turn(const LatentStore& op, const typename E::Value* from, const float* cos, typename E::Value* to) {
  float head[kMaxHeadDim];
  convert<E, Fp32>(from, head, op.rotary_dim);
  if (op.is_interleaved) rotate_neighbours(head, cos, op.rotary_dim / 2);
  else rotate(head, cos, op.rotary_dim / 2);
  convert<Fp32, E>(head, to, op.rotary_dim);
}

// Multiplies all values by a factor.
template <class E>
INLINE void scale(typename E::Value* values, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i++) values[i] = E::narrow(E::widen(values[i]) * factor);
}

template <class E>
void run_token(const LatentStore& op, int64_t token) {
  using Value = typename E::Value;
  const int64_t head_dim = op.plain_dim + op.rotary_dim, cell_dim = op.latent_dim + op.rotary_dim;
  const auto* latent = static_cast<const Value*>(op.kv) + token * cell_dim;
  auto* cell = static_cast<Value*>(op.cache) + op.cells[token] * cell_dim;
  const float squares = sum_of_squares<E>(latent, op.latent_dim);
  const float factor = 1.0f / std::sqrt(squares / (float)op.latent_dim + (float)op.eps);
  scale_by_weight<E, E, E>(latent, static_cast<const Value*>(op.norm), 0.0f, factor, cell, op.latent_dim);
  auto* q = static_cast<Value*>(op.q) + token * op.heads * head_dim;
  if (op.cos_sin) {
    const float* cos = op.cos_sin + op.positions[token] * op.rotary_dim;
    for (int64_t head = 0; head < op.heads; head++) {
      Value* rotated = q + head * head_dim + op.plain_dim;
      turn<E>(op, rotated, cos, rotated);
    }
    turn<E>(op, latent + op.latent_dim, cos, cell + op.latent_dim);
  } else {
    std::copy(latent + op.latent_dim, latent + cell_dim, cell + op.latent_dim);
  }
  if (op.query_scale) scale<E>(q, op.heads * head_dim, op.query_scale[op.positions[token]]);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if a position or a cell is outside of its table, and then writes nothing; else 0.
extern "C" int rope_store_latent(const LatentStore* op) {
  if (!in_bounds(*op)) return 1;
  const int64_t head_dim = op->plain_dim + op->rotary_dim, cell_dim = op->latent_dim + op->rotary_dim;
  const int64_t elements = op->tokens * (op->heads * head_dim + cell_dim);
  with_types([&](auto element) {
    parallel_ranges(threads_for(elements, kSmall, op->threads), op->tokens, [&](int64_t token, int64_t end) {
      for (; token < end; token++) run_token<decltype(element)>(*op, token);
    });
  }, op->is_bf16);
  return 0;
}

extern "C" int64_t rope_store_latent_size() { return sizeof(LatentStore); }
