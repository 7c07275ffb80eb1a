// The pool. It has one job at a time, open from before the caller's first item until the caller finds none left.
#include "simd/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

namespace rootgraft {
namespace {

// A worker that finds nothing to do looks again for this long before it sleeps: longer than the caller's pauses
// between the ops of a forward pass, shorter than those between steps.
constexpr auto kWakeful = std::chrono::microseconds(200);
constexpr int kLooks = 64;       // looks between two readings of the clock
constexpr int kPatience = 2000;  // looks at a worker's unfinished item before the caller offers it its core
constexpr int kMostShares = 64;  // of a job: more threads than these begin with the same ones
constexpr int kCounters = 64;    // of workers inside, on a cache line each: more workers than these share them

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// All atomics are sequentially consistent, and three orders matter:
//   the caller writes run_, context_, count_, shares_ and next_ only while the job is closed and no worker is inside;
//   a worker enters (inside) before it looks whether the job is open, and the caller closes the job before it looks
//   whether a worker is inside: one of the two sees the other;
//   likewise a worker counts itself a sleeper before its last look, and the caller opens before it looks for sleepers.
class Pool {
 public:
  void run(int threads, int64_t count, int shares, void (*run)(const void*, int64_t), const void* context) {
    if (busy_.exchange(true)) {  // with another thread's call, or with the one that this call is part of
      for (int64_t i = 0; i < count; i++) run(context, i);
      return;
    }
    start_workers(threads - 1);
    run_ = run;
    context_ = context;
    count_ = count;
    shares_ = (int)std::min<int64_t>(std::min(shares, kMostShares), count);
    for (int i = 0; i < shares_; i++) next_[i].item = share_edge(count, i, shares_);
    job_ = Job{++last_id_, (uint32_t)std::min<int64_t>(threads - 1, count - 1)};
    if (sleepers_) wake();
    take_items(0);
    job_ = Job{last_id_, 0};
    int looks = 0;
    for (int i = 0; i < std::min(workers_, kCounters); i++) {
      for (; counters_[i].inside; looks++) looks < kPatience ? pause() : std::this_thread::yield();
    }
    busy_ = false;
  }

 private:
  struct Job {
    uint32_t id, helpers;  // no helpers: closed
  };
  struct alignas(64) Next {
    std::atomic<int64_t> item{0};
  };
  // Of workers between entering and leaving. One counter for all would go from core to core twice for each.
  struct alignas(64) Counter {
    std::atomic<int> inside{0};
  };

  void take_items(uint32_t thread) {
    for (int i = 0; i < shares_; i++) {
      const int share = (int)((thread + i) % shares_);
      const int64_t end = share_edge(count_, share + 1, shares_);
      std::atomic<int64_t>& next = next_[share].item;
      // Looked at first: with many threads most find most shares empty, and an increment takes the line from others.
      while (next < end) {
        const int64_t item = next++;
        if (item < end) run_(context_, item);
      }
    }
  }

  void start_workers(int wanted) {
    try {
      for (; workers_ < wanted; workers_++) std::thread(&Pool::work, this, (uint32_t)workers_).detach();
    } catch (const std::system_error&) {  // no more threads for this process: do with fewer
    }
  }

  void wake() {
    { std::lock_guard<std::mutex> hold(mutex_); }
    pthread_cond_broadcast(&condition_);
  }

  [[noreturn]] void work(uint32_t index) {
    std::atomic<int>& inside = counters_[index % kCounters].inside;
    for (uint32_t done = 0;;) {
      const Job job = await(index, done);
      done = job.id;
      inside++;
      const Job now = job_;
      if (now.id == job.id && now.helpers) take_items(index + 1);
      inside--;
    }
  }

  // The next job that has use for this worker.
  Job await(uint32_t index, uint32_t done) {
    Job job;
    const auto ready = [&] {
      job = job_;
      return job.id != done && index < job.helpers;
    };
    for (auto until = std::chrono::steady_clock::now() + kWakeful; std::chrono::steady_clock::now() < until;) {
      for (int i = 0; i < kLooks; i++, pause()) {
        if (ready()) return job;
      }
    }
    std::lock_guard<std::mutex> hold(mutex_);
    sleepers_++;
    while (!ready()) pthread_cond_wait(&condition_, mutex_.native_handle());
    sleepers_--;
    return job;
  }

  void (*run_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  int shares_ = 1;
  int workers_ = 0;
  uint32_t last_id_ = 0;
  std::atomic<bool> busy_{false};
  std::mutex mutex_;
  // The wait of std::condition_variable is in no libstdc++ older than GCC 12's, where that has compiled it.
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
  // On cache lines of their own: the first is looked at all the time, those of the second are taken from.
  alignas(64) std::atomic<Job> job_{Job{0, 0}};
  Next next_[kMostShares];  // of each share
  Counter counters_[kCounters];
  alignas(64) std::atomic<int> sleepers_{0};
};

Pool* pool = nullptr;  // never destroyed: workers use it until the process ends

void make_pool() { pool = new Pool; }

}  // namespace

void run_items(int threads, int64_t count, int shares, void (*run)(const void*, int64_t), const void* context) {
  // A forked process has no workers, and may find one inside that was about to leave, or the pool busy: it gets a new one.
  [[maybe_unused]] static const bool is_made = (make_pool(), pthread_atfork(nullptr, nullptr, make_pool), true);
  pool->run(threads, count, shares, run, context);
}

}  // namespace rootgraft
