/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of the library as an engine that was not linked with it sees it: open, use, close, and then really gone.
 * Usage: test_dlopen <case> <libcqsa.so>. C99 and nothing but dlsym. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cqsa.h"

typedef struct {
  void *handle;
  int32_t (*version)(void);
  int32_t (*abi_version)(void);
  const char *(*version_string)(void);
  const char *(*build_info)(void);
  const char *(*status_string)(cqsa_status);
  const char *(*last_error)(void);
  void (*attention_params_init)(cqsa_attention_params *, uint64_t);
  cqsa_status (*context_create)(const cqsa_context_params *, cqsa_context **);
  void (*context_destroy)(cqsa_context *);
  const char *(*context_backend)(const cqsa_context *);
  cqsa_status (*attention)(cqsa_context *, const cqsa_attention_params *, const cqsa_attention_args *, void *);
} library;

#define FAIL(...)                        \
  do {                                   \
    printf("line %d: ", __LINE__);       \
    printf(__VA_ARGS__);                 \
    printf("\n");                        \
    fflush(stdout);                      \
    return 1;                            \
  } while (0)
#define TRY(expression) \
  do {                  \
    if (expression) {   \
      printf("from line %d\n", __LINE__); \
      return 1;         \
    }                   \
  } while (0)

static int find(library *lib, const char *symbol, void *pointer) {
  void *address = dlsym(lib->handle, symbol);
  if (address == NULL) FAIL("%s", dlerror());
  memcpy(pointer, &address, sizeof address);
  return 0;
}

static int open_library(library *lib, const char *path) {
  lib->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (lib->handle == NULL) FAIL("%s", dlerror());
  return find(lib, "cqsa_version", &lib->version) || find(lib, "cqsa_abi_version", &lib->abi_version) ||
         find(lib, "cqsa_version_string", &lib->version_string) || find(lib, "cqsa_build_info", &lib->build_info) ||
         find(lib, "cqsa_status_string", &lib->status_string) || find(lib, "cqsa_last_error", &lib->last_error) ||
         find(lib, "cqsa_attention_params_init", &lib->attention_params_init) ||
         find(lib, "cqsa_context_create", &lib->context_create) || find(lib, "cqsa_context_destroy", &lib->context_destroy) ||
         find(lib, "cqsa_context_backend", &lib->context_backend) || find(lib, "cqsa_attention", &lib->attention);
}

static int is_mapped(const char *path) {
  void *handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (handle != NULL) dlclose(handle);
  return handle != NULL;
}

static int close_library(library *lib, const char *path) {
  if (dlclose(lib->handle) != 0) FAIL("%s", dlerror());
  if (is_mapped(path)) FAIL("%s is still there after dlclose", path);
  return 0;
}

static int check_version(const library *lib) {
  char text[32];
  if (lib->version() != CQSA_VERSION) FAIL("version is %d", (int)lib->version());
  if (lib->abi_version() != CQSA_ABI_VERSION) FAIL("abi version is %d", (int)lib->abi_version());
  snprintf(text, sizeof text, "%d.%d.%d", CQSA_VERSION_MAJOR, CQSA_VERSION_MINOR, CQSA_VERSION_PATCH);
  if (strcmp(lib->version_string(), text) != 0) FAIL("version string is %s", lib->version_string());
  if (strstr(lib->build_info(), text) == NULL) FAIL("build info is %s", lib->build_info());
  if (strcmp(lib->status_string(CQSA_ERROR_SHAPE), "CQSA_ERROR_SHAPE") != 0) FAIL("%s", lib->status_string(CQSA_ERROR_SHAPE));
  return 0;
}

static cqsa_tensor view(float *data, int64_t *shape) {
  cqsa_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.device_type = CQSA_DEVICE_CPU;
  tensor.ndim = 4;
  tensor.dtype = CQSA_DTYPE_F32;
  tensor.shape = shape;
  return tensor;
}

enum { ROWS = 40, KEYS = 30, DIM = 8 };

