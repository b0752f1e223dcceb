// SPDX-License-Identifier: Apache-2.0
// Every path of the CPU backend by itself, whichever the library would choose: f32, and bf16 and int8 keys and values by AMX and
// by AVX-512 BF16, against the FMA peak of the same run. Each cell is checked: sampled rows against fp64.
//   bench_cpu_paths [--threads N] [--max-tokens N] [--seconds S per cell] [--tiles]
// --tiles measures the tiles of each path instead, at 4096 tokens. Exits 1 when a result is wrong.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "backends/cqsa_backend.h"
#include "fma_peak.h"
#include "src/dtype.h"
#include "src/thread_pool.h"

namespace {

constexpr int64_t heads = 16;
constexpr int64_t group = 64;  // channels per int8 scale

struct options {
  int threads = cqsa::available_cores();
  int64_t max_tokens = 16384;
  double seconds = 0.25;
  bool tiles = false;
};

uint32_t random_word(uint64_t i) {  // splitmix64
  uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return uint32_t((z ^ (z >> 31)) >> 32);
}

// q, k, v for the largest problem, of variance 1, in each type; smaller ones take the first of each.
struct operands {
  std::vector<float> f32[3];
  std::vector<uint16_t> bf16[3];
  std::vector<int8_t> i8[3];       // k and v: value = i8 * scale
  std::vector<uint16_t> scale[3];  // f16 for each group of channels
  std::vector<float> out;

  explicit operands(int64_t count, cqsa::thread_pool& pool) {
    out.resize(size_t(count));
    for (int t = 0; t < 3; ++t) {
      f32[t].resize(size_t(count)), bf16[t].resize(size_t(count)), i8[t].resize(size_t(count));
      scale[t].resize(size_t(count / group));
    }
    struct job { operands& x; int64_t count; } j{*this, count};
    pool.run(64, [](void* data, int64_t n) {
      job& j = *static_cast<job*>(data);
      for (int t = 0; t < 3; ++t)
        for (int64_t g = j.count / group * n / 64; g < j.count / group * (n + 1) / 64; ++g) j.x.fill_group(t, g);
    }, &j);
  }
  void fill_group(int t, int64_t g) {
    const uint16_t code = cqsa::f32_to_f16(float(1 + random_word(uint64_t(g) * 3 + uint64_t(t)) % 8) / 512);
    scale[t][size_t(g)] = code;
    for (int64_t i = g * group; i < (g + 1) * group; ++i) {
      const uint32_t word = random_word(uint64_t(i) * 3 + uint64_t(t));
      const float x = (float(word >> 8) * 0x1p-23f - 1) * 1.7320508f;  // uniform
      bf16[t][size_t(i)] = cqsa::f32_to_bf16(x);
      f32[t][size_t(i)] = cqsa::bf16_to_f32(bf16[t][size_t(i)]);       // the same numbers: one fp64 truth for both
      i8[t][size_t(i)] = int8_t(std::clamp(x / cqsa::f16_to_f32(code), -127.0f, 127.0f));
    }
  }
  double value(int t, size_t i, bool as_i8) const {
    return as_i8 ? double(i8[t][i]) * double(cqsa::f16_to_f32(scale[t][i / size_t(group)])) : double(f32[t][i]);
  }
};

enum kind { f32, bf16, int8 };

struct problem {
  kind type;
  int64_t tokens, dim;
  bool causal;
  double flops() const { return 4.0 * heads * double(tokens) * double(tokens) * double(dim) * (causal ? 0.5 : 1.0); }
};

cqsa_attention_leaf leaf_of(const problem& p, operands& x) {
  cqsa_attention_leaf leaf{};
  leaf.struct_size = sizeof leaf;
  leaf.batch = 1, leaf.num_heads = leaf.num_kv_heads = heads;
  leaf.head_dim = leaf.head_dim_v = p.dim;
  leaf.seqlen_q = leaf.seqlen_k = p.tokens;
  leaf.softmax_scale = 1 / std::sqrt(double(p.dim));
  leaf.window_left = leaf.window_right = -1;
  leaf.causal = p.causal ? CQSA_CAUSAL_TOP_LEFT : CQSA_CAUSAL_NONE;
  auto view = [&](void* data, cqsa_dtype type, int64_t channels) {
    return cqsa_view{data, type, 0, {heads * p.tokens * channels, p.tokens * channels, channels, 1}};
  };
  cqsa_view* const to[3] = {&leaf.q, &leaf.k, &leaf.v};
  for (int t = 0; t < 3; ++t) {
    if (p.type == f32) *to[t] = view(x.f32[t].data(), CQSA_DTYPE_F32, p.dim);
    else if (p.type == bf16 || t == 0) *to[t] = view(x.bf16[t].data(), CQSA_DTYPE_BF16, p.dim);
    else *to[t] = view(x.i8[t].data(), CQSA_DTYPE_I8, p.dim);
  }
  if (p.type == int8) {
    leaf.scale_k = leaf.scale_v = CQSA_SCALE_GROUP, leaf.kv_group = group;
    leaf.k_scale = view(x.scale[1].data(), CQSA_DTYPE_F16, p.dim / group);
    leaf.v_scale = view(x.scale[2].data(), CQSA_DTYPE_F16, p.dim / group);
  }
  leaf.out = view(x.out.data(), CQSA_DTYPE_F32, p.dim);
  return leaf;
}

// Largest error of 16 sampled rows against fp64.
double sampled_error(const problem& p, const operands& x) {
  double worst = 0;
  std::vector<double> weight(static_cast<size_t>(p.tokens)), sum(static_cast<size_t>(p.dim));
  const bool as_i8 = p.type == int8;
  for (int64_t sample = 0; sample < 16; ++sample) {
    const int64_t row = sample == 0 ? 0 : p.tokens - 1 - int64_t(random_word(uint64_t(sample))) % p.tokens;
    const size_t base = size_t(sample % heads * p.tokens * p.dim), at = base + size_t(row * p.dim);
    const int64_t keys = p.causal ? row + 1 : p.tokens;
    double top = -HUGE_VAL, total = 0;
    for (int64_t j = 0; j < keys; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < p.dim; ++c) dot += x.value(0, at + size_t(c), false) * x.value(1, base + size_t(j * p.dim + c), as_i8);
      weight[size_t(j)] = dot / std::sqrt(double(p.dim));
      top = std::max(top, weight[size_t(j)]);
    }
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t j = 0; j < keys; ++j) {
      const double w = std::exp(weight[size_t(j)] - top);
      total += w;
      for (int64_t c = 0; c < p.dim; ++c) sum[size_t(c)] += w * x.value(2, base + size_t(j * p.dim + c), as_i8);
    }
    for (int64_t c = 0; c < p.dim; ++c) worst = std::max(worst, std::fabs(sum[size_t(c)] / total - double(x.out[at + size_t(c)])));
  }
  return worst;
}

