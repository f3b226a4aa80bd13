// Partial attention over token-granular KV slots, as a call of XLA's: what is done by whom.
//
// The work is cut into pieces: some queries of a request, some KV heads, some of the tokens they see. Threads
// take pieces until none is left, and whoever ends the last piece of a group puts the group's together. How it
// is cut depends on one request alone, so its result does not depend on who is in the batch, nor on how many
// threads there are.
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernel.h"
#include "pieces.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxlamina {

#if defined(__x86_64__)
extern const Kernel kernel_avx512, kernel_avx2, kernel_sse2;
static const Kernel* const kKernels[] = {&kernel_avx512, &kernel_avx2, &kernel_sse2};
#elif defined(__aarch64__)
extern const Kernel kernel_neon;
static const Kernel* const kKernels[] = {&kernel_neon};
#else
extern const Kernel kernel_portable;
static const Kernel* const kKernels[] = {&kernel_portable};
#endif

static const Kernel* best() {
  for (const Kernel* kernel : kKernels)
    if (kernel->runs_here()) return kernel;
  return nullptr;
}
static std::atomic<const Kernel*> active{best()};
const Kernel* active_kernel() { return active.load(); }

#if defined(__linux__)
constexpr int64_t kSmall = 1 << 19;  // bytes: less is not worth a large page

static int advise(const void* array, int64_t n_bytes, int advice) {
  constexpr int64_t kLarge = 2 << 20;
  const int64_t begin = reinterpret_cast<int64_t>(array) / kLarge * kLarge;
  const int64_t end = up(reinterpret_cast<int64_t>(array) + n_bytes, kLarge) * kLarge;
  return madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}
#endif

// With small pages nearly every row of a pool has its address looked up in memory first. What has been written to is
// copied into large ones, which takes longer than to write it.
void want_large_pages(const void* array, int64_t n_bytes) {
#if defined(__linux__)
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1
  static std::mutex mutex;
  static std::map<const void*, int64_t> asked;
  if (n_bytes < kSmall) return;
  std::lock_guard<std::mutex> lock(mutex);
  int64_t& known = asked[array];
  if (known == n_bytes) return;
  known = n_bytes;
  advise(array, n_bytes, MADV_HUGEPAGE);
  advise(array, n_bytes, kCollapse);
#endif
}

// Zeros in large pages from the start, where the memory is fresh: that of all but small arrays is.
static ffi::Error zeros(ffi::Result<ffi::AnyBuffer> out) {
  const int64_t n_bytes = out->size_bytes();
#if defined(__linux__)
  if (n_bytes >= kSmall) advise(out->untyped_data(), n_bytes, MADV_HUGEPAGE);
#endif
  std::memset(out->untyped_data(), 0, n_bytes);
  return ffi::Error::Success();
}

namespace {

constexpr int64_t kFew = 16;          // rows of queries of a KV head that are not worth packing for
constexpr int64_t kTile = 96;         // rows of a packed product
constexpr int64_t kPart = 256;        // tokens that are worth a piece of their own
constexpr int64_t kMaxParts = 32;
constexpr float kInfinity = __builtin_inff();

struct Group {
  int64_t first, parts, rows;
  std::atomic<int64_t> left;
};

struct Job {
  Problem p;
  const Kernel* kernel;
  bool mass;  // whether it is the mass that is computed: log-sum-exps are known by then
  bool few;   // whether a piece has all queries and heads
  int64_t width;
  std::vector<Piece> pieces;
  std::vector<int64_t> group_of;
  std::vector<Group> groups;
  std::unique_ptr<float[]> memory;
  int64_t ahead = 0;  // pieces before this one are followed by one that is known
  std::atomic<int64_t> next{0}, done{0};

  Job(const Problem& problem, bool of_mass) : p(problem), kernel(active.load()), mass(of_mass) {
    few = mass || p.T * p.G <= kFew;
    width = up(p.H, kernel->width) * kernel->width;
    const int64_t queries = few ? p.T : std::max<int64_t>(1, kTile / p.G);
    const int64_t heads = few ? p.K : 1, tiles = up(p.T, queries);
    groups = std::vector<Group>(p.B * tiles * (p.K / heads));
    int64_t rows_in_all = 0, g = 0;
    // Later queries see more: they come first, so that the last pieces are short ones.
    for (int64_t tile = tiles - 1; tile >= 0; tile--)
      for (int64_t b = 0; b < p.B; b++) {
        const int64_t t0 = tile * queries, t1 = std::min(p.T, t0 + queries);
        int64_t begin = p.C, end = 0;
        for (int64_t t = t0; t < t1; t++) {
          if (p.begin(b, t) >= p.end(b, t)) continue;
          begin = std::min(begin, p.begin(b, t)), end = std::max(end, p.end(b, t));
        }
        const int64_t tokens = std::max<int64_t>(0, end - begin);
        const int64_t parts = few || tiles == 1 ? std::min(kMaxParts, std::max<int64_t>(1, up(tokens, kPart))) : 1;
        const int64_t share = up(up(tokens, parts), 16) * 16;
        for (int64_t k = 0; k < p.K; k += heads, g++) {
          Group& group = groups[g];
          group.first = pieces.size(), group.rows = (t1 - t0) * heads * p.G;
          for (int64_t c = begin; c < end || c == begin; c += std::max<int64_t>(1, share)) {
            pieces.push_back({b, t0, t1, k, k + heads, std::min(c, end), std::min(c + share, end), nullptr, nullptr, nullptr, nullptr});
            group_of.push_back(g);
            if (!tokens) break;
          }
          group.parts = pieces.size() - group.first;
          group.left = group.parts;
          rows_in_all += group.parts * group.rows;
        }
      }
    if (mass) return;
    memory.reset(new float[rows_in_all * (width + 2)]);
    float* at = memory.get();
    for (size_t i = 0; i < pieces.size(); i++) {
      const int64_t rows = groups[group_of[i]].rows;
      pieces[i].acc = at, pieces[i].top = at + rows * width, pieces[i].sum = pieces[i].top + rows;
      at += rows * (width + 2);
    }
  }

