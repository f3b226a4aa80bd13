// Attention of a piece of work, for one instruction set. Compiled once for each, with ISA set to its name.
//
// `attend` is for a few queries, as in a decode step. Memory is what it waits for: a token's row holds all KV
// heads, so it goes through a few tokens with all heads before it takes the next ones, which are on their way
// by then. `attend_many` is for the queries of a prompt. Arithmetic is what it waits for: keys and values of a
// block of tokens are packed as float32 matrices, and two matrix products work on tiles of registers.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernel.h"
#include "scratch.h"
#include "vector.h"

namespace jaxlamina {
namespace {

constexpr int64_t kBlock = 64;  // tokens whose weights are taken from one maximum
constexpr int kTokens = W == 16 ? 8 : 4;
constexpr int kQueries = 3;
constexpr int kColumns = W == 8 ? 2 : 4;  // vectors
constexpr int kRows = 6;
constexpr float kInfinity = __builtin_inff();

// Slots of the tokens [c, c + n), and the last one's again up to a whole block.
INLINE void find_slots(const Problem& p, int64_t b, int64_t c, int64_t n, int64_t* slots) {
  const int32_t* row = p.table + b * p.C + c;
  for (int64_t i = 0; i < kBlock; i++) {
    int64_t slot = row[least(i, n - 1)];
    slots[i] = slot < 0 ? 0 : least(slot, p.S - 1);
  }
}

INLINE float as_float(uint16_t bits) {
  uint32_t wide = uint32_t{bits} << 16;
  return read<float>(&wide);
}

// A line of the rows to come, for each line of the present ones that is read: a burst of them would hold up the
// reads. Into the second cache, which has room for more requests than the first.
template <class T>
INLINE void fetch(const T* row, int64_t h) {
  if (h * sizeof(T) % 64 == 0) __builtin_prefetch(row + h, 0, 2);
}

// out[q, t] = query q times key t, for Q queries and kTokens keys.
template <class T, int Q, bool kFetch = false>
INLINE void dots(const float* q, int64_t q_step, const T* const* keys, const T* const* coming, int64_t offset,
                 int64_t H, float* out) {
  VF acc[Q][kTokens] = {};
  int64_t h = 0;
  for (; h + W <= H; h += W) {
    VF x[Q];
#pragma GCC unroll 8
    for (int i = 0; i < Q; i++) x[i] = load(q + i * q_step + h);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++) {
      VF key = load(keys[t] + offset + h);
      if (kFetch) fetch(coming[t] + offset, h);
#pragma GCC unroll 8
      for (int i = 0; i < Q; i++) acc[i][t] += x[i] * key;
    }
  }
  if (h < H) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++) {
      VF key = load_some(keys[t] + offset + h, H - h);
#pragma GCC unroll 8
      for (int i = 0; i < Q; i++) acc[i][t] += load(q + i * q_step + h) * key;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Q; i++) {
#if W == 16
    VF sums = sums_of_8(acc[i]);
#else
    VF sums = sums_of_4(acc[i]);
#endif
    __builtin_memcpy(out + i * kBlock, &sums, sizeof(float) * kTokens);
  }
}

// acc[q, h] = acc[q, h] * keep[q] + the sum over n tokens of weights[q, t] * values[t, h], for V vectors of h.
template <class T, int Q, int V, bool kFetch, bool kRest = false>
INLINE void weigh(float* acc, int64_t step, const float* keep, const float* weights, const T* const* values,
                  const T* const* coming, int64_t offset, int64_t n, int64_t rest = 0) {
  VF sum[Q][V];
#pragma GCC unroll 8
  for (int i = 0; i < Q; i++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) sum[i][j] = load(acc + i * step + j * W) * keep[i];
  for (int64_t t = 0; t < n; t++) {
    const T* value = values[t] + offset;
    VF x[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; j++)
      if (kFetch) fetch(coming[t] + offset, j * W);
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) x[j] = kRest ? load_some(value + j * W, rest) : load(value + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < Q; i++) {
      VF w = all(weights[i * kBlock + t]);
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) sum[i][j] += w * x[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Q; i++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) write(acc + i * step + j * W, sum[i][j]);
}