cqsa_status run_pool(void* user, int64_t tasks, void (*task)(void*, int64_t), void* data) {
  static_cast<cqsa::thread_pool*>(user)->run(tasks, task, data);
  return CQSA_OK;
}

struct bench {
  options wanted;
  cqsa::thread_pool pool;
  operands data;
  double peak = 0;
  bool right = true;

  explicit bench(const options& o) : wanted(o), pool(o.threads), data(heads * o.max_tokens * 128, pool) {}

  const cqsa_attention_impl* find(const char* name, const cqsa_attention_leaf& leaf) {
    const cqsa_backend_v1* cpu = cqsa_cpu_backend();
    for (int32_t i = 0; i < cpu->num_attention; ++i)
      if (!std::strcmp(cpu->attention[i].name, name) && cpu->attention[i].probe(&leaf, nullptr, 0) == CQSA_OK) return &cpu->attention[i];
    return nullptr;
  }

  // Best time of the runs that fit into the wanted seconds, at least two after a first one.
  double time(const cqsa_attention_impl& impl, const cqsa_attention_leaf& leaf) {
    const cqsa_exec exec{&pool, run_pool, nullptr, wanted.threads};
    const uint64_t bytes = impl.workspace(&leaf, wanted.threads);
    char* memory = static_cast<char*>(std::aligned_alloc(64, size_t(bytes + 63) / 64 * 64));
    double best = HUGE_VAL, total = 0;
    for (int run = 0; run < 3 || (total < wanted.seconds && run < 200); ++run) {
      const auto start = std::chrono::steady_clock::now();
      if (impl.launch(nullptr, &leaf, memory, bytes, &exec, nullptr) != CQSA_OK) std::abort();
      const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      total += took;
      if (run > 0) best = std::min(best, took);
      if (run > 0 && total > 8 * wanted.seconds) break;
    }
    std::free(memory);
    return best;
  }

