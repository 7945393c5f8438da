// A loop on the threads of XLA's CPU backend.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

// Calls body(first, last) for parts of 0..count, each of `part` but the last, on this thread and on the pool's.
//
// A task that starts late finds nothing to do, and looks at nothing of this thread's stack.
template <typename Body>
void parallel(xla::ffi::ThreadPool& pool, int64_t count, int64_t part, const Body& body) {
  struct Work {
    std::atomic<int64_t> next{0}, done{0};
    int64_t count, part, parts;
    const Body* body;

    void run() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
        (*body)(i * part, std::min(count, (i + 1) * part));
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto work = std::make_shared<Work>();
  work->count = count, work->part = part, work->parts = (count + part - 1) / part, work->body = &body;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), work->parts) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->run(); });
  work->run();
  for (int64_t spins = 0; work->done.load(std::memory_order_acquire) < work->parts; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}
