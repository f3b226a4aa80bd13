// What a model's rows go through, for one instruction set: products with weights, and rotations. Compiled once for
// each, with ISA set to its name.
//
// A few rows are multiplied where they lie: every weight is read once, as it is stored, and memory is what that
// waits for. Many rows are packed with W of them side by side, and tiles of registers go along K for some rows of
// the weight at a time; weights that are not float32 are made so once for each block of them.
#include "kernel.h"
#include "scratch.h"
#include "vector.h"

namespace jaxlamina {
namespace {

constexpr int kR = W == 16 ? 8 : 4;  // rows of the weight in a tile of many rows
constexpr int kV = 3;                // and vectors of rows
constexpr int kM = W == 16 ? 6 : 2;  // rows in a tile of a few rows; there are 4 of the weight

// One row of a weight, of which `step` vectors are read at a time.
template <class T>
struct Row {
  static constexpr int step = 1;
  const T* p;
  Row(const Weight& w, int64_t K, int64_t n) : p(static_cast<const T*>(w.values) + n * K) {}
  INLINE_MEMBER void at(int64_t k, VF v[1]) const { v[0] = load(p + k); }
  INLINE_MEMBER VF some(int64_t k, int64_t n) const { return load_some(p + k, n); }
  // The line that is wanted with the next rows: four of the weight are in a tile.
  INLINE_MEMBER void fetch(int64_t k, int64_t K) const {
    if (k * sizeof(T) % 64 == 0) __builtin_prefetch(p + 4 * K + k, 0, 2);
  }
};

// The same of weights in blocks of 32, which are GGUF's: d and, of some, m are float16, and a number is d q + m.
// What comes out is what decoding the file gives: d q is exact in float32.
struct Q4_0 {
  uint16_t d;
  uint8_t q[16];  // of numbers i and i + 16, each from -8 on
};
struct Q4_1 {
  uint16_t d, m;
  uint8_t q[16];  // of numbers i and i + 16
};
struct Q8_0 {
  uint16_t d;
  int8_t q[32];
};
static_assert(sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20 && sizeof(Q8_0) == 34);

INLINE VF number(const Q4_0& b, VF q) { return (q - 8.0f) * as_float(f16{b.d}); }
INLINE VF number(const Q4_1& b, VF q) { return q * as_float(f16{b.d}) + as_float(f16{b.m}); }

// A block's numbers.
INLINE void decode(const Q8_0& b, VF v[32 / W]) {
  const float d = as_float(f16{b.d});
#pragma GCC unroll 8
  for (int i = 0; i < 32 / W; i++) v[i] = load(b.q + i * W) * d;
}
template <class B>
INLINE void decode(const B& b, VF v[32 / W]) {
#if W == 16
  // All numbers that a block may have are looked up by its q's; a lane's index is its lowest four bits.
  const VF each = number(b, VF{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  const VI q = widen(b.q);
  v[0] = looked_up(each, q);
  v[1] = looked_up(each, q >> 4);
#else
#pragma GCC unroll 4
  for (int i = 0; i < 16 / W; i++) {
    const VI q = widen(b.q + i * W);
    v[i] = number(b, as_floats(q & 15));
    v[i + 16 / W] = number(b, as_floats(q >> 4));
  }
#endif
}

template <class B>
struct Blocks {
  static constexpr int step = 32 / W;
  const B* p;
  Blocks(const Weight& w, int64_t K, int64_t n) : p(static_cast<const B*>(w.values) + n * (K / 32)) {}
  INLINE_MEMBER void at(int64_t k, VF v[32 / W]) const { decode(p[k / 32], v); }
  INLINE_MEMBER VF some(int64_t, int64_t) const { return VF{}; }  // rows are whole blocks
  INLINE_MEMBER void fetch(int64_t k, int64_t K) const {
    if (k % 64 == 0) __builtin_prefetch(reinterpret_cast<const char*>(p + 4 * (K / 32) + k / 32), 0, 2);
  }
};

// A row as floats.
template <class Rows>
INLINE void decode_row(const Rows& row, int64_t K, float* to) {
  int64_t k = 0;
  for (; k + Rows::step * W <= K; k += Rows::step * W) {
    VF v[Rows::step];
    row.at(k, v);
#pragma GCC unroll 8
    for (int s = 0; s < Rows::step; s++) write(to + k + s * W, v[s]);
  }
  if (k < K) {
    VF rest = row.some(k, K - k);
    __builtin_memcpy(to + k, &rest, sizeof(float) * (K - k));
  }
}

// y[m, 0 ... R) for R rows of the weight (1 or 4; `rows` has 4) and M rows of x.
template <int R, int M, class Rows>
INLINE void dots(const Rows* rows, const float* x, int64_t K, float* y, int64_t N) {
  constexpr int S = Rows::step;
  VF acc[M][4] = {};
  int64_t k = 0;
  for (; k + S * W <= K; k += S * W) {
    VF v[R][S];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      rows[r].at(k, v[r]);
      rows[r].fetch(k, K);
    }
#pragma GCC unroll 8
    for (int s = 0; s < S; s++)
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        VF each = load(x + m * K + k + s * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[m][r] += each * v[r][s];
      }
  }
  if (k < K) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      VF v = rows[r].some(k, K - k);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) acc[m][r] += load_some(x + m * K + k, K - k) * v;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    VF sums = sums_of_4(acc[m]);
    __builtin_memcpy(y + m * N, &sums, sizeof(float) * R);
  }
}

template <int R, class Rows>
INLINE void few_rows(const Rows* rows, const float* x, int64_t M, int64_t K, float* y, int64_t N) {
  for (int64_t m = 0; m < M;) {
    const int64_t left = M - m;
    const int64_t take = left <= kM ? left : left < 2 * kM ? (left + 1) / 2 : kM;
#define DOTS(M) dots<R, M>(rows, x + m * K, K, y + m * N, N)
    if (take == 1) DOTS(1);
    if (take == 2) DOTS(2);
    if constexpr (kM > 2) {
      if (take == 3) DOTS(3);
      if (take == 4) DOTS(4);
      if (take == 5) DOTS(5);
      if (take == 6) DOTS(6);
    }
#undef DOTS
    m += take;
  }
}

// Rows [n, n + R) of a weight.
template <int R, class Rows>
INLINE void few_at(const Products& p, const Weight& w, int64_t n) {
  const Rows rows[4] = {{w, p.K, n}, {w, p.K, n + (R > 1)}, {w, p.K, n + 2 * (R > 1)}, {w, p.K, n + 3 * (R > 1)}};
  few_rows<R>(rows, p.x, p.M, p.K, w.y + n, w.N);
}

template <class Rows>
void few_of(const Products& p, const Weight& w, int64_t n0, int64_t n1) {
  int64_t n = n0;
  for (; n + 4 <= n1; n += 4) few_at<4, Rows>(p, w, n);
  for (; n < n1; n++) few_at<1, Rows>(p, w, n);
}

// Tile t of the rows of x, packed: [K][kV * W], zeros where there are none.
void pack(const Products& p, int64_t t) {
  constexpr int64_t tile = kV * W;
  for (int64_t j = 0; j < tile; j += W) {
    const int64_t first = t * tile + j;
    float* to = p.packed + (t - p.first_packed) * tile * p.K + j;
    for (int64_t k = 0; k < p.K; k += W) {
      VF x[W];
      const int64_t n = least(p.K - k, W);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        const float* from = p.x + (first + i) * p.K + k;
        x[i] = first + i >= p.M ? VF{} : n == W ? load(from) : load_some(from, n);
      }
      transpose(x);
      if (n == W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) write(to + (k + i) * tile, x[i]);
      } else {
        for (int64_t i = 0; i < n; i++) write(to + (k + i) * tile, x[i]);
      }
    }
  }
}

