// Rounds rows of numbers, and of what are none, to integers: for the compiler's sanitizer of undefined behaviour. Prints
// the values whose rows got a scale of the other kind.
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "int8/int8_rows.h"

using namespace rootgraft;

template <class E>
void round_all() {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const int count : {16, 34, 80, 576, 1 << 17}) {
    for (const float value : {NAN, -NAN, infinity, -infinity, 3e38f, -3e38f, 1e-40f, 1.0f}) {
      for (const int step : {1, 3}) {
        std::vector<typename E::Value> x(count);
        for (int i = 0; i < count; i++) x[i] = E::narrow(i % step == 0 ? value : 0.5f - i % 7);
        std::vector<int8_t> high(count + kWidth), low(count + kWidth);  // rounded up to whole vectors
        int32_t one[1], two[2];
        const float scale = quantise_block<E>(x.data(), count, {low.data()}, one);
        const float finer = quantise_block<E, 2>(x.data(), count, {high.data(), low.data()}, two);
        ChannelRows rows;
        rows.fill<E>(x.data(), 1, count, 1);
        for (const float each : {scale, finer, rows.row(0)->scale}) {
          if (std::isfinite(each) != std::isfinite(value)) std::printf("%d %g\n", count, value);
        }
        [[maybe_unused]] volatile int32_t start = kBiasedStart * one[0] + kBiasedStart * two[1];
      }
    }
  }
}

int main() {
  round_all<Bf16>();
  round_all<Fp32>();
}