  // FLOP/s of a path, 0 where this CPU lacks it. tile 0: the path's own best.
  double measure(const char* name, const problem& p, int64_t tile_q = 0, int64_t tile_k = 0) {
    cqsa_attention_leaf leaf = leaf_of(p, data);
    const cqsa_attention_impl* impl = find(name, leaf);
    cqsa_leaf_tile tile{tile_q, tile_k, 1};
    if (!impl || (!tile_q && impl->tiles(&leaf, &tile, 1) < 1)) return 0;
    leaf.tile_q = tile.tile_q, leaf.tile_k = tile.tile_k;
    const double rate = p.flops() / time(*impl, leaf), error = sampled_error(p, data);
    const bool good = error < (p.type == f32 ? 1e-5 : 2e-2);
    right &= good;
    if (tile_q) std::printf(" %.0f%s |", rate * 1e-9, good ? "" : " WRONG");
    else
      std::printf("| %s | %s | %lld | %lld | %s | %lldx%lld | %.0f | %.1f %% | %.1e%s |\n", name + 4,
                  p.type == f32 ? "f32" : p.type == bf16 ? "bf16" : "bf16, int8 kv", (long long)p.dim, (long long)p.tokens,
                  p.causal ? "causal" : "full", (long long)tile.tile_q, (long long)tile.tile_k, rate * 1e-9, 100 * rate / peak, error,
                  good ? "" : " WRONG");
    std::fflush(stdout);
    return rate;
  }

  void paths() {
    std::printf("\n| path | types | D | N | mask | tile | GFLOP/s | of the FMA peak | max error |\n|---|---|---|---|---|---|---|---|---|\n");
    double plain = 0, amx = 0, vector = 0, kv8 = 0;
    for (int64_t dim : {64, 128})
      for (int64_t tokens = 1024; tokens <= wanted.max_tokens; tokens *= 2)
        for (bool causal : {false, true}) {
          const double a = measure("cpu_avx512", {f32, tokens, dim, causal}), b = measure("cpu_amx", {bf16, tokens, dim, causal});
          const double c = measure("cpu_avx512_bf16", {bf16, tokens, dim, causal});
          double d = measure("cpu_amx", {int8, tokens, dim, causal});
          if (d == 0) d = measure("cpu_avx512_bf16", {int8, tokens, dim, causal});
          if (dim == 128 && tokens <= 8192 && !causal) plain = a, amx = b, vector = c, kv8 = d;
        }
    auto met = [](bool yes) { return yes ? "met" : "MISSED"; };
    std::printf("\n| bar, D 128, N %lld, full | got | |\n|---|---|---|\n", (long long)std::min<int64_t>(8192, wanted.max_tokens));
    std::printf("| f32 >= 55 %% of the FMA peak | %.1f %% | %s |\n", 100 * plain / peak, met(plain >= 0.55 * peak));
    std::printf("| bf16 by AMX >= 3x f32 | %.2fx | %s |\n", amx / plain, met(amx >= 3 * plain));
    std::printf("| bf16 by AVX-512 BF16, against f32 | %.2fx | |\n| int8 keys and values, against f32 | %.2fx | |\n", vector / plain, kv8 / plain);
  }

  void tiles() {
    const int64_t tokens = std::min<int64_t>(4096, wanted.max_tokens);
    for (const char* name : {"cpu_amx", "cpu_avx512_bf16", "cpu_avx512"})
      for (int64_t dim : {64, 128}) {
        const problem p{std::strcmp(name, "cpu_avx512") ? bf16 : f32, tokens, dim, false};
        if (!find(name, leaf_of(p, data))) continue;
        std::printf("\n%s, D %lld, N %lld: GFLOP/s by tile\n\n| rows | 32 keys | 64 | 128 | 256 | 512 |\n|---|---|---|---|---|---|\n", name,
                    (long long)dim, (long long)tokens);
        for (int64_t tile_q : {16, 32, 64, 128, 256, 512}) {
          std::printf("| %lld |", (long long)tile_q);
          for (int64_t tile_k : {32, 64, 128, 256, 512}) measure(name, p, tile_q, tile_k);
          std::printf("\n");
        }
      }
  }
};

}  // namespace

int main(int argc, char** argv) {
  options o;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--tiles") o.tiles = true;
    else if (i + 1 < argc && arg == "--threads") o.threads = std::atoi(argv[++i]);
    else if (i + 1 < argc && arg == "--max-tokens") o.max_tokens = std::max(1024, std::atoi(argv[++i]));
    else if (i + 1 < argc && arg == "--seconds") o.seconds = std::atof(argv[++i]);
    else return std::fprintf(stderr, "bench_cpu_paths [--threads N] [--max-tokens N] [--seconds S] [--tiles]\n"), 2;
  }
  bench b(o);
  // On a shared machine one measurement can fall into somebody else's work.
  for (int i = 0; i < 3; ++i) b.peak = std::max(b.peak, fma_peak(o.threads, 0.7));
  std::printf("FMA peak, %d threads, %s: %.1f GFLOP/s\n", o.threads, fma_peak_isa(), b.peak * 1e-9);
  if (o.tiles) b.tiles();
  else b.paths();
  std::printf("\nFMA peak again: %.1f GFLOP/s\n", fma_peak(o.threads, 1.0) * 1e-9);
  return b.right ? 0 : 1;
}
