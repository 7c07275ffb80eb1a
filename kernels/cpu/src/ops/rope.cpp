// Applies head norms and the rotary embedding to q and k, and stores K and V in their cache cells.
#include "attention/int8_kv.h"
#include "ops/norm.h"
#include "ops/rotate.h"
#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 13;  // number of elements below which one thread is faster
constexpr int64_t kAhead = 4;  // number of tokens between prefetch and use

// Norms of q and k: of each head with one weight; of all heads together; layer norm of each head with its own weight; or
// layer norm of each head with one weight and one bias for all.
enum HeadNorm : int64_t { kHead = 0, kProjection = 1, kCentred = 2, kBiased = 3 };

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct RopeStore {
  const void* qkv;              // [tokens][heads + 2 * kv_heads][head_dim]
  const int64_t* positions;     // [tokens]
  const float* cos_sin;         // [max_position][rotary_dim] or null
  const int64_t* cells;         // [tokens]
  void *k_cache, *v_cache;      // [num_pages][kv_heads][page_size][head_dim], or the layout of int8_kv.h
  const void *q_norm, *k_norm;  // [head_dim] for kHead, [2][head_dim] for kBiased, [heads][head_dim] for others, or null
  void* q_out;                  // [tokens][heads][head_dim]
  int64_t tokens, heads, kv_heads, head_dim, rotary_dim, max_position, num_pages, page_size;
  int64_t is_bf16, norm_is_bf16, threads, kv_is_int8;
  int64_t is_interleaved;  // whether pairs are dimensions (2 i, 2 i + 1) instead of (i, i + half)
  int64_t norm;            // a HeadNorm
  int64_t is_normed_last;  // whether norms come after the rotation
  const float* query_scale;  // [max_position] or null: a factor of the queries
  int64_t has_v_norm;        // whether values have an RMS norm for each head, without a weight
  const float* kv_scales;  // [2][kv_heads] for keys and values in an 8-bit cache; null if each token has its own scale
  double eps, offset;
};

bool in_bounds(const RopeStore& op) {
  for (int64_t token = 0; token < op.tokens; token++) {
    if (op.cells[token] < 0 || op.cells[token] >= op.num_pages * op.page_size) return false;
    if ((op.cos_sin || op.query_scale) && (op.positions[token] < 0 || op.positions[token] >= op.max_position)) return false;
  }
  return true;
}

INLINE float inverse_rms(const RopeStore& op, float squares, int64_t count) {
  return 1.0f / std::sqrt(squares / (float)count + (float)op.eps);
}

// The norm's scale of all heads together if they are normed so; else 0.
template <class E>
INLINE float projection_scale(const RopeStore& op, const typename E::Value* from, int64_t heads) {
  const int64_t count = heads * op.head_dim;
  return op.norm == kProjection ? inverse_rms(op, sum_of_squares<E>(from, count), count) : 0.0f;
}

template <class From, class W>
INLINE void norm_head(const RopeStore& op, const typename From::Value* from, const void* norm, int64_t index,
                      float scale, float* head) {
  const bool is_own = op.norm == kProjection || op.norm == kCentred;
  const auto* weight = static_cast<const typename W::Value*>(norm) + (is_own ? index * op.head_dim : 0);
  if (op.norm == kCentred || op.norm == kBiased) {
    const auto* bias = op.norm == kBiased ? weight + op.head_dim : nullptr;
    centre_and_scale<From, W, Fp32>(from, weight, bias, (float)op.offset, (float)op.eps, head, op.head_dim);
    return;
  }
  if (op.norm == kHead) scale = inverse_rms(op, sum_of_squares<From>(from, op.head_dim), op.head_dim);
  scale_by_weight<From, W, Fp32>(from, weight, (float)op.offset, scale, head, op.head_dim);
}

