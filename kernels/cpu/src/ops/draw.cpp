// A random token of each line of logits, with probabilities softmax(logits / temperature), of those that min-p keeps.
//
// Weights e^((logit - best) / T) are added up in parts of a line, in an order that the line's length alone fixes; a part
// is found by their sums, and its weights are computed again for the token. So no probabilities are written.
#include <algorithm>

#include "gemm/argmax.h"
#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 16;    // logits for which one thread is faster
constexpr int64_t kMostParts = 1024;   // of a line
constexpr int64_t kPart = 256;         // logits in a part at least

// Argument structure packed by Python: fields of 8 bytes in this order.
struct Draw {
  const float* logits;       // [rows][columns]
  const int64_t* lines;      // [draws], rows of the logits
  const float* best;         // [draws], the largest logit of the line
  const float* temperature;  // [draws], above 0
  const float* min_p;        // [draws], 0: off
  const double* u;           // [draws] in [0, 1)
  int64_t* tokens;           // [draws]
  int64_t draws, rows, columns, threads;
};

// value, or 0 where it is below `least` or no number.
INLINE Floats keep_from(const Floats& value, const Floats& least) {
  return map([&](int i) { return value.part[i] >= least.part[i] ? value.part[i] : FloatPart{}; });
}

struct Line {
  const float* logits;
  int64_t columns;
  Floats best, scale, least;

  // Of 16 tokens from a column on.
  INLINE Floats weights(int64_t column) const {
    const int64_t left = columns - column;
    const Floats some = left < kWidth ? load_some<Fp32>(logits + column, left) : load(logits + column);
    Floats weight = exp2((some - best) * scale);
    if (left < kWidth) weight = keep_lanes(weight, 0, (int)left, 0.0f);
    return keep_from(weight, least);
  }
};

// Draws a token. A line of NaN or infinities gives any token.
int64_t draw(const Line& line, double u) {
  const int64_t part = std::max(kPart, ((line.columns + kMostParts - 1) / kMostParts + kWidth - 1) / kWidth * kWidth);
  const int64_t parts = (line.columns + part - 1) / part;
  double sums[kMostParts], total = 0;
  for (int64_t i = 0; i < parts; i++) {
    const int64_t end = std::min((i + 1) * part, line.columns);
    Floats sum_of_lanes = broadcast(0.0f);
    for (int64_t column = i * part; column < end; column += kWidth) sum_of_lanes = sum_of_lanes + line.weights(column);
    total += sums[i] = sum(sum_of_lanes);
  }
  double left = u * total;
  int64_t chosen = 0;
  for (int64_t i = 0; i < parts; i++) {  // the first part whose end is beyond; rounding may leave none: then the last
    if (!(sums[i] > 0)) continue;
    chosen = i;
    if (left < sums[i]) break;
    left -= sums[i];
  }
  int64_t token = 0;
  const int64_t end = std::min((chosen + 1) * part, line.columns);
  for (int64_t column = chosen * part; column < end; column += kWidth) {
    float weights[kWidth];
    store(weights, line.weights(column));
    for (int lane = 0; lane < kWidth; lane++) {
      if (!(weights[lane] > 0)) continue;
      token = column + lane;
      if (left < weights[lane]) return token;
      left -= weights[lane];
    }
  }
  return token;
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns 1 if a line is outside of the logits, else 0.
extern "C" int draw_tokens(const Draw* op) {
  const auto is_inside = [&](int64_t line) { return line >= 0 && line < op->rows; };
  if (!std::all_of(op->lines, op->lines + op->draws, is_inside)) return 1;
  const int threads = op->draws * op->columns < kSmall ? 1 : (int)op->threads;
  parallel_items(threads, op->draws, [&](int64_t i) {
    const Line line = {op->logits + op->lines[i] * op->columns, op->columns, broadcast(op->best[i]),
                       broadcast(kLog2E / op->temperature[i]), broadcast(op->min_p[i])};
    op->tokens[i] = draw(line, op->u[i]);
  });
  return 0;
}

extern "C" int64_t draw_tokens_size() { return sizeof(Draw); }
