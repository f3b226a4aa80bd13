// What the two sides of the native backend share: attention.cc, which knows XLA and threads, and kernel.cc,
// which knows vectors and is compiled once per instruction set. Axes: B requests, T queries of a request,
// N query heads, K KV heads, G = N / K, H head dim, S slots, C columns of the slot table.
#pragma once

#include <cstdint>

namespace jaxlamina {

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Of weights alone: blocks of 32 along a row, as GGUF has them, in the order of their sizes.
enum class Stored { kFloat32, kBfloat16, kFloat16, kInt8, kQ4_0, kQ4_1, kQ8_0 };

struct Problem {
  int64_t B, T, N, K, G, H, S, C;
  const float* q;  // [B, T, N, H], with the scale in it
  const void* k;   // [S, K, H]
  const void* v;
  Stored stored;
  const uint16_t* k_scales;  // [S, K] bfloat16, or null
  const uint16_t* v_scales;
  const int32_t* table;      // [B, C]
  const int32_t* lengths;    // [B]
  const int32_t* positions;  // [B, T], or null: queries follow the stored tokens
  int64_t window;            // 0: none
  float softcap;             // 0: none
  float* out;   // [B, T, N, H]
  float* lse;   // [B, T, N]
  float* mass;  // [B, C], or null

  int64_t length(int64_t b) const {
    int64_t n = lengths[b];
    return n < 0 ? 0 : n > C ? C : n;
  }
  int64_t position(int64_t b, int64_t t) const { return positions ? positions[b * T + t] : lengths[b] + t; }
  // The tokens [begin, end) that query t of row b sees.
  int64_t begin(int64_t b, int64_t t) const {
    int64_t first = window ? position(b, t) - window + 1 : 0;
    return first < 0 ? 0 : first;
  }
  int64_t end(int64_t b, int64_t t) const {
    int64_t n = length(b), p = position(b, t) + 1;
    return p < 0 ? 0 : p < n ? p : n;
  }
};

// Queries [t0, t1) of row b and KV heads [k0, k1), over tokens [c0, c1).
struct Piece {
  int64_t b, t0, t1, k0, k1, c0, c1;
  // Unnormalised results: [N, T] of the piece's own, heads first. acc has `padded(H)` floats a row.
  float* acc;
  float* top;  // the maximum that weights were taken from
  float* sum;  // of weights
  const Piece* next;  // what this thread does then, or null: its first tokens are fetched
};

// y = x w^T, of a weight's rows [N, K] as they are stored.
struct Weight {
  int64_t N;
  const void* values;
  Stored stored;
  float* y;  // [M, N]
};

// Products of the same rows.
struct Products {
  int64_t M, K;
  const float* x;  // [M, K]
  float* packed;   // tiles from `first_packed` on, each [K, tile]
  int64_t first_packed;
};

// Pairs (i, i + half) of each head's first 2 * half elements turned by angles; the rest is copied.
struct Rotation {
  int64_t heads, H, half;
  const float *x, *cos, *sin;  // [rows, heads, H]; [rows, half]
  float* out;
};

struct ProductKernel {
  int64_t tile;  // rows of x
  void (*few)(const Products&, const Weight&, int64_t n0, int64_t n1);
  void (*many)(const Products&, const Weight&, int64_t n0, int64_t n1, int64_t t0, int64_t t1);
  void (*pack)(const Products&, int64_t t);
  void (*rotate)(const Rotation&, int64_t row0, int64_t row1);
};

// One instruction set's code.
struct Kernel {
  const char* name;
  int64_t width;  // floats of a vector
  bool (*runs_here)();
  void (*attend)(const Problem&, const Piece&);
  void (*attend_many)(const Problem&, const Piece&);  // the same for many queries: keys and values are packed
  void (*add_mass)(const Problem&, const Piece&);     // of a piece with all queries and heads
  const ProductKernel* products;
};

// The one in use.
const Kernel* active_kernel();

// The name of something of the instruction set that a file is compiled for.
#define JOINED_WITH(a, b) a##_##b
#define JOINED(a, b) JOINED_WITH(a, b)
#define NAMED(what) JOINED(what, ISA)

}  // namespace jaxlamina
