// Thread pool: parallel loops in which the caller never waits for a thread that has not started.
//
// Items are taken one after another from counters, by the caller and by the workers that are awake. If the operating
// system gives a worker's core to another process, the caller computes the worker's share. An OpenMP region would wait
// for that worker, which may take milliseconds. The result of an item must not depend on the thread that takes it.
//
// Items can be cut into shares, one for each thread: a thread takes the items of its share first, and then those left
// in other shares. So a thread finds in its cache what it wrote for the same share in the call before.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rootgraft {

// The first item of a share, if `count` items are cut into `shares` shares.
inline int64_t share_edge(int64_t count, int64_t share, int64_t shares) {
  return (count * share + shares - 1) / shares;
}

// Number of threads for this much work: one thread for less than `small`, and one more for each further `small`.
inline int threads_for(int64_t work, int64_t small, int64_t threads) {
  return (int)std::min(threads, 1 + work / small);
}

// Calls run(context, i) for i in [0, count), on the calling thread and up to threads - 1 workers.
void run_items(int threads, int64_t count, int shares, void (*run)(const void*, int64_t), const void* context);

// Calls f(i) for i in [0, count). Items are taken in order, or cut into `shares` shares.
template <class F>
void parallel_items(int threads, int64_t count, const F& f, int shares = 1) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; i++) f(i);
  } else {
    run_items(threads, count, shares, [](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); }, &f);
  }
}

// Likewise, with one share for each thread.
template <class F>
void parallel_shares(int threads, int64_t count, const F& f) {
  parallel_items(threads, count, f, threads);
}

// Calls f(first, end) for ranges that cover [0, count): two for each thread, which are its share, or one if there is
// only one thread. Ranges are empty only if count is 0.
template <class F>
void parallel_ranges(int threads, int64_t count, const F& f) {
  const int64_t parts = threads <= 1 ? 1 : std::clamp<int64_t>(count, 1, 2 * threads);
  parallel_shares(threads, parts, [&](int64_t i) { f(count * i / parts, count * (i + 1) / parts); });
}

}  // namespace rootgraft
