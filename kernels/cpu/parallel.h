// Work on the threads of the OpenMP runtime that torch has loaded, so that one pool serves both.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>

namespace rootgraft {

// f(thread, number of threads) on each of up to `threads` threads.
template <class F>
void parallel(int threads, F f) {
  if (threads <= 1) {
    f(0, 1);
    return;
  }
#pragma omp parallel num_threads(threads)
  f(omp_get_thread_num(), omp_get_num_threads());
}

// f(i) for i in [0, count), each thread taking the next one when it is done with its last.
template <class F>
void parallel_items(int threads, int64_t count, F f) {
  std::atomic<int64_t> next{0};
  parallel(count < threads ? (int)count : threads, [&](int, int) {
    for (int64_t i = next++; i < count; i = next++) f(i);
  });
}

}  // namespace rootgraft
