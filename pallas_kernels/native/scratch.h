// Memory of a thread, which it keeps, for one instruction set's code.
#pragma once

#include <cstdint>

namespace jaxlamina {
namespace {

struct Scratch {
  char* memory = nullptr;
  int64_t size = 0;
  ~Scratch() { __builtin_free(memory); }
  char* of(int64_t n) {
    if (n > size) {
      __builtin_free(memory);
      memory = static_cast<char*>(__builtin_malloc(size = n));
    }
    return memory;
  }
};
thread_local Scratch scratch;

struct Carver {
  char* at;
  template <class T>
  T* take(int64_t n) {
    T* found = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64);
    at = reinterpret_cast<char*>(found + n);
    return found;
  }
};

}  // namespace
}  // namespace jaxlamina
