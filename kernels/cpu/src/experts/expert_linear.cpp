// Products of tokens with the weights of the experts to which they are routed: tokens are grouped by expert, and each
// expert that has tokens gets one product.
//
// A work item is some panels of an expert's weight times all rows of the expert. One thread computes it with the op for
// plain or quantised weights. So weights of experts without tokens are not read, and all others are read once. The bits
// of a sum depend on its row and its column, not on how the work is cut (gemm/tile.h).
#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "gemm/linear.h"
#include "gguf/block_numbers.h"
#include "int8/quantised_linear.h"
#include "int8/weight_only_linear.h"
#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 14;  // number of multiplications below which one thread is faster
// rows that make one tile, which takes as long as a single row: the time to read its panels
constexpr int64_t kFewRows = 6;
constexpr int64_t kSlices = 4;       // slices of all weights for each thread
constexpr int64_t kPanels = 8;       // smallest number of panels in a slice
constexpr int kOutOfRange = 1, kNoMemory = 2;
constexpr int64_t kPlain = -1;  // in addition to the values of Format
constexpr auto kWidened = (int64_t)Format::kWidened, kFloat8 = (int64_t)Format::kFloat8;

// A row of the table of experts.
struct ExpertWeight {
  const uint32_t* panels;
  const void* scales;  // for quantised weights
  const void* bias;    // [columns] or null
};

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct ExpertLinear {
  const char* x;                // [tokens][width] or [tokens][picks][x_stride]; the first `width` values are multiplied
  const int32_t* experts;       // [tokens][picks], or null: the picks of each token are all experts in order
  const ExpertWeight* weights;  // [num_experts]
  char* out;                    // [tokens][picks][out_stride] of x's type; the first `columns` are written
  int64_t tokens, picks, num_experts, columns, width, shares_x, format, planes, is_bf16, threads, x_stride, out_stride;
  int64_t carried;  // number of values after x's width that are copied after the output columns

  int64_t value_bytes() const { return is_bf16 ? 2 : 4; }
  int64_t panel_count() const { return (columns + kWidth - 1) / kWidth; }
  int64_t expert_of(int64_t pick) const { return experts ? experts[pick] : pick % picks; }
  const char* x_of(int64_t pick) const { return x + (shares_x ? pick / picks : pick) * x_stride * value_bytes(); }
  char* out_of(int64_t pick, int64_t column) const { return out + (pick * out_stride + column) * value_bytes(); }
};

// The picks [tokens][picks], ordered by their experts.
struct Groups {
  std::vector<int64_t> picks, ends;  // the picks of expert e are picks[ends[e - 1]] up to picks[ends[e]]

  bool fill(const ExpertLinear& op) {
    const int64_t count = op.tokens * op.picks;
    picks.resize(count);
    ends.assign(op.num_experts + 1, 0);
    for (int64_t i = 0; i < count; i++) {
      const int64_t expert = op.expert_of(i);
      if (expert < 0 || expert >= op.num_experts) return false;
      ends[expert + 1]++;
    }
    for (int64_t e = 0; e < op.num_experts; e++) ends[e + 1] += ends[e];
    for (int64_t i = 0; i < count; i++) picks[ends[op.expert_of(i)]++] = i;
    return true;
  }

  int64_t begin(int64_t expert) const { return expert ? ends[expert - 1] : 0; }
  int64_t size(int64_t expert) const { return ends[expert] - begin(expert); }
};

struct Slice {
  int64_t expert, panel, panel_end;
};

// Cuts each expert's panels into slices. An expert gets as many slices as the time for its rows requires.
void cut(const ExpertLinear& op, const Groups& groups, int threads, std::vector<Slice>& slices) {
  const auto cost = [&](int64_t e) { return groups.size(e) ? std::max(groups.size(e), kFewRows) : 0; };
  const int64_t panels = op.panel_count(), most = threads == 1 ? 1 : std::max<int64_t>(1, panels / kPanels);
  int64_t total = 0;
  for (int64_t e = 0; e < op.num_experts; e++) total += cost(e);
  slices.clear();
  for (int64_t e = 0; e < op.num_experts; e++) {
    if (!groups.size(e)) continue;
    const int64_t count = std::clamp<int64_t>(cost(e) * kSlices * threads / total, 1, most);
    for (int64_t i = 0; i < count; i++) slices.push_back({e, panels * i / count, panels * (i + 1) / count});
  }
}