// Norms and rotates the head at ``from``, the index-th of q or of k. For `scale` see projection_scale.
template <class E, class W>
INLINE void turn_head(const RopeStore& op, const typename E::Value* from, const void* norm, int64_t index, float scale,
                      const float* cos, float* head) {
  if (norm && !op.is_normed_last) norm_head<E, W>(op, from, norm, index, scale, head);
  else convert<E, Fp32>(from, head, op.head_dim);
  if (cos && op.is_interleaved) rotate_neighbours(head, cos, op.rotary_dim / 2);
  else if (cos) rotate(head, cos, op.rotary_dim / 2);
  if (norm && op.is_normed_last) norm_head<Fp32, W>(op, head, norm, index, scale, head);
}

INLINE void multiply_head(float* head, float factor, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(head + i, load(head + i) * broadcast(factor));
  for (; i < count; i++) head[i] *= factor;
}

// Offset of a token's key or value of a KV head, in elements of the cache.
INLINE int64_t cell_offset(const RopeStore& op, int64_t token, int64_t head) {
  const int64_t page = op.cells[token] / op.page_size, cell = op.cells[token] % op.page_size;
  return ((page * op.kv_heads + head) * op.page_size + cell) * op.head_dim;
}

// The address of a KV head in a token's page of an 8-bit cache.
INLINE uint8_t* int8_head(const RopeStore& op, void* cache, int64_t token, int64_t head) {
  const int64_t head_bytes = op.page_size * (op.head_dim + kScaleBytes);
  return static_cast<uint8_t*>(cache) + (op.cells[token] / op.page_size * op.kv_heads + head) * head_bytes;
}

INLINE void prefetch_int8_token(const RopeStore& op, int64_t token, int64_t head) {
  const int64_t cell = op.cells[token] % op.page_size, dims = op.head_dim;
  const uint8_t *keys = int8_head(op, op.k_cache, token, head), *values = int8_head(op, op.v_cache, token, head);
  const int64_t panel = int8_panel(cell, dims), word = cell / kWordBytes * kWordBytes * dims;
  for (int64_t i = 0; i < kWidth * dims; i += 64) __builtin_prefetch(keys + panel + i, 1);
  for (int64_t i = 0; i < kWordBytes * dims; i += 64) __builtin_prefetch(values + word + i, 1);
  __builtin_prefetch(keys + int8_scale(cell, op.page_size, dims), 1);
  __builtin_prefetch(values + int8_scale(cell, op.page_size, dims), 1);
}

// Prefetches all memory that a token reads and writes. Between two calls, weights evict everything from the caches, and
// stores to memory wait for one another.
template <class E>
void prefetch_token(const RopeStore& op, int64_t token) {
  using Value = typename E::Value;
  const auto ask = [](const void* base, int64_t first, int64_t count) {
    const auto* values = static_cast<const Value*>(base) + first;
    for (int64_t i = 0; i < count; i += 64 / sizeof(Value)) __builtin_prefetch(values + i, 1);
  };
  const int64_t width = (op.heads + 2 * op.kv_heads) * op.head_dim, q_width = op.heads * op.head_dim;
  ask(op.qkv, token * width, width);
  ask(op.q_out, token * q_width, q_width);
  for (int64_t head = 0; head < op.kv_heads; head++) {
    if (op.kv_is_int8) {
      prefetch_int8_token(op, token, head);
    } else {
      ask(op.k_cache, cell_offset(op, token, head), op.head_dim);
      ask(op.v_cache, cell_offset(op, token, head), op.head_dim);
    }
  }
}

// The static scale of a KV head's keys, or of its values with kind 1; 0 if there is none.
INLINE float static_scale(const RopeStore& op, int64_t kind, int64_t head) {
  return op.kv_scales ? op.kv_scales[kind * op.kv_heads + head] : 0.0f;
}