template <class T, int Q, bool kFetch>
INLINE void weigh_row(float* acc, int64_t step, const float* keep, const float* weights, const T* const* values,
                      const T* const* coming, int64_t offset, int64_t n, int64_t H) {
  for (int64_t h = 0; h < H;) {
    const int64_t vectors = least((H - h) / W, W == 8 ? 3 : 4);
#define WEIGH(V, ...) \
  weigh<T, Q, V, kFetch __VA_ARGS__>(acc + h, step, keep, weights, values, coming, offset + h, n, H - h)
    if (vectors == 4) WEIGH(4);
    if (vectors == 3) WEIGH(3);
    if (vectors == 2) WEIGH(2);
    if (vectors == 1) WEIGH(1);
    if (vectors == 0) WEIGH(1, , true);
#undef WEIGH
    h += most(1, vectors) * W;
  }
}

// How many of `left` queries to take next.
INLINE int64_t next_queries(int64_t left) { return left > kQueries ? (left == kQueries + 1 ? 2 : kQueries) : left; }

// The tokens a query sees, as numbers within a block.
struct Seen {
  int64_t begin, end;
  bool whole(int64_t n) const { return begin <= 0 && end >= n; }
};

// Scores to weights, in place: scales of keys, soft cap and mask before, a new maximum, e**.
// Returns what was gathered so far is to be multiplied with.
INLINE float soften(float* s, const float* scales, float cap, Seen seen, float& top, VF& sum) {
  const bool masked = !seen.whole(kBlock);
  const VI begin = all((int32_t)most(seen.begin, -1)), end = all((int32_t)least(seen.end, kBlock));
  VI at;
  for (int i = 0; i < W; i++) at[i] = i;
  VF highest = all(-kInfinity);
#pragma GCC unroll 4
  for (int64_t t = 0; t < kBlock; t += W, at += W) {
    VF x = load(s + t);
    if (scales) x *= load(scales + t);
    if (cap) x = capped(x, cap);
    if (masked) x = ((at >= begin) & (at < end)) ? x : all(-kInfinity);
    highest = maximum(highest, x);
    write(s + t, x);
  }
  const float old = top;
  top = maximum_of(highest);
  top = top > old ? top : old;
  const VF from = all(top == -kInfinity ? 0.0f : top);
  const float keep = old == -kInfinity ? 0.0f : exponential(all(old) - from)[0];
  sum *= keep;
#pragma GCC unroll 4
  for (int64_t t = 0; t < kBlock; t += W) {
    VF x = exponential(load(s + t) - from);
    sum += x;
    write(s + t, x);
  }
  return keep;
}

// Scores `s` of a piece's i-th query with the n tokens from c on, to what values are multiplied with, in place.
// Returns as `soften`.
INLINE float to_weights(const Problem& p, const Piece& w, int64_t i, int64_t c, int64_t n, float* s,
                        const float* k_scales, const float* v_scales, float& top, VF& sum) {
  const int64_t t = w.t0 + i % (w.t1 - w.t0);
  Seen seen{p.begin(w.b, t) - c, least(p.end(w.b, t) - c, n)};
  const float keep = soften(s, p.k_scales ? k_scales : nullptr, p.softcap, seen, top, sum);
  if (p.v_scales)
    for (int64_t j = 0; j < kBlock; j += W) write(s + j, load(s + j) * load(v_scales + j));
  return keep;
}

// Scales of a block's keys or values, [K, kBlock].
INLINE void gather_scales(const Problem& p, const Piece& w, const uint16_t* from, const int64_t* slots, float* to) {
  if (!from) return;
  for (int64_t k = w.k0; k < w.k1; k++)
    for (int64_t t = 0; t < kBlock; t++) to[(k - w.k0) * kBlock + t] = as_float(from[slots[t] * p.K + k]);
}

// q of a piece as [heads, T, G, padded H].
INLINE void take_queries(const Problem& p, const Piece& w, float* to) {
  const int64_t width = padded(p.H);
  for (int64_t n = w.k0 * p.G; n < w.k1 * p.G; n++)
    for (int64_t t = w.t0; t < w.t1; t++, to += width) {
      const float* from = p.q + ((w.b * p.T + t) * p.N + n) * p.H;
      for (int64_t h = 0; h < width; h++) to[h] = h < p.H ? from[h] : 0.0f;
    }
}