/* Queries of zero make every score the same, so each row is the mean of the values: channel c has 0..KEYS-1 plus c. */
static int check_attention(const library *lib, cqsa_context *context) {
  static const float wanted_first = (KEYS - 1) / 2.0f;
  float q[ROWS * DIM] = {0}, k[KEYS * DIM], v[KEYS * DIM], out[ROWS * DIM];
  int64_t q_shape[4] = {1, 1, ROWS, DIM}, k_shape[4] = {1, 1, KEYS, DIM}, bad_shape[4] = {1, 1, KEYS - 1, DIM};
  cqsa_tensor tq = view(q, q_shape), tk = view(k, k_shape), tv = view(v, k_shape), tout = view(out, q_shape);
  cqsa_attention_params params;
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  int i;
  lib->attention_params_init(&params, sizeof params);
  args.q = &tq;
  args.k = &tk;
  args.v = &tv;
  args.out = &tout;
  for (i = 0; i < KEYS * DIM; ++i) {
    k[i] = (float)(i % 7) - 3.0f;
    v[i] = (float)(i / DIM) + (float)(i % DIM);
  }
  memset(out, 0xFF, sizeof out);
  if (lib->attention(context, &params, &args, NULL) != CQSA_OK) FAIL("%s", lib->last_error());
  for (i = 0; i < ROWS * DIM; ++i)
    if (!(fabsf(out[i] - wanted_first - (float)(i % DIM)) < 1e-4f)) FAIL("out[%d] is %g", i, (double)out[i]);

  tv.shape = bad_shape;
  memset(out, 0xFF, sizeof out);
  if (lib->attention(context, &params, &args, NULL) != CQSA_ERROR_SHAPE) FAIL("a wrong shape was accepted");
  if (strstr(lib->last_error(), "args->v") == NULL) FAIL("the error does not name args->v: %s", lib->last_error());
  for (i = 0; i < (int)sizeof out; ++i)
    if (((unsigned char *)out)[i] != 0xFF) FAIL("a refused call wrote byte %d of its output", i);
  return 0;
}

static cqsa_context *new_context(const library *lib) {
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  cqsa_context *context = NULL;
  params.backend = "cpu";
  params.num_threads = 3;
  if (lib->context_create(&params, &context) != CQSA_OK) printf("%s\n", lib->last_error());
  return context;
}

static int use(const library *lib) {
  cqsa_context *context = new_context(lib);
  if (context == NULL) FAIL("no context");
  if (strcmp(lib->context_backend(context), "cpu") != 0) FAIL("%s", lib->context_backend(context));
  TRY(check_attention(lib, context));
  lib->context_destroy(context);
  return 0;
}

/* Three times, because a second life is where leftovers of the first one show. */
static int case_basic(const char *path) {
  int i;
  for (i = 0; i < 3; ++i) {
    library lib;
    TRY(open_library(&lib, path));
    TRY(check_version(&lib));
    TRY(use(&lib));
    TRY(close_library(&lib, path));
  }
  return 0;
}

/* Loading and unloading leaves nothing behind, however often. */
static int case_unused(const char *path) {
  size_t before = 0;
  int i;
  for (i = 0; i < 40; ++i) {
    library lib;
    TRY(open_library(&lib, path));
    TRY(close_library(&lib, path));
    if (i == 8) before = mallinfo2().uordblks;
  }
  if (mallinfo2().uordblks > before + 4096) FAIL("%lu bytes are lost", (unsigned long)(mallinfo2().uordblks - before));
  return 0;
}

/* path = folder/name: in its folder as ./name, then the program moves elsewhere. */
static int case_relative(const char *path) {
  char folder[4096], relative[4096];
  library lib;
  if (strlen(path) >= sizeof folder - 2 || strrchr(path, '/') == NULL) FAIL("wanted an absolute path, got %s", path);
  strcpy(folder, path);
  *strrchr(folder, '/') = 0;
  snprintf(relative, sizeof relative, "./%s", strrchr(path, '/') + 1);
  if (chdir(folder) != 0) FAIL("no folder %s", folder);
  TRY(open_library(&lib, relative));
  if (chdir("/") != 0) FAIL("chdir");
  TRY(use(&lib));
  return close_library(&lib, path);
}

static int case_symlink(const char *path) {
  char folder[] = "/tmp/cqsa-dlopen-XXXXXX", link[64];
  library lib;
  int failed;
  if (mkdtemp(folder) == NULL) FAIL("no folder in /tmp");
  snprintf(link, sizeof link, "%s/libother.so", folder);
  if (symlink(path, link) != 0) FAIL("symlink %s", link);
  failed = open_library(&lib, link) || use(&lib) || close_library(&lib, path);
  unlink(link);
  rmdir(folder);
  return failed;
}

enum { THREADS = 8 };
static cqsa_context *shared_context;

/* Each thread opens the library for itself, works on its own context and on the one they all share, and closes. */
static void *thread_main(void *path) {
  library lib;
  int round;
  for (round = 0; round < 20; ++round) {
    if (open_library(&lib, path) || use(&lib) || check_attention(&lib, shared_context)) return path;
    if (dlclose(lib.handle) != 0) return path;
  }
  return NULL;
}