// acc[r, m] += for columns [k, k + n).
template <int V>
INLINE void multiply(const float* w, int64_t K, const float* x, int64_t n, VF acc[kR][V]) {
#pragma GCC unroll 2
  for (int64_t k = 0; k < n; k++) {
    VF v[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) v[j] = load(x + k * kV * W + j * W);
#pragma GCC unroll 8
    for (int r = 0; r < kR; r++) {
      VF each = all(w[r * K + k]);
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) acc[r][j] += each * v[j];
    }
  }
}

// out[r, m] for kR rows of weights and V vectors of rows of x. The rows of weights after them are fetched.
template <int V>
INLINE void tile_of(const float* w, int64_t K, const float* x, float* out) {
  VF acc[kR][V] = {};
  int64_t k = 0;
  for (; k + 16 <= K; k += 16) {
#pragma GCC unroll 8
    for (int r = 0; r < kR; r++) __builtin_prefetch(w + (kR + r) * K + k, 0, 2);
    multiply<V>(w + k, K, x + k * kV * W, 16, acc);
  }
  multiply<V>(w + k, K, x + k * kV * W, K - k, acc);
#pragma GCC unroll 8
  for (int r = 0; r < kR; r++)
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) write(out + r * kV * W + j * W, acc[r][j]);
}