// Multiplies some panels of an expert's weight with rows that are one after another in memory.
int multiply(const ExpertLinear& op, const Slice& slice, const char* x, int64_t rows, char* out, int64_t columns) {
  const ExpertWeight& weight = op.weights[slice.expert];
  const int64_t column = slice.panel * kWidth, width = op.width, bf16 = op.is_bf16;
  const auto* words = reinterpret_cast<const uint32_t*>(x);
  const auto* bias = static_cast<const float*>(weight.bias);
  const auto panels = [&](int64_t panel_words) { return weight.panels + slice.panel * panel_words; };
  if (op.format == kPlain) {
    const int64_t steps = bf16 ? width / 2 : width;
    const void* from = weight.bias ? static_cast<const char*>(weight.bias) + column * op.value_bytes() : nullptr;
    const Linear part = {words, panels(steps * kWidth), from, out, nullptr, rows, columns, steps, bf16, bf16, 1};
    return linear(&part);
  }
  if (bias) bias += column;
  const auto* scales = static_cast<const float*>(weight.scales) + column;
  const int64_t channel_words = (width + kWordBytes - 1) / kWordBytes * kWidth;
  if (op.format == kWidened || op.format == kFloat8) {
    const int64_t groups = op.format == kFloat8 ? op.planes : 0;
    const auto* scaled = static_cast<const float*>(weight.scales) + column * std::max<int64_t>(1, groups);
    const WidenedLinear part = {words, panels(channel_words), scaled, bias, out, rows, columns, width, bf16, bf16, 1,
                                groups};
    return widened_linear(&part);
  }
  const Format format = static_cast<Format>(op.format);
  const void* scaled = scales;
  int64_t panel_words = channel_words;
  if (format != Format::kChannels) {
    const PanelSize size = panel_size(format, width);
    panel_words = size.words;
    scaled = static_cast<const uint16_t*>(weight.scales) + slice.panel * size.halves;
  }
  const QuantisedLinear part = {x, panels(panel_words), scaled, bias, out, nullptr, rows, columns, width, format,
                                op.planes, bf16, bf16, 1, nullptr, 0};
  return quantised_linear(&part);
}

// Multiplies a slice with the rows of its expert. Several rows are gathered first, and their results scattered.
int run(const ExpertLinear& op, const Groups& groups, const Slice& slice) try {
  const int64_t column = slice.panel * kWidth, rows = groups.size(slice.expert);
  const int64_t columns = std::min((slice.panel_end - slice.panel) * kWidth, op.columns - column);
  const int64_t* picks = &groups.picks[groups.begin(slice.expert)];
  for (int64_t i = 0; slice.panel == 0 && op.carried && i < rows; i++) {
    const char* from = op.x_of(picks[i]) + op.width * op.value_bytes();
    std::memcpy(op.out_of(picks[i], op.columns), from, op.carried * op.value_bytes());
  }
  if (rows == 1) return multiply(op, slice, op.x_of(*picks), 1, op.out_of(*picks, column), columns);
  static thread_local std::vector<char> x, out;
  const int64_t x_bytes = op.width * op.value_bytes(), out_bytes = columns * op.value_bytes();
  x.resize(rows * x_bytes);
  out.resize(rows * out_bytes);
  for (int64_t i = 0; i < rows; i++) std::memcpy(&x[i * x_bytes], op.x_of(picks[i]), x_bytes);
  const int failed = multiply(op, slice, x.data(), rows, out.data(), columns);
  for (int64_t i = 0; i < rows; i++) std::memcpy(op.out_of(picks[i], column), &out[i * out_bytes], out_bytes);
  return failed;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

extern "C" int expert_linear(const ExpertLinear* op) try {
  static thread_local Groups grouped;
  static thread_local std::vector<Slice> cuts;
  if (!grouped.fill(*op)) return kOutOfRange;
  const int threads = threads_for(op->tokens * op->picks * op->width * op->columns, kSmall, op->threads);
  cut(*op, grouped, threads, cuts);
  const Groups& groups = grouped;  // the caller's variable, on all threads
  const std::vector<Slice>& slices = cuts;
  std::atomic<int> failed{0};
  parallel_shares(threads, (int64_t)slices.size(), [&](int64_t i) {
    if (const int code = run(*op, groups, slices[i])) failed = code;
  });
  return failed;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

extern "C" int64_t expert_linear_size() { return sizeof(ExpertLinear); }