static int case_threads(const char *path) {
  pthread_t threads[THREADS];
  library lib;
  int i, failed = 0;
  TRY(open_library(&lib, path));
  shared_context = new_context(&lib);
  if (shared_context == NULL) FAIL("no context");
  for (i = 0; i < THREADS; ++i)
    if (pthread_create(&threads[i], NULL, thread_main, (void *)path) != 0) FAIL("no thread");
  for (i = 0; i < THREADS; ++i) {
    void *result = NULL;
    pthread_join(threads[i], &result);
    failed += result != NULL;
  }
  if (failed) FAIL("%d threads failed", failed);
  lib.context_destroy(shared_context);
  return close_library(&lib, path);
}

/* Opened, used, closed by threads that then end: their thread-local data must not hold the library. */
static void *short_life(void *path) {
  library lib;
  return open_library(&lib, path) || use(&lib) || dlclose(lib.handle) ? path : NULL;
}

static int case_thread_ends(const char *path) {
  int i;
  for (i = 0; i < 5; ++i) {
    pthread_t thread;
    void *result = NULL;
    if (pthread_create(&thread, NULL, short_life, (void *)path) != 0) FAIL("no thread");
    pthread_join(thread, &result);
    if (result != NULL) FAIL("the thread failed");
    if (is_mapped(path)) FAIL("%s is still there after its thread", path);
  }
  return 0;
}

static int in_child(const library *lib, cqsa_context *context, const char *path) {
  int status = 1;
  pid_t child;
  fflush(stdout);
  child = fork();
  if (child < 0) FAIL("fork");
  if (child == 0) {
    alarm(30);
    status = (context != NULL && check_attention(lib, context)) || use(lib);
    if (!status && context != NULL) lib->context_destroy(context); /* inherited threads do not exist here: no join */
    status = status || close_library((library *)lib, path);
    fflush(stdout);
    _exit(status);
  }
  if (waitpid(child, &status, 0) != child || status != 0) FAIL("the child ended with %d", status);
  return 0;
}

static int case_fork(const char *path) {
  library lib;
  cqsa_context *context;
  TRY(open_library(&lib, path));
  TRY(in_child(&lib, NULL, path)); /* before any use */
  context = new_context(&lib);
  if (context == NULL) FAIL("no context");
  TRY(in_child(&lib, context, path)); /* a context whose threads have not started */
  TRY(check_attention(&lib, context));
  TRY(in_child(&lib, context, path)); /* one whose threads have */
  TRY(check_attention(&lib, context));
  lib.context_destroy(context);
  TRY(in_child(&lib, NULL, path));
  return close_library(&lib, path);
}

static int copy_file(const char *from, const char *to) {
  static char block[1 << 16];
  size_t size;
  FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
  if (in == NULL || out == NULL) FAIL("cannot copy %s to %s", from, to);
  while ((size = fread(block, 1, sizeof block, in)) > 0)
    if (fwrite(block, 1, size, out) != size) FAIL("cannot write %s", to);
  fclose(in);
  if (fclose(out) != 0) FAIL("cannot write %s", to);
  return 0;
}

/* Two engines in one process, each with a copy of its own: same soname, same symbols, nothing shared. */
static int use_copies(const char *path, const char *other_path) {
  library one, two;
  cqsa_context *of_one, *of_two;
  TRY(open_library(&one, path));
  TRY(open_library(&two, other_path));
  if (one.handle == two.handle || one.attention == two.attention) FAIL("the copy is the same library");
  of_one = new_context(&one);
  of_two = new_context(&two);
  if (of_one == NULL || of_two == NULL) FAIL("no context");
  TRY(check_attention(&one, of_one) || check_attention(&two, of_two) || check_attention(&one, of_one));
  one.context_destroy(of_one);
  TRY(close_library(&one, path));
  TRY(check_attention(&two, of_two)); /* the other one stays whole */
  TRY(open_library(&one, path) || use(&one) || check_attention(&two, of_two));
  two.context_destroy(of_two);
  TRY(close_library(&two, other_path));
  TRY(use(&one));
  return close_library(&one, path);
}

static int case_copies(const char *path) {
  char folder[] = "/tmp/cqsa-dlopen-XXXXXX", copy[64];
  int failed;
  if (mkdtemp(folder) == NULL) FAIL("no folder in /tmp");
  snprintf(copy, sizeof copy, "%s/libengine.so", folder);
  failed = copy_file(path, copy) || use_copies(path, copy);
  unlink(copy);
  rmdir(folder);
  return failed;
}

