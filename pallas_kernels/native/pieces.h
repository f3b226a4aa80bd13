// Work in pieces, for threads of XLA's pool; what both of its callers share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxlamina {

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Large pages for memory that is read in no order, or once through. Asked once for an array; where the system
// does not want to, everything works as before.
void want_large_pages(const void* array, int64_t n_bytes);

// f(0), ..., f(n - 1), each once, in this thread and the pool's. The caller takes pieces, too, and waits only
// for those that somebody has taken: a pool that is busy delays nothing.
template <class F>
void in_pieces(xla::ffi::ThreadPool& pool, int64_t n, F f) {
  struct Shared {
    F f;
    int64_t n;
    std::atomic<int64_t> next{0}, done{0};
    Shared(F f, int64_t n) : f(std::move(f)), n(n) {}
    void work() {
      for (int64_t i; (i = next.fetch_add(1)) < n; done.fetch_add(1)) f(i);
    }
  };
  auto shared = std::make_shared<Shared>(std::move(f), n);
  const int64_t helpers = (pool.num_threads() < n ? pool.num_threads() : n) - 1;
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([shared] { shared->work(); });
  shared->work();
  while (shared->done.load() < n) std::this_thread::yield();
}

}  // namespace jaxlamina
