// The low-rank part of many adapters, added to products of experts. It is the op of adapters on the picks
// [tokens][picks]. The slot of a pick follows from the token's adapter and the expert.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "ops/lora.h"

namespace rootgraft {
namespace {

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct ExpertLora {
  const char* x;           // [rows][width] or [rows][picks][x_stride]; the first `width` values are read
  char* y;                 // [rows][picks][y_stride]; the first values, as many as all columns, are changed in place
  const int32_t* experts;  // [rows][picks], or null: the picks of each row are all experts in order
  const int32_t* tokens;   // row of each token with an adapter, by segment
  const int32_t* slots;    // [segments]
  const int32_t* starts;   // [segments + 1]
  const Slot* table;       // [num_slots][num_experts]
  int64_t columns[kModules];
  int64_t rows, picks, width, segments, num_slots, num_tokens, num_experts, shares_x, is_bf16, threads, x_stride, y_stride;

  int64_t value_bytes() const { return is_bf16 ? 2 : 4; }
  int64_t x_bytes() const { return width * value_bytes(); }
  int64_t y_bytes() const { return (columns[0] + columns[1] + columns[2]) * value_bytes(); }
  int64_t expert_of(int64_t pick) const { return experts ? experts[pick] : pick % picks; }
  const char* x_of(int64_t pick) const { return x + (shares_x ? pick / picks : pick) * x_stride * value_bytes(); }
  char* y_of(int64_t pick) const { return y + pick * y_stride * value_bytes(); }
};

struct Pick {
  int64_t slot, pick;  // slot: index in the table, which stands for an adapter and an expert
};

bool valid(const ExpertLora& op) {
  const auto below = [](int64_t value, int64_t count) { return value >= 0 && value < count; };
  for (int64_t g = 0; g < op.segments; g++) {
    if (op.starts[g] < 0 || op.starts[g + 1] < op.starts[g] || op.starts[g + 1] > op.num_tokens) return false;
    if (op.starts[g + 1] > op.starts[g] && !below(op.slots[g], op.num_slots)) return false;
    for (int64_t i = op.starts[g]; i < op.starts[g + 1]; i++) {
      if (!below(op.tokens[i], op.rows)) return false;
    }
  }
  if (!op.experts) return op.picks <= op.num_experts;
  return std::all_of(op.experts, op.experts + op.rows * op.picks, [&](int32_t e) { return below(e, op.num_experts); });
}

// Finds the picks that adapters change, ordered by slot, and within a slot by place.
void find(const ExpertLora& op, std::vector<Pick>& found) {
  found.clear();
  for (int64_t g = 0; g < op.segments; g++) {
    for (int64_t i = op.starts[g]; i < op.starts[g + 1]; i++) {
      for (int64_t p = 0; p < op.picks; p++) {
        const int64_t pick = op.tokens[i] * op.picks + p, slot = op.slots[g] * op.num_experts + op.expert_of(pick);
        if (op.table[slot].a) found.push_back({slot, pick});
      }
    }
  }
  std::sort(found.begin(), found.end(), [](const Pick& a, const Pick& b) {
    return a.slot != b.slot ? a.slot < b.slot : a.pick < b.pick;
  });
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 0, or 1 if an index is out of range (nothing is written), or 2 if there is not enough memory.
extern "C" int expert_lora(const ExpertLora* op) try {
  if (!valid(*op)) return 1;
  static thread_local std::vector<Pick> picks;
  static thread_local std::vector<char> x, y;
  static thread_local std::vector<int32_t> tokens, slots, starts;
  find(*op, picks);
  const int64_t count = (int64_t)picks.size(), x_bytes = op->x_bytes(), y_bytes = op->y_bytes();
  x.resize(count * x_bytes);
  y.resize(count * y_bytes);
  tokens.resize(count);
  slots.clear();
  starts.clear();
  for (int64_t i = 0; i < count; i++) {
    std::memcpy(&x[i * x_bytes], op->x_of(picks[i].pick), x_bytes);
    std::memcpy(&y[i * y_bytes], op->y_of(picks[i].pick), y_bytes);
    tokens[i] = (int32_t)i;
    if (i && picks[i].slot == picks[i - 1].slot) continue;
    slots.push_back((int32_t)picks[i].slot);
    starts.push_back((int32_t)i);
  }
  starts.push_back((int32_t)count);
  LoraOp part = {x.data(), nullptr, y.data(), tokens.data(), slots.data(), starts.data(), op->table};
  std::copy_n(op->columns, kModules, part.columns);
  part.rows = count, part.width = op->width, part.segments = (int64_t)slots.size();
  part.num_slots = op->num_slots * op->num_experts, part.num_tokens = count;
  part.is_bf16 = part.y_is_bf16 = op->is_bf16, part.threads = op->threads;
  const int failed = lora_shrink_expand(&part);
  for (int64_t i = 0; i < count; i++) std::memcpy(op->y_of(picks[i].pick), &y[i * y_bytes], y_bytes);
  return failed;
} catch (const std::bad_alloc&) {
  return 2;
}

extern "C" int64_t expert_lora_size() { return sizeof(ExpertLora); }
