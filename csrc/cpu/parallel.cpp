#include "cpu/parallel.h"

#include <immintrin.h>
#include <pthread.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace dflash::cpu {
namespace {

constexpr int kSpins = 2000;   // about 40 us of pauses: longer than the gap between two operators
constexpr int kYields = 1000;  // then at most half a millisecond: the gap between two steps

struct Job {
  RangeBody body;
  void* context;
  int64_t count, grain;
  std::atomic<int64_t> next{0};
  // Of several pieces that fail, the first in order is reported, however the threads ran.
  std::exception_ptr error;
  int64_t error_begin = 0;
  std::mutex error_lock;

  void work() {
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      try {
        body(context, begin, std::min(begin + grain, count));
      } catch (...) {
        const std::lock_guard hold(error_lock);
        if (!error || begin < error_begin) {
          error = std::current_exception();
          error_begin = begin;
        }
      }
    }
  }
};

class Pool {
 public:
  // One job at a time. A second caller, or a nested call, does its work alone rather than wait.
  void run(Job& job, int workers) {
    if (busy_.exchange(true, std::memory_order_acquire)) return job.work();
    grow(workers);
    job_.store(&job, std::memory_order_relaxed);
    wanted_.store(workers, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      const std::lock_guard hold(lock_);
      wake_.notify_all();
    }
    job.work();
    job_.store(nullptr, std::memory_order_seq_cst);  // nobody joins from here on
    for (int spins = 0; inside_.load(std::memory_order_seq_cst) > 0; ++spins) {
      if (spins < kSpins)
        _mm_pause();
      else
        std::this_thread::yield();
    }
    busy_.store(false, std::memory_order_release);
  }

 private:
  void grow(int workers) {
    while (int(threads_) < workers) {
      std::thread(&Pool::loop, this, threads_++, generation_.load()).detach();
    }
  }

  void loop(int index, uint64_t seen) {
    for (;;) {
      int spins = 0;
      while (generation_.load(std::memory_order_acquire) == seen) {
        if (++spins < kSpins) {
          _mm_pause();
          continue;
        }
        if (spins < kSpins + kYields) {
          std::this_thread::yield();
          continue;
        }
        std::unique_lock hold(lock_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(hold, [&] { return generation_.load(std::memory_order_seq_cst) != seen; });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = generation_.load(std::memory_order_acquire);
      inside_.fetch_add(1, std::memory_order_seq_cst);
      if (index < wanted_.load(std::memory_order_relaxed))
        if (Job* job = job_.load(std::memory_order_seq_cst)) job->work();
      inside_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  std::atomic<bool> busy_{false};
  std::atomic<Job*> job_{nullptr};
  std::atomic<int> wanted_{0}, inside_{0}, sleepers_{0};
  std::atomic<uint64_t> generation_{0};
  int threads_ = 0;
  std::mutex lock_;
  std::condition_variable wake_;
};

// A forked child has none of its parent's threads: it starts with a pool of its own. The old one is
// leaked on purpose, its mutex may be held by a thread that no longer exists.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
  (void)registered;
  Pool* current = pool.load(std::memory_order_acquire);
  if (!current) {
    Pool* fresh = new Pool;
    if (pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;
  }
  return *current;
}

}  // namespace

void parallel_ranges(int64_t count, int64_t grain, RangeBody body, void* context) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t pieces = (count + grain - 1) / grain;
  const int workers = int(std::min<int64_t>(pieces, int64_t(torch::stable::get_num_threads()))) - 1;
  if (workers <= 0) return body(context, 0, count);
  Job job{body, context, count, grain};
  the_pool().run(job, workers);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace dflash::cpu