/* Works until the process ends: on the shared context, or on one of its own after the other. */
static const library *running;
static int rounds_begun; /* by all threads */

static void *run_for_ever(void *own) {
  for (;;) {
    __atomic_fetch_add(&rounds_begun, 1, __ATOMIC_RELAXED);
    if (own != NULL ? use(running) : check_attention(running, shared_context)) _exit(9);
  }
  return NULL;
}

/* Half of the threads on one context, half on many. */
static int start_runners(const library *lib) {
  int i;
  running = lib;
  shared_context = new_context(lib);
  if (shared_context == NULL) FAIL("no context");
  for (i = 0; i < THREADS; ++i) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_for_ever, i % 2 ? (void *)lib : NULL) != 0) FAIL("no thread");
    pthread_detach(thread);
  }
  return 0;
}

static int wait_for(pid_t child, const char *what, int round) {
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0) FAIL("%s, round %d: the child ended with %d", what, round, status);
  return 0;
}

/* exit() while other threads are inside: destructors run, and must not take away what those threads still use. */
static int case_exit_running(const char *path) {
  int round;
  for (round = 0; round < 24; ++round) {
    pid_t child;
    fflush(stdout);
    child = fork();
    if (child < 0) FAIL("fork");
    if (child == 0) {
      static library lib;
      alarm(60);
      if (open_library(&lib, path) || start_runners(&lib)) _exit(1);
      usleep((useconds_t)(1000 * round));
      while (__atomic_load_n(&rounds_begun, __ATOMIC_RELAXED) < THREADS) usleep(100);
      exit(0);
    }
    TRY(wait_for(child, "exit", round));
  }
  return 0;
}

/* fork() while other threads are inside, any lock of theirs held: the child works, with the context it inherited too. */
static int case_fork_running(const char *path) {
  static library lib;
  int round;
  alarm(100);
  TRY(open_library(&lib, path));
  TRY(start_runners(&lib));
  for (round = 0; round < 60; ++round) {
    pid_t child;
    fflush(stdout);
    usleep((useconds_t)(500 * (round % 7)));
    child = fork();
    if (child < 0) FAIL("fork");
    if (child == 0) {
      alarm(30);
      _exit(check_attention(&lib, shared_context) || use(&lib));
    }
    TRY(wait_for(child, "fork", round));
  }
  return 0;
}

/* An exception inside the library, from its throw to the wall between C++ and C: the unwinder must find our tables. */
static int case_exception(const char *path) {
  enum { HUGE_PATH = 256 << 20, ROOM = 64 << 20 };
  cqsa_status (*backend_query)(const char *, const char *, cqsa_backend_info *);
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  struct rlimit limit;
  long pages = 0;
  char *huge = malloc(HUGE_PATH);
  FILE *statm = fopen("/proc/self/statm", "r");
  library lib;
  cqsa_status status;
  if (statm == NULL || huge == NULL || fscanf(statm, "%ld", &pages) != 1) FAIL("no statm or no memory");
  fclose(statm);
  TRY(open_library(&lib, path) || find(&lib, "cqsa_backend_query", &backend_query));
  memset(huge, '/', HUGE_PATH - 1);
  huge[HUGE_PATH - 1] = 0;
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + ROOM; /* a copy of the path does not fit */
  if (setrlimit(RLIMIT_AS, &limit) != 0) FAIL("setrlimit");
  status = backend_query("nobody", huge, &info);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_AS, &limit);
  free(huge);
  if (status != CQSA_ERROR_OUT_OF_HOST_MEMORY) FAIL("status is %d, %s", (int)status, lib.last_error());
  TRY(use(&lib));
  return close_library(&lib, path);
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    int (*run)(const char *path);
  } cases[] = {{"basic", case_basic},     {"unused", case_unused},           {"relative", case_relative}, {"symlink", case_symlink},
               {"threads", case_threads}, {"thread_ends", case_thread_ends}, {"fork", case_fork},
               {"copies", case_copies},   {"exit_running", case_exit_running}, {"fork_running", case_fork_running},
               {"exception", case_exception}};
  size_t i;
  for (i = 0; argc == 3 && i < sizeof cases / sizeof *cases; ++i)
    if (strcmp(argv[1], cases[i].name) == 0) return cases[i].run(argv[2]);
  printf("usage: test_dlopen <case> <libcqsa.so, absolute>\n");
  return 2;
}
