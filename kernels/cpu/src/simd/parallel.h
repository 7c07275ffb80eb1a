// Thread pool: parallel loops in which the caller never waits for a thread that has not begun.
//
// Items are taken one after another from counters, by the caller and by those workers that are awake. Where the
// operating system gives a worker's core to another process, the caller does the worker's share: an OpenMP region
// would wait for the worker, which may take milliseconds. An item's result must not depend on the thread that takes it.
//
// Items may be cut into shares, one for each thread: it takes those first, and then what is left of the others'. A
// thread thus finds in its own cache what it wrote in the same share of the call before.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rootgraft {

// The first item of a share, of `count` items in `shares`.
inline int64_t share_edge(int64_t count, int64_t share, int64_t shares) {
  return (count * share + shares - 1) / shares;
}

// Threads for so much work: below `small` one alone is done sooner, and each further `small` is worth another one.
inline int threads_for(int64_t work, int64_t small, int64_t threads) {
  return (int)std::min(threads, 1 + work / small);
}

// run(context, i) for i in [0, count), on the calling thread and up to threads - 1 workers.
void run_items(int threads, int64_t count, int shares, void (*run)(const void*, int64_t), const void* context);

// f(i) for i in [0, count), taken in their order or cut into `shares`.
template <class F>
void parallel_items(int threads, int64_t count, const F& f, int shares = 1) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; i++) f(i);
  } else {
    run_items(threads, count, shares, [](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); }, &f);
  }
}

// The same, a share for each thread.
template <class F>
void parallel_shares(int threads, int64_t count, const F& f) {
  parallel_items(threads, count, f, threads);
}

// f(first, end) for ranges that cover [0, count): two for each thread, its share, or one on one thread; none is empty
// unless all are.
template <class F>
void parallel_ranges(int threads, int64_t count, const F& f) {
  const int64_t parts = threads <= 1 ? 1 : std::clamp<int64_t>(count, 1, 2 * threads);
  parallel_shares(threads, parts, [&](int64_t i) { f(count * i / parts, count * (i + 1) / parts); });
}

}  // namespace rootgraft
