// Draws a random token of each line of logits, with probabilities softmax(logits / temperature), among the tokens that
// top-n-sigma, top-k, top-p and min-p keep; or takes the likeliest token. A thread finds a line's largest logit and
// draws from the line while it is in its cache.
//
// The weights e^((logit - best) / T) are added up in a fixed order. Without top-k and top-p, the token is drawn by
// races, as engine/sampling/top_k_top_p.py defines them; weights are computed again for the winners, and never stored.
// Otherwise the likely tokens are collected, and the token is found by partitions as in quickselect. Nothing is sorted,
// and sums of integers are exact in any order. If the likely tokens are not enough, more are collected.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "gemm/argmax.h"
#include "simd/parallel.h"

namespace rootgraft {
namespace {

constexpr int64_t kSmall = 1 << 16;    // number of logits below which one thread is faster
constexpr int64_t kBlock = 64, kPart = 2048;  // numbers of tokens
// Bounds on the base-2 logarithm of a token's weight relative to the best token's. They are tried in order until the
// collected tokens suffice; the last one collects all tokens that have a weight.
constexpr float kPossible = -40.0f, kBounds[] = {-14.0f, -18.0f, -22.0f, -27.0f, -33.0f, kPossible};
constexpr double kOne = 1LL << 40;     // the weight of the best token
constexpr int kNoMemory = 2;

// Arguments of the call, packed by Python: fields of 8 bytes in this order.
struct Draw {
  const float* logits;       // [lines][columns]
  const float* temperature;  // [lines], 0: the likeliest token
  const int64_t* top_k;      // [lines], 0: off
  const double* top_p;       // [lines], 1: off
  const float* min_p;        // [lines], 0: off
  const double* u;           // [lines] in [0, 1)
  const double* noise;       // [lines][num_noise], or null if no line is drawn by a race
  const float* top_n_sigma;  // [lines], 0 or less: off; null if it is off in all lines
  int64_t* tokens;           // [lines], -1 if the largest logit is not finite
  int64_t lines, columns, num_noise, threads;
};

// Returns `value`, or 0 in lanes where it is below `least` or NaN.
INLINE Floats keep_from(const Floats& value, const Floats& least) {
  return map([&](int i) { return value.part[i] >= least.part[i] ? value.part[i] : FloatPart{}; });
}

struct Line {
  const float* logits;
  int64_t columns;
  Floats best, scale, least;
  Floats floor;       // logits below this are left out
  const float* next;  // logits of the line from which this thread probably draws next, or null

  // Loads the logits of 16 tokens from a column on; -infinity after the last token and for those that are left out.
  INLINE Floats load_logits(int64_t column) const {
    const int64_t left = columns - column;
    if (left >= kWidth) return kept(load(logits + column));
    return kept(keep_lanes(load_some<Fp32>(logits + column, left), 0, (int)left, kLeast));
  }

  INLINE Floats kept(const Floats& some) const {
    return map([&](int i) { return some.part[i] >= floor.part[i] ? some.part[i] : FloatPart{} + kLeast; });
  }

  INLINE Floats weights(int64_t column) const {
    return keep_from(exp2((load_logits(column) - best) * scale), least);
  }

  // If `kAhead`, the next line's logits are prefetched meanwhile: computing weights leaves time for it, and finding the
  // largest logit will only read them.
  template <bool kAhead = false>
  double sum_weights(int64_t first, int64_t count) const {
    Floats sum_of_lanes = broadcast(0.0f);
    for (int64_t column = first; column < std::min(first + count, columns); column += kWidth) {
      if (kAhead) __builtin_prefetch(next + column, 0, 2);
      sum_of_lanes = sum_of_lanes + weights(column);
    }
    return sum(sum_of_lanes);
  }
};

struct Candidate {
  float logit;
  int32_t token;
  int64_t weight;

  // The order of draws: the likelier token first.
  bool operator<(const Candidate& other) const {
    return logit > other.logit || (logit == other.logit && token < other.token);
  }
};

// Tokens of a line, partitioned as far as needed.
class Candidates {
 public:
  // Collects all tokens whose weight's logarithm is at least `bound`.
  void collect(const Line& line, float bound) {
    all_.clear();
    for (int64_t column = 0; column < line.columns; column += kWidth) {
      const Floats some = line.load_logits(column), logarithms = (some - line.best) * line.scale;
      if (!any_above(logarithms, bound)) continue;
      float logits[kWidth], reach[kWidth], weights[kWidth];
      store(logits, some), store(reach, logarithms), store(weights, exp2(logarithms));
      for (int i = 0; i < kWidth; i++) {
        const auto weight = (int64_t)(weights[i] * kOne);
        if (reach[i] > bound && weight > 0) all_.push_back({logits[i], (int32_t)(column + i), weight});
      }
    }
    kept_ = all_.size();
  }

  size_t size() const { return kept_; }

  int64_t total() const {
    int64_t total = 0;
    for (size_t i = 0; i < kept_; i++) total += all_[i].weight;
    return total;
  }

