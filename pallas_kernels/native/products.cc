// Products of rows with weights, as a call of XLA's: what is done by whom.
//
// Each result is computed by one thread, along all of K, so it depends neither on how the work is cut nor on how
// many threads there are.
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "kernel.h"
#include "pieces.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxlamina {
namespace {

constexpr int64_t kFew = 12;               // rows that are not worth packing
constexpr int64_t kRows = 64;              // of a weight, in a piece, at most
constexpr int64_t kChunkBytes = 1 << 20;   // of packed rows that a piece goes through
constexpr int64_t kRotated = 1 << 15;      // elements that are worth a piece
constexpr int64_t kPackedBytes = 8 << 20;  // of packed rows, kept by each thread that calls

// How a weight's rows of K numbers are stored. Blocks come as bytes, and their sizes tell which they are.
std::optional<Stored> weight_stored_as(const ffi::AnyBuffer& w, int64_t K) {
  if (w.element_type() != ffi::U8) {
    const std::optional<Stored> stored = stored_as(w.element_type());
    return stored == Stored::kInt8 || w.dimensions()[1] != K ? std::nullopt : stored;
  }
  for (const auto& [stored, n_bytes] : {std::pair{Stored::kQ4_0, 18}, {Stored::kQ4_1, 20}, {Stored::kQ8_0, 34}})
    if (K % 32 == 0 && w.dimensions()[1] == K / 32 * n_bytes) return stored;
  return std::nullopt;
}

ffi::Error products(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> n_rows,
                    ffi::RemainingArgs weights, ffi::RemainingRets results) {
  const int64_t width = active_kernel()->width;
  const ProductKernel& kernel = *active_kernel()->products;
  Products p{};
  const int64_t rows_in_all = x.dimensions()[0];
  p.M = least(rows_in_all, most(0, *n_rows.typed_data())), p.K = x.dimensions()[1], p.x = x.typed_data();
  std::vector<Weight> all(weights.size());
  for (size_t i = 0; i < all.size(); i++) {
    auto w = weights.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::AnyBuffer>(i);
    if (!w || !y) return ffi::Error::InvalidArgument("a weight or a result is missing");
    all[i].N = w->dimensions()[0], all[i].values = w->untyped_data();
    all[i].y = static_cast<float*>((*y)->untyped_data());
    const std::optional<Stored> stored = weight_stored_as(*w, p.K);
    if (!stored) return ffi::Error::InvalidArgument("weights must be float32, bfloat16, float16 or blocks of GGUF");
    all[i].stored = *stored;
    want_large_pages(all[i].values, w->size_bytes());
    std::memset(all[i].y + p.M * all[i].N, 0, sizeof(float) * (rows_in_all - p.M) * all[i].N);
  }
  if (!p.M) return ffi::Error::Success();
  int64_t n_all = 0;
  for (const Weight& w : all) n_all += w.N;
  const int64_t each = up(n_all, 8 * pool.num_threads());
  const int64_t rows = up(least(each, kRows), width) * width;
  struct Piece {
    const Weight* w;
    int64_t n0, n1, t0, t1;
  };
  std::vector<Piece> pieces;
  const auto add = [&](int64_t t0, int64_t t1) {
    for (const Weight& w : all)
      for (int64_t n = 0; n < w.N; n += rows) pieces.push_back({&w, n, least(n + rows, w.N), t0, t1});
  };
  if (p.M <= kFew) {
    add(0, 0);
    in_pieces(pool, pieces.size(), [&](int64_t i) { kernel.few(p, *pieces[i].w, pieces[i].n0, pieces[i].n1); });
    return ffi::Error::Success();
  }
  static thread_local std::vector<float> memory;
  const int64_t tiles = up(p.M, kernel.tile), tile_size = kernel.tile * p.K;
  const int64_t at_once = least(tiles, most(1, kPackedBytes / (tile_size * sizeof(float))));
  const int64_t chunk = up(tiles, up(tiles, most(1, kChunkBytes / (tile_size * sizeof(float)))));
  if (static_cast<int64_t>(memory.size()) < at_once * tile_size) memory.resize(at_once * tile_size);
  for (int64_t first = 0; first < tiles; first += at_once) {
    const int64_t end = least(tiles, first + at_once);
    p.packed = memory.data(), p.first_packed = first;
    in_pieces(pool, end - first, [&](int64_t t) { kernel.pack(p, first + t); });
    pieces.clear();
    for (int64_t t = first; t < end; t += chunk) add(t, least(t + chunk, end));
    in_pieces(pool, pieces.size(), [&](int64_t i) {
      const Piece& q = pieces[i];
      kernel.many(p, *q.w, q.n0, q.n1, q.t0, q.t1);
    });
  }
  return ffi::Error::Success();
}

ffi::Error rotation(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos,
                    ffi::Buffer<ffi::F32> sin, ffi::ResultBuffer<ffi::F32> out) {
  const auto shape = x.dimensions();
  const Rotation p{shape[1], shape[2], cos.dimensions()[1], x.typed_data(), cos.typed_data(), sin.typed_data(), out->typed_data()};
  const int64_t rows = most(1, kRotated / most(1, shape[1] * shape[2]));
  const ProductKernel& kernel = *active_kernel()->products;
  in_pieces(pool, up(shape[0], rows), [&](int64_t i) { kernel.rotate(p, i * rows, least((i + 1) * rows, shape[0])); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxlamina

extern "C" EXPORTED XLA_FFI_Error* jaxlamina_products(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxlamina_products, jaxlamina::products,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::S32>>().RemainingArgs().RemainingRets());

extern "C" EXPORTED XLA_FFI_Error* jaxlamina_rotation(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlamina_rotation, jaxlamina::rotation,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
