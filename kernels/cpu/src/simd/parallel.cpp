// The thread pool. It has one job at a time. A job is open from before the caller's first item until none is left.
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

// Time for which a worker without work keeps looking for some before it sleeps. It is longer than the caller's pauses
// between the ops of a forward pass, and shorter than those between steps.
constexpr auto kWakeful = std::chrono::microseconds(200);
constexpr int kLooks = 64;       // number of looks between two readings of the clock
constexpr int kPatience = 2000;  // number of looks at a worker's unfinished item before the caller yields its core
constexpr int kMostShares = 64;  // limit of the shares of a job; with more threads, some start with the same share
// number of counters of active workers, each on its own cache line; with more workers, some use the same counter
constexpr int kCounters = 64;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// All atomics are sequentially consistent. Three orders are required:   The caller writes run_, context_, count_,
// shares_ and next_ only while the job is closed and no worker is inside.   A worker enters (counts itself as inside)
// before it checks whether the job is open, and the caller closes the job   before it checks whether a worker is
// inside. So at least one of the two sees the other.   Likewise a worker counts itself as sleeping before its last
// check, and the caller opens the job before it checks for   sleeping workers.
class Pool {
 public:
  void run(int threads, int64_t count, int shares, void (*run)(const void*, int64_t), const void* context) {
    if (busy_.exchange(true)) {  // busy with another thread's call, or with the call of which this one is a part
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
    uint32_t id, helpers;  // helpers 0: the job is closed
  };
  struct alignas(64) Next {
    std::atomic<int64_t> item{0};
  };
  // Number of workers between entering and leaving. A single counter would move between cores twice for each worker.
  struct alignas(64) Counter {
    std::atomic<int> inside{0};
  };

  void take_items(uint32_t thread) {
    for (int i = 0; i < shares_; i++) {
      const int share = (int)((thread + i) % shares_);
      const int64_t end = share_edge(count_, share + 1, shares_);
      std::atomic<int64_t>& next = next_[share].item;
      // Checked first: with many threads most find most shares empty, and an increment takes the line from other cores.
      while (next < end) {
        const int64_t item = next++;
        if (item < end) run_(context_, item);
      }
    }
  }

  void start_workers(int wanted) {
    try {
      for (; workers_ < wanted; workers_++) std::thread(&Pool::work, this, (uint32_t)workers_).detach();
    } catch (const std::system_error&) {  // the process may have no more threads, so there are fewer
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

  // Waits for the next job that can use this worker.
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
  // std::condition_variable::wait() compiled with GCC 12 needs a libstdc++ at least that new, so pthreads are used.
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
  // On separate cache lines: the first is read all the time, the second ones are modified.
  alignas(64) std::atomic<Job> job_{Job{0, 0}};
  Next next_[kMostShares];  // for each share
  Counter counters_[kCounters];
  alignas(64) std::atomic<int> sleepers_{0};
};

Pool* pool = nullptr;  // never destroyed, as workers use it until the process ends

void make_pool() { pool = new Pool; }

}  // namespace

void run_items(int threads, int64_t count, int shares, void (*run)(const void*, int64_t), const void* context) {
  // A forked process has no workers, and its copy of the pool may look busy. So it gets a new pool.
  [[maybe_unused]] static const bool is_made = (make_pool(), pthread_atfork(nullptr, nullptr, make_pool), true);
  pool->run(threads, count, shares, run, context);
}

}  // namespace rootgraft
