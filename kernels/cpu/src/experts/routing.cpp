// Routing of tokens to experts, and the weighted sum of the experts' results.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "simd/parallel.h"
#include "simd/simd.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmallRoutes = 1 << 11;  // number of logits below which one thread is faster
constexpr int64_t kSmallSums = 1 << 14;    // number of values to add below which one thread is faster
constexpr int kNoMemory = 2;
constexpr float kLeast = -std::numeric_limits<float>::infinity();
constexpr float kTiny = 1e-20f;  // keeps a quotient finite if all weights are zero

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct RouteTokens {
  const float* logits;      // [tokens][num_experts]
  const float* correction;  // [num_experts] or null: added to the scores by which experts are chosen
  const float* factors;     // [num_experts] or null: factors of the weights
  int32_t* experts;         // [tokens][top_k]
  float* weights;           // [tokens][top_k]
  int64_t tokens, num_experts, top_k, is_sigmoid, renormalises, groups, top_groups, best_of_group, threads;
  double scale;
};

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct SumExperts {
  const void* y;         // [tokens][picks][width]
  const float* weights;  // [tokens][picks], or null for 1
  const void* shared;    // [tokens][width] or null: results of the shared expert
  const float* gate;     // [tokens] or null: logits of the shared expert's weight
  void* out;             // [tokens][width] of y's type
  int64_t tokens, picks, width, is_bf16, threads;
};

struct Router {
  std::vector<float> scores, choice, group;
  std::vector<char> taken;

  void route(const RouteTokens& op, int64_t token) {
    score(op, op.logits + token * op.num_experts);
    taken.assign(op.num_experts, 0);
    choose_by(op, op.logits + token * op.num_experts);
    if (op.top_groups < op.groups) leave_groups(op);
    int32_t* experts = op.experts + token * op.top_k;
    float* weights = op.weights + token * op.top_k;
    float total = 0.0f;
    for (int64_t i = 0; i < op.top_k; i++) {
      experts[i] = (int32_t)take_largest(choice.data(), op.num_experts);
      weights[i] = scores[experts[i]];
      total += weights[i];
    }
    const float factor = (float)op.scale / (op.renormalises ? total + kTiny : 1.0f);
    for (int64_t i = 0; i < op.top_k; i++) weights[i] *= op.factors ? factor * op.factors[experts[i]] : factor;
  }

 private:
  // Several sigmoids may round to 1. So the logits are compared, unless a correction is added to the scores.
  void choose_by(const RouteTokens& op, const float* logits) {
    if (op.is_sigmoid && !op.correction && op.top_groups == op.groups) {
      std::copy_n(logits, op.num_experts, choice.begin());
      return;
    }
    for (int64_t e = 0; e < op.num_experts; e++) choice[e] = scores[e] + (op.correction ? op.correction[e] : 0.0f);
  }

  void score(const RouteTokens& op, const float* logits) {
    const int64_t count = op.num_experts;
    scores.resize(count);
    choice.resize(count);
    if (op.is_sigmoid) {
      for (int64_t e = 0; e < count; e++) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
      return;
    }
    const float most = *std::max_element(logits, logits + count);
    float total = 0.0f;
    for (int64_t e = 0; e < count; e++) total += scores[e] = std::exp(logits[e] - most);
    for (int64_t e = 0; e < count; e++) scores[e] /= total;
  }

  // Takes the first of the largest values that are not taken yet. The index is in range whatever the values are.
  int64_t take_largest(const float* values, int64_t count) {
    int64_t at = -1;
    for (int64_t i = 0; i < count; i++) {
      if (!taken[i] && (at < 0 || values[i] > values[at])) at = i;
    }
    taken[at] = 1;
    return at;
  }

  // Excludes all experts except those of the best groups. The score of a group is the sum of its best experts' scores.
  void leave_groups(const RouteTokens& op) {
    const int64_t size = op.num_experts / op.groups;
    group.resize(op.groups);
    for (int64_t g = 0; g < op.groups; g++) {
      std::vector<float> best(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::partial_sort(best.begin(), best.begin() + op.best_of_group, best.end(), std::greater<float>());
      group[g] = 0.0f;
      for (int64_t i = 0; i < op.best_of_group; i++) group[g] += best[i];
    }
    for (int64_t i = 0; i < op.top_groups; i++) take_largest(group.data(), op.groups);
    for (int64_t g = 0; g < op.groups; g++) {
      if (!taken[g]) std::fill(choice.begin() + g * size, choice.begin() + (g + 1) * size, kLeast);
    }
    taken.assign(op.num_experts, 0);
  }
};

template <class E>
void sum_row(const SumExperts& op, int64_t token) {
  using Value = typename E::Value;
  const auto* y = static_cast<const Value*>(op.y) + token * op.picks * op.width;
  const auto* shared = op.shared ? static_cast<const Value*>(op.shared) + token * op.width : nullptr;
  const float* weights = op.weights ? op.weights + token * op.picks : nullptr;
  const auto weight = [&](int64_t pick) { return weights ? weights[pick] : 1.0f; };
  const float gate = op.gate ? 1.0f / (1.0f + std::exp(-op.gate[token])) : 1.0f;
  auto* out = static_cast<Value*>(op.out) + token * op.width;
  int64_t i = 0;
  for (; i + kWidth <= op.width; i += kWidth) {
    Floats sum = shared ? E::load(shared + i) * broadcast(gate) : broadcast(0.0f);
    for (int64_t p = 0; p < op.picks; p++) sum = fma(E::load(y + p * op.width + i), broadcast(weight(p)), sum);
    E::store(out + i, sum);
  }
  for (; i < op.width; i++) {
    float sum = shared ? E::widen(shared[i]) * gate : 0.0f;
    for (int64_t p = 0; p < op.picks; p++) sum += E::widen(y[p * op.width + i]) * weight(p);
    out[i] = E::narrow(sum);
  }
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int route_tokens(const RouteTokens* op) {
  std::atomic<bool> has_memory{true};
  const int threads = threads_for(op->tokens * op->num_experts, kSmallRoutes, op->threads);
  parallel_ranges(threads, op->tokens, [&](int64_t token, int64_t end) {
    try {
      static thread_local Router router;
      for (; token < end; token++) router.route(*op, token);
    } catch (const std::bad_alloc&) {
      has_memory = false;
    }
  });
  return has_memory ? 0 : kNoMemory;
}

extern "C" int64_t route_tokens_size() { return sizeof(RouteTokens); }

extern "C" int sum_experts(const SumExperts* op) {
  const int threads = threads_for(op->tokens * op->picks * op->width, kSmallSums, op->threads);
  with_types([&](auto element) {
    parallel_ranges(threads, op->tokens, [&](int64_t token, int64_t end) {
      for (; token < end; token++) sum_row<decltype(element)>(*op, token);
    });
  }, op->is_bf16);
  return 0;
}

extern "C" int64_t sum_experts_size() { return sizeof(SumExperts); }