  // Keeps the k likeliest tokens, and all that tie with the last of them.
  void keep_top(int64_t k) {
    if (k >= (int64_t)kept_) return;
    const auto first = all_.begin();
    std::nth_element(first, first + (k - 1), first + kept_);
    const float last = all_[k - 1].logit;
    kept_ = std::partition(first, first + kept_, [&](const Candidate& each) { return each.logit >= last; }) - first;
  }

  // Keeps the likeliest tokens, up to the one with which the sum of weights reaches `limit`.
  void keep_mass(double limit) { kept_ = find((int64_t)std::max(0.0, std::ceil(limit) - 1)) + 1; }

  // Keeps the tokens with at least this weight.
  void keep_weights(double least) {
    const auto first = all_.begin();
    kept_ = std::partition(first, first + kept_, [&](const Candidate& each) { return each.weight >= least; }) - first;
  }

  int64_t draw(double u) { return all_[find((int64_t)(u * (double)total()))].token; }

 private:
  // Finds the token in whose part of the sum of weights `target` falls, or the last one. Likelier tokens are then
  // before it.
  size_t find(int64_t target) {
    size_t first = 0, end = kept_;
    while (end - first > 1) {
      const size_t middle = first + (end - first) / 2;
      Candidate* a = all_.data();
      if (a[middle] < a[first]) std::swap(a[middle], a[first]);
      if (a[end - 1] < a[middle]) std::swap(a[end - 1], a[middle]);
      if (a[middle] < a[first]) std::swap(a[middle], a[first]);
      std::swap(a[middle], a[end - 1]);
      size_t place = first;
      int64_t before = 0;
      for (size_t i = first; i + 1 < end; i++) {
        if (!(a[i] < a[end - 1])) continue;
        before += a[i].weight;
        std::swap(a[i], a[place++]);
      }
      std::swap(a[place], a[end - 1]);
      if (target < before) {
        end = place;
      } else if (target < before + a[place].weight || place + 1 == end) {
        return place;
      } else {
        target -= before + a[place].weight;
        first = place + 1;
      }
    }
    return first;
  }

  std::vector<Candidate> all_;
  size_t kept_ = 0;
};

// Draws a token among those that top-k, top-p and min-p keep, applied in this order.
int64_t draw_kept(const Line& line, int64_t top_k, double top_p, float min_p, double u) {
  thread_local Candidates candidates;
  for (float bound : kBounds) {
    candidates.collect(line, bound);
    const bool all = bound == kPossible;
    if (!all && top_k > (int64_t)candidates.size()) continue;
    if (candidates.size() == 0) return 0;
    double mass;
    if (top_k) {
      candidates.keep_top(top_k);
      mass = (double)candidates.total();
    } else if (all) {
      mass = (double)candidates.total();
    } else {
      mass = 0;
      for (int64_t first = 0; first < line.columns; first += kPart) mass += line.sum_weights(first, kPart) * kOne;
      if ((double)candidates.total() < mass * top_p) continue;
    }
    if (top_p < 1) candidates.keep_mass(mass * top_p);
    if (min_p > 0) candidates.keep_weights(min_p * kOne);
    return candidates.draw(u);
  }
  return 0;
}

// Finds the item with the largest ratio of its weight and its random number. The first one wins if several are equal, or
// if all weights are 0.
struct Race {
  double best = 0;
  int64_t winner;

  explicit Race(int64_t first) : winner(first) {}