INLINE void start(const Problem& p, const Piece& w, int64_t rows, VF* sums) {
  const int64_t width = padded(p.H);
  for (int64_t i = 0; i < rows * width; i++) w.acc[i] = 0;
  for (int64_t i = 0; i < rows; i++) w.top[i] = -kInfinity, sums[i] = VF{};
}

template <class T>
void attend_of(const Problem& p, const Piece& w) {
  const int64_t width = padded(p.H), heads = w.k1 - w.k0, queries = w.t1 - w.t0;
  const int64_t mine = queries * p.G, rows = heads * mine, row = p.K * p.H;
  Carver carve{scratch.of(4 * (rows * width + rows * W + mine * kBlock + mine + 2 * heads * kBlock) + 64 * kBlock + 2048)};
  float* q = carve.take<float>(rows * width);
  VF* sums = carve.take<VF>(rows);
  float* scores = carve.take<float>(mine * kBlock);
  float* keep = carve.take<float>(mine);
  float* k_scales = carve.take<float>(heads * kBlock);
  float* v_scales = carve.take<float>(heads * kBlock);
  int64_t* slots = carve.take<int64_t>(kBlock);
  const T** keys = carve.take<const T*>(kBlock);
  const T** values = carve.take<const T*>(kBlock);
  const T** coming_keys = carve.take<const T*>(kBlock);
  const T** coming_values = carve.take<const T*>(kBlock);
  take_queries(p, w, q);
  start(p, w, rows, sums);
  const T *k_pool = static_cast<const T*>(p.k), *v_pool = static_cast<const T*>(p.v);
  for (int64_t c = w.c0; c < w.c1; c += kBlock) {
    const int64_t n = least(kBlock, w.c1 - c);
    find_slots(p, w.b, c, n, slots);
    for (int64_t t = 0; t < kBlock; t++) keys[t] = k_pool + slots[t] * row, values[t] = v_pool + slots[t] * row;
    gather_scales(p, w, p.k_scales, slots, k_scales);
    gather_scales(p, w, p.v_scales, slots, v_scales);
    const int64_t left = w.c1 - c - kBlock;
    if (left > 0) find_slots(p, w.b, c + kBlock, least(kBlock, left), slots);
    else if (w.next) find_slots(p, w.next->b, w.next->c0, least(kBlock, w.next->c1 - w.next->c0), slots);
    for (int64_t t = 0; t < kBlock; t++)
      coming_keys[t] = k_pool + slots[t] * row, coming_values[t] = v_pool + slots[t] * row;
    for (int64_t k = 0; k < heads; k++) {
      const int64_t offset = (w.k0 + k) * p.H;
      const float* mine_q = q + k * mine * width;
      for (int64_t t = 0; t < n; t += kTokens) {
        for (int64_t i = 0; i < mine;) {
          const int64_t take = next_queries(mine - i);
          const float* x = mine_q + i * width;
          float* s = scores + i * kBlock + t;
#define DOTS(Q) \
  i ? dots<T, Q>(x, width, keys + t, keys, offset, p.H, s) \
    : dots<T, Q, true>(x, width, keys + t, coming_keys + t, offset, p.H, s)
          if (take == 3) DOTS(3);
          if (take == 2) DOTS(2);
          if (take == 1) DOTS(1);
          i += take;
        }
      }
      for (int64_t i = 0; i < mine; i++)
        keep[i] = to_weights(p, w, i, c, n, scores + i * kBlock, k_scales + k * kBlock, v_scales + k * kBlock,
                             w.top[k * mine + i], sums[k * mine + i]);
      for (int64_t i = 0; i < mine;) {
        const int64_t take = next_queries(mine - i);
        float* acc = w.acc + (k * mine + i) * width;
        const float* s = scores + i * kBlock;
#define WEIGH(Q) \
  i ? weigh_row<T, Q, false>(acc, width, keep + i, s, values, values, offset, n, p.H) \
    : weigh_row<T, Q, true>(acc, width, keep + i, s, values, coming_values, offset, n, p.H)
        if (take == 3) WEIGH(3);
        if (take == 2) WEIGH(2);
        if (take == 1) WEIGH(1);
#undef DOTS
#undef WEIGH
        i += take;
      }
    }
  }
  for (int64_t i = 0; i < rows; i++) w.sum[i] = sum_of(sums[i]);
}

