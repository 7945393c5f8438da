// A loop on the threads of XLA's CPU backend, and what every function that it calls needs.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

// Calls body(first, last) for parts of 0..count, each of `part` but the last, on this thread and on the pool's.
//
// A task that starts late finds nothing to do, and looks at nothing of this thread's stack. False where a body threw,
// as it does without memory: no exception may reach a pool's thread, or XLA.
template <typename Body>
[[nodiscard]] bool parallel(xla::ffi::ThreadPool& pool, int64_t count, int64_t part, const Body& body) {
  struct Work {
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<bool> failed{false};
    int64_t count, part, parts;
    const Body* body;

    void run() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
        try {
          (*body)(i* part, std::min(count, (i + 1) * part));
        } catch (const std::exception&) {
          failed.store(true, std::memory_order_relaxed);
        }
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
  return !work->failed.load(std::memory_order_relaxed);
}

// Rows of a task, a multiple of `together`, of a matrix whose rows have so many bytes: so few that threads end
// together, so many that a thread reads a long run of memory.
inline int64_t rows_of_a_task(const xla::ffi::ThreadPool& pool, int64_t rows, int64_t bytes, int64_t together) {
  constexpr int64_t kLeast = 32 << 10, kMost = 256 << 10, kTasks = 4;
  const int64_t size = std::clamp(rows * bytes / (kTasks * std::max<int64_t>(pool.num_threads(), 1)), kLeast, kMost);
  const int64_t count = (size / std::max<int64_t>(bytes, 1) + together - 1) / together;
  return std::max<int64_t>(count, 1) * together;
}

// What a function of XLA's gives where `compute` throws.
template <typename Compute>
xla::ffi::Error guarded(const Compute& compute) {
  try {
    return compute();
  } catch (const std::exception& error) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted, error.what());
  }
}

// An argument's numbers; null for one that is empty, which stands for none.
template <typename Buffer>
auto data_or_null(const Buffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

inline xla::ffi::Error out_of_memory() {
  return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted, "There is no memory for what the threads need.");
}