template <class Rows>
void many_of(const Products& p, const Weight& w, int64_t n0, int64_t n1, int64_t t0, int64_t t1) {
  constexpr int64_t tile = kV * W;
  constexpr bool as_it_is = __is_same(Rows, Row<float>);
  const int64_t whole = padded(p.K);
  Carver carve{scratch.of(4 * (W * whole + W * tile) + 256)};
  float* block = carve.take<float>(W * whole);
  float* out = carve.take<float>(W * tile);
  for (int64_t n = n0; n < n1; n += W) {
    const int64_t rows = least(n1 - n, W);
    const float* from = block;
    if (as_it_is && rows == W) {
      from = static_cast<const float*>(w.values) + n * p.K;
    } else {
      for (int64_t r = 0; r < W; r++) decode_row(Rows(w, p.K, n + (r < rows ? r : 0)), p.K, block + r * p.K);
    }
    for (int64_t t = t0; t < t1; t++) {
      const int64_t m0 = t * tile, left = least(p.M - m0, tile);
      const float* x = p.packed + (t - p.first_packed) * tile * p.K;
      const int64_t vectors = (left + W - 1) / W;
      for (int64_t r = 0; r < W; r += kR) {
        const float* mine = from + r * p.K;
        if (vectors == 1) tile_of<1>(mine, p.K, x, out + r * tile);
        if (vectors == 2) tile_of<2>(mine, p.K, x, out + r * tile);
        if (vectors == 3) tile_of<3>(mine, p.K, x, out + r * tile);
      }
      for (int64_t j = 0; j < left; j += W) {
        VF y[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) y[i] = load(out + i * tile + j);
        transpose(y);
        float* to = w.y + (m0 + j) * w.N + n;
        if (rows == W && left - j >= W) {
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) write(to + i * w.N, y[i]);
        } else {
          for (int64_t i = 0; i < W && i < left - j; i++) __builtin_memcpy(to + i * w.N, &y[i], sizeof(float) * rows);
        }
      }
    }
  }
}

#define BY_STORED(call)                                \
  switch (w.stored) {                                  \
    case Stored::kFloat32: return call(Row<float>);    \
    case Stored::kBfloat16: return call(Row<bf16>);    \
    case Stored::kQ4_0: return call(Blocks<Q4_0>);     \
    case Stored::kQ4_1: return call(Blocks<Q4_1>);     \
    case Stored::kQ8_0: return call(Blocks<Q8_0>);     \
    default: return call(Row<f16>);                    \
  }
void few(const Products& p, const Weight& w, int64_t n0, int64_t n1) {
#define FEW(Rows) few_of<Rows>(p, w, n0, n1)
  BY_STORED(FEW)
}

void many(const Products& p, const Weight& w, int64_t n0, int64_t n1, int64_t t0, int64_t t1) {
#define MANY(Rows) many_of<Rows>(p, w, n0, n1, t0, t1)
  BY_STORED(MANY)
}

void rotate(const Rotation& p, int64_t row0, int64_t row1) {
  for (int64_t row = row0; row < row1; row++) {
    const float *cos = p.cos + row * p.half, *sin = p.sin + row * p.half;
    for (int64_t head = 0; head < p.heads; head++) {
      const int64_t at = (row * p.heads + head) * p.H;
      const float *a = p.x + at, *b = a + p.half;
      float *to_a = p.out + at, *to_b = to_a + p.half;
      int64_t i = 0;
      for (; i + W <= p.half; i += W) {
        const VF x = load(a + i), y = load(b + i), c = load(cos + i), s = load(sin + i);
        write(to_a + i, x * c - y * s);
        write(to_b + i, y * c + x * s);
      }
      for (; i < p.half; i++) {
        to_a[i] = a[i] * cos[i] - b[i] * sin[i];
        to_b[i] = b[i] * cos[i] + a[i] * sin[i];
      }
      for (i = 2 * p.half; i < p.H; i++) to_a[i] = a[i];
    }
  }
}

}  // namespace

extern const ProductKernel NAMED(products);
const ProductKernel NAMED(products) = {kV * W, few, many, pack, rotate};

}  // namespace jaxlamina