// out[r, j] (+)= a[r, i] * b[i, j] over n rows of b, for R rows and V vectors of j.
template <int R, int V>
INLINE void product(const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t n, float* out,
                    int64_t out_step, const float* keep) {
  VF sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) sum[r][j] = keep ? load(out + r * out_step + j * W) * keep[r] : VF{};
  for (int64_t i = 0; i < n; i++) {
    VF x[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) x[j] = load(b + i * b_step + j * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      VF y = all(a[r * a_step + i]);
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) sum[r][j] += y * x[j];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) write(out + r * out_step + j * W, sum[r][j]);
}

// The same for any width, a multiple of W, and rows in sixes.
INLINE void multiply(const float* a, int64_t a_step, const float* b, int64_t width, int64_t n, float* out,
                     int64_t rows, const float* keep) {
  for (int64_t j = 0; j < width;) {
    const int64_t vectors = least((width - j) / W, kColumns);
    for (int64_t r = 0; r < rows; r += kRows) {
#define PRODUCT(V) \
  product<kRows, V>(a + r * a_step, a_step, b + j, width, n, out + r * width + j, width, keep ? keep + r : nullptr)
      if (kColumns >= 4 && vectors == 4) PRODUCT(kColumns >= 4 ? 4 : 1);
      if (kColumns >= 3 && vectors == 3) PRODUCT(kColumns >= 3 ? 3 : 1);
      if (vectors == 2) PRODUCT(2);
      if (vectors == 1) PRODUCT(1);
#undef PRODUCT
    }
    j += vectors * W;
  }
}

template <class T>
INLINE void pack_keys(const T* const* keys, int64_t offset, int64_t H, float* to) {
  for (int64_t h = 0; h < H; h += W)
    for (int64_t t = 0; t < kBlock; t += W) {
      VF x[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        const T* from = keys[t + i] + offset + h;
        x[i] = h + W <= H ? load(from) : load_some(from, H - h);
      }
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) write(to + (h + i) * kBlock + t, x[i]);
    }
}

template <class T>
INLINE void pack_values(const T* const* values, int64_t offset, int64_t H, int64_t n, float* to) {
  const int64_t width = padded(H);
  for (int64_t t = 0; t < n; t++)
    for (int64_t h = 0; h < H; h += W) {
      const T* from = values[t] + offset + h;
      write(to + t * width + h, h + W <= H ? load(from) : load_some(from, H - h));
    }
}

template <class T>
void attend_many_of(const Problem& p, const Piece& w) {
  const int64_t width = padded(p.H), queries = w.t1 - w.t0, row = p.K * p.H;
  const int64_t rows = queries * p.G, whole = (rows + kRows - 1) / kRows * kRows;
  Carver carve{
      scratch.of(4 * (2 * whole * width + whole * (W + kBlock + 2) + 2 * width * kBlock + 2 * kBlock) + 64 * kBlock + 2048)};
  float* q = carve.take<float>(whole * width);
  float* acc = carve.take<float>(whole * width);
  VF* sums = carve.take<VF>(whole);
  float* scores = carve.take<float>(whole * kBlock);
  float* keep = carve.take<float>(whole);
  float* packed_k = carve.take<float>(width * kBlock);
  float* packed_v = carve.take<float>(width * kBlock);
  float* k_scales = carve.take<float>(kBlock);
  float* v_scales = carve.take<float>(kBlock);
  int64_t* slots = carve.take<int64_t>(kBlock);
  const T** keys = carve.take<const T*>(kBlock);
  const T** values = carve.take<const T*>(kBlock);
  for (int64_t i = 0; i < whole * width; i++) q[i] = acc[i] = 0;
  take_queries(p, w, q);
  for (int64_t i = 0; i < whole; i++) keep[i] = 0, sums[i] = VF{};
  for (int64_t i = 0; i < rows; i++) w.top[i] = -kInfinity;
  const T *k_pool = static_cast<const T*>(p.k), *v_pool = static_cast<const T*>(p.v);

  for (int64_t c = w.c0; c < w.c1; c += kBlock) {
    const int64_t n = least(kBlock, w.c1 - c), offset = w.k0 * p.H;
    find_slots(p, w.b, c, n, slots);
    for (int64_t t = 0; t < kBlock; t++) keys[t] = k_pool + slots[t] * row, values[t] = v_pool + slots[t] * row;
    gather_scales(p, w, p.k_scales, slots, k_scales);
    gather_scales(p, w, p.v_scales, slots, v_scales);
    pack_keys(keys, offset, p.H, packed_k);
    pack_values(values, offset, p.H, n, packed_v);
    multiply(q, width, packed_k, kBlock, p.H, scores, whole, nullptr);
    for (int64_t i = 0; i < rows; i++)
      keep[i] = to_weights(p, w, i, c, n, scores + i * kBlock, k_scales, v_scales, w.top[i], sums[i]);
    multiply(scores, kBlock, packed_v, width, n, acc, whole, keep);
  }
  for (int64_t i = 0; i < rows * width; i++) w.acc[i] = acc[i];
  for (int64_t i = 0; i < rows; i++) w.sum[i] = sum_of(sums[i]);
}