// Stores a value of a KV head. If values have a norm, it is computed to ``scaled`` first.
template <class E>
INLINE void store_value(const RopeStore& op, int64_t token, int64_t head, const typename E::Value* value, float* scaled) {
  using Value = typename E::Value;
  const int64_t dims = op.head_dim;
  if (op.has_v_norm) {
    convert<E, Fp32>(value, scaled, dims);
    multiply_head(scaled, inverse_rms(op, sum_of_squares<E>(value, dims), dims), dims);
  }
  if (op.kv_is_int8) {
    uint8_t* target = int8_head(op, op.v_cache, token, head);
    const int64_t cell = op.cells[token] % op.page_size;
    const float scale = static_scale(op, 1, head);
    if (op.has_v_norm) store_int8_value<Fp32>(scaled, target, cell, op.page_size, dims, scale);
    else store_int8_value<E>(value, target, cell, op.page_size, dims, scale);
    return;
  }
  Value* target = static_cast<Value*>(op.v_cache) + cell_offset(op, token, head);
  if (op.has_v_norm) convert<Fp32, E>(scaled, target, dims);
  else std::memcpy(target, value, dims * sizeof(Value));
}

template <class E, class W>
void run_token(const RopeStore& op, int64_t token) {
  using Value = typename E::Value;
  const Value* from = static_cast<const Value*>(op.qkv) + token * (op.heads + 2 * op.kv_heads) * op.head_dim;
  const float* cos = op.cos_sin ? op.cos_sin + op.positions[token] * op.rotary_dim : nullptr;
  Value* q_out = static_cast<Value*>(op.q_out) + token * op.heads * op.head_dim;
  const float q_scale = op.q_norm ? projection_scale<E>(op, from, op.heads) : 0.0f;
  const Value* keys = from + op.heads * op.head_dim;
  const float k_scale = op.k_norm ? projection_scale<E>(op, keys, op.kv_heads) : 0.0f;
  float turned[kMaxHeadDim];
  for (int64_t head = 0; head < op.heads; head++, from += op.head_dim, q_out += op.head_dim) {
    turn_head<E, W>(op, from, op.q_norm, head, q_scale, cos, turned);
    if (op.query_scale) multiply_head(turned, op.query_scale[op.positions[token]], op.head_dim);
    convert<Fp32, E>(turned, q_out, op.head_dim);
  }
  const Value* values = from + op.kv_heads * op.head_dim;
  for (int64_t head = 0; head < op.kv_heads; head++, from += op.head_dim, values += op.head_dim) {
    turn_head<E, W>(op, from, op.k_norm, head, k_scale, cos, turned);
    if (op.kv_is_int8) {
      const int64_t cell = op.cells[token] % op.page_size;
      uint8_t* target = int8_head(op, op.k_cache, token, head);
      store_int8_key<Fp32>(turned, target, cell, op.page_size, op.head_dim, static_scale(op, 0, head));
    } else {
      convert<Fp32, E>(turned, static_cast<Value*>(op.k_cache) + cell_offset(op, token, head), op.head_dim);
    }
    store_value<E>(op, token, head, values, turned);
  }
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if a position or a cell is outside of its table, and then writes nothing; else 0.
extern "C" int rope_store_kv(const RopeStore* op) {
  if (!in_bounds(*op)) return 1;
  const int64_t tokens = op->tokens, elements = tokens * (op->heads + 2 * op->kv_heads) * op->head_dim;
  const auto run = [&](auto element, auto norm_element) {
    parallel_ranges(threads_for(elements, kSmall, op->threads), tokens, [&](int64_t first, int64_t end) {
      for (int64_t token = first - kAhead; token < end; token++) {
        if (token + kAhead < end) prefetch_token<decltype(element)>(*op, token + kAhead);
        if (token >= first) run_token<decltype(element), decltype(norm_element)>(*op, token);
      }
    });
  };
  with_types(run, op->is_bf16, op->norm_is_bf16);
  return 0;
}

extern "C" int64_t rope_store_kv_size() { return sizeof(RopeStore); }