  int64_t size() const { return pieces.size(); }

  void work() {
    for (int64_t i = next.fetch_add(1), following; i < size(); i = following) {
      // One piece ahead, so that its tokens can be fetched; but not of the last ones, which others may wait for.
      following = i < ahead ? next.fetch_add(1) : size();
      Piece& piece = pieces[i];
      if (following < size()) piece.next = &pieces[following];
      Group& group = groups[group_of[i]];
      (mass ? kernel->add_mass : few ? kernel->attend : kernel->attend_many)(p, piece);
      if (!mass && group.left.fetch_sub(1) == 1) finish(group);
      done.fetch_add(1);
      if (i >= ahead) following = next.fetch_add(1);
    }
  }

  // out and lse of a group's queries from its pieces, in the order of their tokens.
  void finish(const Group& group) {
    const Piece* part = &pieces[group.first];
    const int64_t queries = part->t1 - part->t0;
    for (int64_t i = 0; i < group.rows; i++) {
      const int64_t n = part->k0 * p.G + i / queries, at = (part->b * p.T + part->t0 + i % queries) * p.N + n;
      float* out = p.out + at * p.H;
      float top = -kInfinity, total = 0;
      for (int64_t j = 0; j < group.parts; j++) top = std::max(top, part[j].top[i]);
      const float from = top == -kInfinity ? 0 : top;
      for (int64_t j = 0; j < group.parts; j++) total += part[j].sum[i] * std::exp(part[j].top[i] - from);
      p.lse[at] = std::log(total) + from;
      const float share = total == 0 ? 0 : 1 / total;
      for (int64_t j = 0; j < group.parts; j++) {
        const float weight = share * std::exp(part[j].top[i] - from), *acc = part[j].acc + i * width;
        for (int64_t h = 0; h < p.H; h++) out[h] = (j ? out[h] : 0) + weight * acc[h];
      }
    }
  }
};

// Threads of XLA's pool help. The caller takes pieces, too, and waits only for pieces that somebody has taken:
// a pool that is busy delays nothing, and calls within calls cannot wait for each other.
void run(std::shared_ptr<Job> job, ffi::ThreadPool& pool) {
  const int64_t helpers = std::min(pool.num_threads(), job->size()) - 1;
  job->ahead = job->few ? job->size() - 3 * (helpers + 1) : 0;
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([job] { job->work(); });
  job->work();
  while (job->done.load() < job->size()) std::this_thread::yield();
}

ffi::Error attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::AnyBuffer k_scales, ffi::AnyBuffer v_scales, ffi::Buffer<ffi::S32> table,
                     ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> positions,
                     ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> lse,
                     ffi::ResultBuffer<ffi::F32> mass, int64_t window, float softcap) {
  Problem p{};
  auto qs = q.dimensions(), ks = k.dimensions();
  p.B = qs[0], p.T = qs[1], p.N = qs[2], p.H = qs[3], p.S = ks[0], p.K = ks[1], p.G = p.N / p.K;
  p.C = table.dimensions()[1];
  const std::optional<Stored> stored = stored_as(k.element_type());
  if (!stored) return ffi::Error::InvalidArgument("pools must be float32, bfloat16, float16 or int8");
  p.stored = *stored;
  if (v.element_type() != k.element_type()) return ffi::Error::InvalidArgument("pools must be of one dtype");
  p.q = q.typed_data(), p.k = k.untyped_data(), p.v = v.untyped_data();
  p.k_scales = k_scales.element_count() ? static_cast<const uint16_t*>(k_scales.untyped_data()) : nullptr;
  p.v_scales = v_scales.element_count() ? static_cast<const uint16_t*>(v_scales.untyped_data()) : nullptr;
  p.table = table.typed_data(), p.lengths = lengths.typed_data();
  p.positions = positions.element_count() ? positions.typed_data() : nullptr;
  p.window = window, p.softcap = softcap;
  p.out = out->typed_data(), p.lse = lse->typed_data();
  p.mass = mass->element_count() ? mass->typed_data() : nullptr;
  if (p.mass) std::memset(p.mass, 0, sizeof(float) * p.B * p.C);
  if (!p.B || !p.T) return ffi::Error::Success();
  want_large_pages(p.k, k.size_bytes());
  want_large_pages(p.v, v.size_bytes());
  run(std::make_shared<Job>(p, false), pool);
  if (p.mass) run(std::make_shared<Job>(p, true), pool);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxlamina

extern "C" EXPORTED XLA_FFI_Error* jaxlamina_attention(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlamina_attention, jaxlamina::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap"));

// The version of XLA's FFI that this is built for.
extern "C" EXPORTED XLA_FFI_Error* jaxlamina_zeros(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlamina_zeros, jaxlamina::zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

extern "C" EXPORTED int jaxlamina_ffi_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

// The instruction set in use; with a name, that one from now on, or null where this processor does not have it.
extern "C" EXPORTED const char* jaxlamina_instructions(const char* name) {
  using namespace jaxlamina;
  if (!name) return active.load()->name;
  for (const Kernel* kernel : kKernels) {
    if (std::strcmp(kernel->name, name) || !kernel->runs_here()) continue;
    active = kernel;
    return kernel->name;
  }
  return nullptr;
}
