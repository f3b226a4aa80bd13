// Vectors of one instruction set, by the compiler's own vector types. W is how many floats one has.
// Everything has internal linkage: code for one instruction set must never be called for another's.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX2__)
#define W 8
#else
#define W 4
#endif
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

typedef float VF __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint16_t VH __attribute__((vector_size(2 * W)));
typedef int8_t VB __attribute__((vector_size(W)));

// As many floats as fill whole vectors.
INLINE int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class V>
INLINE V read(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
INLINE void write(float* p, VF v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE VF all(float x) { return x - VF{}; }
INLINE VI all(int32_t x) { return x - VI{}; }

INLINE VF load(const float* p) { return read<VF>(p); }
#if defined(__AVX512F__)
INLINE VU widen(const uint16_t* p) { return (VU)_mm512_cvtepu16_epi32(read<__m256i>(p)); }
INLINE VI widen(const uint8_t* p) { return (VI)_mm512_cvtepu8_epi32(read<__m128i>(p)); }
INLINE VF as_floats(VI x) { return _mm512_cvtepi32_ps((__m512i)x); }
INLINE VF looked_up(VF table, VI at) { return _mm512_permutexvar_ps((__m512i)at, table); }
INLINE VF load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(p))); }
INLINE VF load(const f16* p) { return _mm512_cvtph_ps(read<__m256i>(p)); }
#elif defined(__AVX2__)
INLINE VU widen(const uint16_t* p) { return (VU)_mm256_cvtepu16_epi32(read<__m128i>(p)); }
INLINE VI widen(const uint8_t* p) { return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE VF as_floats(VI x) { return _mm256_cvtepi32_ps((__m256i)x); }
INLINE VF load(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
INLINE VF load(const f16* p) { return _mm256_cvtph_ps(read<__m128i>(p)); }
#else
INLINE VU widen(const uint16_t* p) { return __builtin_convertvector(read<VH>(p), VU); }
INLINE VF as_floats(VI x) { return __builtin_convertvector(x, VF); }
INLINE VI widen(const uint8_t* p) {
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  return __builtin_convertvector(read<Bytes>(p), VI);
}
INLINE VF load(const int8_t* p) { return __builtin_convertvector(__builtin_convertvector(read<VB>(p), VI), VF); }
INLINE VF load(const f16* p) {
  // Small numbers by a difference: threads of XLA take float32's own small numbers for zeros.
  VU h = widen(&p->bits), bits = (h & 0x7fffu) << 13;
  VF small = (VF)(bits + (113u << 23)) - 0x1p-14f;
  VU x = bits < (1u << 23) ? (VU)small : bits + (bits >= (0x1fu << 23) ? 224u << 23 : 112u << 23);
  return (VF)(x | (h & 0x8000u) << 16);
}
#endif
// One number.
#if defined(__AVX2__)
INLINE float as_float(f16 x) { return _cvtsh_ss(x.bits); }
#else
INLINE float as_float(f16 x) {
  const uint16_t some[W] = {x.bits};
  return load(reinterpret_cast<const f16*>(some))[0];
}
#endif
INLINE VF load(const bf16* p) { return (VF)(widen(&p->bits) << 16); }

// The first n < W elements and zeros.
template <class T>
static __attribute__((noinline)) VF load_some(const T* p, int64_t n) {
  T some[W] = {};
  for (int64_t i = 0; i < n; i++) some[i] = p[i];
  return load(some);
}

INLINE VF maximum(VF a, VF b) { return a > b ? a : b; }

#if W == 16
#define SHUFFLE(a, b, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, xa, xb, xc, xd, xe, xf) \
  __builtin_shufflevector(a, b, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, xa, xb, xc, xd, xe, xf)
INLINE VF zip_low(VF a, VF b) { return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
INLINE VF zip_high(VF a, VF b) { return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); }
// Sums of pairs within every 128 bits, a's before b's; and sums of pairs of 128 bits.
INLINE VF add_pairs(VF a, VF b) {
  return SHUFFLE(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         SHUFFLE(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}
INLINE VF add_quads(VF a, VF b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#elif W == 8
#define SHUFFLE(a, b, x0, x1, x2, x3, x4, x5, x6, x7) __builtin_shufflevector(a, b, x0, x1, x2, x3, x4, x5, x6, x7)
INLINE VF zip_low(VF a, VF b) { return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
INLINE VF zip_high(VF a, VF b) { return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
INLINE VF add_pairs(VF a, VF b) {
  return SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
INLINE VF add_quads(VF a, VF b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
#else
#define SHUFFLE(a, b, x0, x1, x2, x3) __builtin_shufflevector(a, b, x0, x1, x2, x3)
INLINE VF zip_low(VF a, VF b) { return SHUFFLE(a, b, 0, 4, 1, 5); }
INLINE VF zip_high(VF a, VF b) { return SHUFFLE(a, b, 2, 6, 3, 7); }
INLINE VF add_pairs(VF a, VF b) { return SHUFFLE(a, b, 0, 2, 4, 6) + SHUFFLE(a, b, 1, 3, 5, 7); }
#endif

// Four vectors' sums, in the first four elements.
INLINE VF sums_of_4(const VF* x) {
  VF y = add_pairs(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
#if W >= 8
  y = add_quads(y, y);
#endif
#if W == 16
  y = add_quads(y, y);
#endif
  return y;
}
#if W == 16
// Eight vectors' sums, in the first eight elements.
INLINE VF sums_of_8(const VF* x) {
  VF y = add_pairs(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
  VF z = add_pairs(add_pairs(x[4], x[5]), add_pairs(x[6], x[7]));
  y = add_quads(y, z);
  return add_quads(y, y);
}
#endif

INLINE float sum_of(VF x) {
  float e[W];
  write(e, x);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; i++) e[i] += e[i + n];
  return e[0];
}
INLINE float maximum_of(VF x) {
  float e[W];
  write(e, x);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; i++) e[i] = e[i] > e[i + n] ? e[i] : e[i + n];
  return e[0];
}

// W vectors of W elements, transposed: each pass of the perfect shuffle turns the bits of (row, column) by one.
INLINE void transpose(VF* x) {
  for (int pass = 1; pass < W; pass *= 2) {
    VF y[W];
#pragma GCC unroll 16
    for (int i = 0; i < W / 2; i++) {
      y[2 * i] = zip_low(x[i], x[i + W / 2]);
      y[2 * i + 1] = zip_high(x[i], x[i + W / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) x[i] = y[i];
  }
}

// e**x for x <= 88, within 2 units of the last place; 0 below -87 (and for -inf), NaN for NaN.
INLINE VF exponential(VF x) {
  const float round = 0x1.8p23f;  // added and taken away, it leaves the nearest integer
  VF shifted = x * 1.44269504f + round;
  VF n = shifted - round;
  VF r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  VF p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  VF power = (VF)(((VI)shifted << 23) + (127 << 23));
  return x < -87.0f ? VF{} : p * power;
}

INLINE VF capped(VF x, float cap) {
  VF twice = x * (2.0f / cap);
  twice = twice > 40.0f ? all(40.0f) : twice < -40.0f ? all(-40.0f) : twice;
  return cap - (2.0f * cap) / (exponential(twice) + 1.0f);
}
