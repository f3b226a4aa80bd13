// What both of XLA's calls share: work in pieces, for threads of XLA's pool, and how arrays come.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "kernel.h"
#include "xla/ffi/api/ffi.h"

#define EXPORTED __attribute__((visibility("default")))

namespace jaxlamina {

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How elements of one of XLA's types are stored, of those that there are kernels for.
inline std::optional<Stored> stored_as(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::F32: return Stored::kFloat32;
    case xla::ffi::BF16: return Stored::kBfloat16;
    case xla::ffi::F16: return Stored::kFloat16;
    case xla::ffi::S8: return Stored::kInt8;
    default: return std::nullopt;
  }
}

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