  void enter(int64_t who, double weight, double noise) {
    if (!(weight > 0)) return;
    const double score = weight / noise;
    if (score > best) best = score, winner = who;
  }
};

// The largest logit of a line, or a NaN if there is one. Several maxima run side by side, as each waits for the one
// before.
float largest_logit(const float* logits, int64_t columns) {
  constexpr int kTogether = 4;
  Floats best[kTogether];
  Ints magnitude[kTogether];  // bits; in their order a NaN is larger than all
  for (int i = 0; i < kTogether; i++) best[i] = broadcast(kLeast), magnitude[i] = broadcast_int(0);
  const auto take = [&](int i, const Floats& value) {
    best[i] = max(value, best[i]);
    magnitude[i] = map_ints([&](int p) {
      const IntPart bits = (IntPart)value.part[p] & 0x7FFFFFFF, most = magnitude[i].part[p];
      return bits > most ? bits : most;
    });
  };
  int64_t column = 0;
  for (; column + kTogether * kWidth <= columns; column += kTogether * kWidth) {
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; i++) take(i, load(logits + column + i * kWidth));
  }
  for (; column < columns; column += kWidth) {
    const int64_t left = std::min<int64_t>(columns - column, kWidth);
    take(0, keep_lanes(load_some<Fp32>(logits + column, left), 0, (int)left, kLeast));
  }
  int32_t lane[kWidth];
  for (int i = 1; i < kTogether; i++) {
    best[0] = max(best[i], best[0]);
    magnitude[0] = map_ints([&](int p) {
      const IntPart a = magnitude[0].part[p], b = magnitude[i].part[p];
      return a > b ? a : b;
    });
  }
  std::memcpy(lane, &magnitude[0], sizeof(lane));
  const bool has_nan = *std::max_element(lane, lane + kWidth) > 0x7F800000;
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : largest(best[0]);
}

// Draws a token by races: among parts of the vocabulary, then among blocks of the winning part, then among tokens of
// the winning block. The sizes are fixed, so that a line draws the same token whatever the width of the logits is.
int64_t race(const Line& line, const double* noise) {
  const double *of_block = noise + kBlock, *of_part = of_block + kPart / kBlock;
  Race parts(0);
  for (int64_t part = 0; part * kPart < line.columns; part++) {
    const int64_t first = part * kPart;
    const double weight = line.next ? line.sum_weights<true>(first, kPart) : line.sum_weights(first, kPart);
    parts.enter(part, weight, of_part[part]);
  }
  const int64_t first = parts.winner * kPart;
  Race blocks(0);
  for (int64_t block = 0; block * kBlock < kPart && first + block * kBlock < line.columns; block++) {
    blocks.enter(block, line.sum_weights(first + block * kBlock, kBlock), of_block[block]);
  }
  const int64_t start = first + blocks.winner * kBlock;
  Race tokens(start);
  for (int64_t column = start; column < std::min(start + kBlock, line.columns); column += kWidth) {
    float weights[kWidth];
    store(weights, line.weights(column));
    for (int lane = 0; lane < kWidth; lane++) {
      tokens.enter(column + lane, weights[lane], noise[column - start + lane]);
    }
  }
  return tokens.winner;
}

// The smallest logit that is at most n standard deviations of the line's finite logits below the best one. The
// distances from the best are rounded to whole units of 2^-21 of a power of two that none exceeds. So sums are exact,
// as in `_least_within` of engine/sampling/top_k_top_p.py.
float least_within(const float* logits, int64_t columns, float best, float n) {
  constexpr int kBits = 21, kLanes = 8;
  constexpr int64_t kExact = 1 << 10;  // number of squares whose sum is exact as a double
  float lowest = best;
  for (int64_t column = 0; column < columns; column++) {
    if (logits[column] != kLeast && logits[column] < lowest) lowest = logits[column];
  }
  int exponent;
  std::frexp((double)best - lowest, &exponent);
  const double scale = std::ldexp(1.0, kBits - exponent);
  int64_t count = 0, sum = 0, squares = 0;
  for (int64_t first = 0; first < columns; first += kExact) {
    double counts[kLanes] = {}, sums[kLanes] = {}, products[kLanes] = {};
    const int64_t end = std::min(first + kExact, columns);
    for (int64_t column = first; column < end; column += kLanes) {
      for (int lane = 0; lane < std::min<int64_t>(kLanes, end - column); lane++) {
        const float logit = logits[column + lane];
        const double units = logit == kLeast ? 0.0 : std::nearbyint(((double)best - logit) * scale);
        counts[lane] += logit != kLeast, sums[lane] += units, products[lane] += units * units;
      }
    }
    for (int lane = 0; lane < kLanes; lane++) {
      count += (int64_t)counts[lane], sum += (int64_t)sums[lane], squares += (int64_t)products[lane];
    }
  }
  const double mean = (double)sum / (double)count;
  const double variance = (double)squares / (double)count - mean * mean;
  return (float)(best - n * (std::sqrt(std::max(0.0, variance)) * std::ldexp(1.0, exponent - kBits)));
}

int64_t draw(const Draw& op, int64_t i, int threads) {
  const float* logits = op.logits + i * op.columns;
  if (op.temperature[i] == 0) {
    float best;
    int64_t likeliest;
    find_largest(logits, op.columns, best, likeliest);
    return std::isfinite(best) ? likeliest : -1;
  }
  const float best = largest_logit(logits, op.columns);
  if (!std::isfinite(best)) return -1;
  // If the line is ranked, min-p is applied after top-k and top-p.
  const bool ranked = op.top_k[i] > 0 || op.top_p[i] < 1;
  const float n = op.top_n_sigma ? op.top_n_sigma[i] : 0.0f;
  const float floor = n > 0 ? least_within(logits, op.columns, best, n) : kLeast;
  const float* next = i + threads < op.lines ? logits + threads * op.columns : nullptr;
  const Line line = {logits, op.columns, broadcast(best), broadcast(kLog2E / op.temperature[i]),
                     broadcast(ranked ? 0.0f : op.min_p[i]), broadcast(floor), next};
  return ranked ? draw_kept(line, op.top_k[i], op.top_p[i], op.min_p[i], op.u[i]) : race(line, op.noise + i * op.num_noise);
}

}  // namespace
}  // namespace rootgraft

using namespace rootgraft;

// Returns kNoMemory if there is not enough memory for candidates, else 0.
extern "C" int draw_tokens(const Draw* op) {
  std::atomic<int> failed{0};
  const int threads = threads_for(op->lines * op->columns, kSmall, op->threads);
  parallel_items(threads, op->lines, [&](int64_t i) {
    try {
      op->tokens[i] = draw(*op, i, threads);
    } catch (const std::bad_alloc&) {
      failed = kNoMemory;
    }
  });
  return failed;
}

extern "C" int64_t draw_tokens_size() { return sizeof(Draw); }
