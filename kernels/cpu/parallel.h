// Work on a pool of threads in which the caller never waits for a thread that has not begun.
//
// Items are taken one after another from a counter, by the caller and by those workers that are awake. Where the
// operating system gives a worker's core to another process, the caller does the worker's share: an OpenMP region
// would wait for the worker, which may take milliseconds. What an item computes must not depend on who takes it.
#pragma once

#include <cstdint>

namespace rootgraft {

// run(context, i) for i in [0, count), on the calling thread and up to threads - 1 workers.
void run_items(int threads, int64_t count, void (*run)(const void*, int64_t), const void* context);

// f(i) for i in [0, count).
template <class F>
void parallel_items(int threads, int64_t count, const F& f) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; i++) f(i);
  } else {
    run_items(threads, count, [](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); }, &f);
  }
}

// f(first, end) for ranges that cover [0, count): two for each thread, or one on one thread.
template <class F>
void parallel_ranges(int threads, int64_t count, const F& f) {
  const int64_t parts = threads <= 1 ? 1 : 2 * threads;
  parallel_items(threads, parts, [&](int64_t i) { f(count * i / parts, count * (i + 1) / parts); });
}

}  // namespace rootgraft