template <class T>
void add_mass_of(const Problem& p, const Piece& w) {
  const int64_t width = padded(p.H), queries = w.t1 - w.t0, heads = w.k1 - w.k0, row = p.K * p.H;
  const int64_t mine = queries * p.G;
  Carver carve{scratch.of(4 * (heads * mine * width + heads * kBlock) + 1024)};
  float* q = carve.take<float>(heads * mine * width);
  float* scales = carve.take<float>(heads * kBlock);
  int64_t slots[kBlock];
  const T* keys[kBlock];
  float scores[kBlock], total[kBlock];
  take_queries(p, w, q);
  for (int64_t c = w.c0; c < w.c1; c += kBlock) {
    const int64_t n = least(kBlock, w.c1 - c);
    find_slots(p, w.b, c, n, slots);
    for (int64_t t = 0; t < kBlock; t++) keys[t] = static_cast<const T*>(p.k) + slots[t] * row, total[t] = 0;
    gather_scales(p, w, p.k_scales, slots, scales);
    for (int64_t i = 0; i < heads * mine; i++) {
      const int64_t k = i / mine, t = w.t0 + i % queries, head = w.k0 * p.G + i / queries;
      const float lse = p.lse[(w.b * p.T + t) * p.N + head];
      Seen seen{p.begin(w.b, t) - c, least(p.end(w.b, t) - c, n)};
      if (lse == -kInfinity || seen.begin >= seen.end) continue;
      for (int64_t j = 0; j < n; j += kTokens)
        dots<T, 1>(q + i * width, width, keys + j, keys, (w.k0 + k) * p.H, p.H, scores + j);
      for (int64_t j = 0; j < kBlock; j += W) {
        VF x = load(scores + j);
        if (p.k_scales) x *= load(scales + k * kBlock + j);
        if (p.softcap) x = capped(x, p.softcap);
        write(scores + j, exponential(x - lse));
      }
      for (int64_t j = most(0, seen.begin); j < seen.end; j++) total[j] += scores[j];
    }
    for (int64_t t = 0; t < n; t++) p.mass[w.b * p.C + c + t] = total[t];
  }
}

#define BY_TYPE(f)                                                           \
  void f(const Problem& p, const Piece& w) {                                 \
    if (p.stored == Stored::kFloat32) return f##_of<float>(p, w);            \
    if (p.stored == Stored::kBfloat16) return f##_of<bf16>(p, w);            \
    if (p.stored == Stored::kFloat16) return f##_of<f16>(p, w);              \
    return f##_of<int8_t>(p, w);                                             \
  }
BY_TYPE(attend)
BY_TYPE(attend_many)
BY_TYPE(add_mass)

#if defined(__AVX2__)
// Whether processor and system have what this file is compiled for. (Not every compiler's own function for it
// works in a library.)
bool runs_here() {
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  const unsigned fma = 1u << 12, xsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
  if ((c & (fma | xsave | avx | f16c)) != (fma | xsave | avx | f16c)) return false;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
#if defined(__AVX512F__)
  const unsigned registers = 0xe6, wanted = 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
#else
  const unsigned registers = 0x6, wanted = 1u << 5;
#endif
  return (low & registers) == registers && (b & wanted) == wanted;
}
#else
bool runs_here() { return true; }
#endif

#define NAME_OF(isa) #isa
#define NAME(isa) NAME_OF(isa)

}  // namespace

extern const ProductKernel NAMED(products);
extern const Kernel NAMED(kernel);
const Kernel NAMED(kernel) = {NAME(ISA), W, runs_here, attend, attend_many, add_mass, &NAMED(products)};

}  // namespace jaxlamina
