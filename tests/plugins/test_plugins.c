/* SPDX-License-Identifier: Apache-2.0
 *
 * Plugins that are broken in every way we know: each gets its state, its status and a reason that names the file and the
 * fault. Usage: test_plugins <case> <libcqsa.so> <folder of the made-up plugins>. The library is opened with dlopen because
 * some cases are about its own folder and its unloading. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cqsa.h"

static void *library;
static cqsa_status (*backend_query)(const char *, const char *, cqsa_backend_info *);
static cqsa_status (*context_create)(const cqsa_context_params *, cqsa_context **);
static void (*context_destroy)(cqsa_context *);
static const char *(*context_backend)(const cqsa_context *);
static const char *(*last_error)(void);

static int failures;
#define CHECK(condition, ...)                                        \
  do {                                                               \
    if (!(condition)) {                                              \
      ++failures;                                                    \
      printf("%s:%d: failed: %s: ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                                           \
      printf("\n");                                                  \
    }                                                                \
  } while (0)

static void find(const char *symbol, void *pointer) {
  void *address = dlsym(library, symbol);
  if (address == NULL) {
    printf("no symbol %s: %s\n", symbol, dlerror());
    exit(1);
  }
  memcpy(pointer, &address, sizeof address);
}

static void open_library(const char *path) {
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    printf("%s\n", dlerror());
    exit(1);
  }
  find("cqsa_backend_query", &backend_query);
  find("cqsa_context_create", &context_create);
  find("cqsa_context_destroy", &context_destroy);
  find("cqsa_context_backend", &context_backend);
  find("cqsa_last_error", &last_error);
}

static int is_mapped(const char *path) {
  void *handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == NULL) return 0;
  dlclose(handle);
  return 1;
}

static cqsa_status create(const char *name, const char *folder, int32_t device, cqsa_context **context) {
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  params.backend = name;
  params.backend_path = folder;
  params.device = device;
  return context_create(&params, context);
}

typedef struct {
  const char *name;
  int32_t state;
  cqsa_status status;
  const char *words[3]; /* each is in the reason, beside the file name */
} expectation;

static const expectation expectations[] = {
    {"garbage", CQSA_BACKEND_LOAD_FAILED, CQSA_ERROR_BACKEND_LOAD_FAILED, {"does not load", "ELF", NULL}},
    {"empty", CQSA_BACKEND_LOAD_FAILED, CQSA_ERROR_BACKEND_LOAD_FAILED, {"does not load", "too short", NULL}},
    {"unresolved", CQSA_BACKEND_LOAD_FAILED, CQSA_ERROR_BACKEND_LOAD_FAILED,
     {"does not load", "undefined symbol", "a_function_that_nobody_has"}},
    {"no_entry", CQSA_BACKEND_LOAD_FAILED, CQSA_ERROR_BACKEND_LOAD_FAILED, {"no entry point", "cqsa_backend_entry_v1", NULL}},
    {"entry_error", CQSA_BACKEND_LOAD_FAILED, CQSA_ERROR_BACKEND_LOAD_FAILED, {"entry point failed", "CQSA_ERROR_RUNTIME", "62"}},
    {"no_backend", CQSA_BACKEND_LOAD_FAILED, CQSA_ERROR_BACKEND_LOAD_FAILED, {"gave no backend", NULL, NULL}},
    {"hollow", CQSA_BACKEND_LOAD_FAILED, CQSA_ERROR_BACKEND_LOAD_FAILED, {"lacks a function", NULL, NULL}},
    {"wrong_name", CQSA_BACKEND_LOAD_FAILED, CQSA_ERROR_BACKEND_LOAD_FAILED, {"\"somebody_else\"", "\"wrong_name\"", NULL}},
    {"odd_state", CQSA_BACKEND_LOAD_FAILED, CQSA_ERROR_BACKEND_LOAD_FAILED, {"unknown state 77", NULL, NULL}},
    {"wrong_build", CQSA_BACKEND_ABI_MISMATCH, CQSA_ERROR_ABI_MISMATCH, {"another build", "of this library \"", NULL}},
    {"refuses", CQSA_BACKEND_ABI_MISMATCH, CQSA_ERROR_ABI_MISMATCH, {"yet another build", "of this library \"", NULL}},
    {"refuses_silently", CQSA_BACKEND_ABI_MISMATCH, CQSA_ERROR_ABI_MISMATCH, {"refuses this library", NULL, NULL}},
    {"small_struct", CQSA_BACKEND_ABI_MISMATCH, CQSA_ERROR_ABI_MISMATCH, {"bytes, wanted", "an older build", NULL}},
    {"tiny_struct", CQSA_BACKEND_ABI_MISMATCH, CQSA_ERROR_ABI_MISMATCH, {"has 8 bytes, wanted", NULL, NULL}},
    {"no_driver", CQSA_BACKEND_NO_DRIVER, CQSA_ERROR_NO_DRIVER, {"libmadeup.so.1 is absent", NULL, NULL}},
    {"no_device", CQSA_BACKEND_NO_DEVICE, CQSA_ERROR_NO_DEVICE, {"counts 0 devices", NULL, NULL}},
    {"no_code", CQSA_BACKEND_NO_DEVICE_CODE, CQSA_ERROR_NO_DEVICE_CODE, {"device 0 is sm_12", NULL, NULL}},
    {"no_reason", CQSA_BACKEND_NO_DEVICE, CQSA_ERROR_NO_DEVICE, {"gives no reason", NULL, NULL}},
};

static void check_text(const char *text, const char *file, const expectation *wanted) {
  int i;
  CHECK(strstr(text, file) != NULL, "\"%s\" does not name %s", text, file);
  for (i = 0; i < 3 && wanted->words[i] != NULL; ++i)
    CHECK(strstr(text, wanted->words[i]) != NULL, "\"%s\" lacks \"%s\"", text, wanted->words[i]);
}

static void check_broken(const expectation *wanted, const char *folder) {
  char file[4096];
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  cqsa_context *context = (cqsa_context *)&info;
  cqsa_status status;
  snprintf(file, sizeof file, "%s/libcqsa_%s.so", folder, wanted->name);
  CHECK(access(file, R_OK) == 0, "the test's own plugin %s is missing", file);
  CHECK(backend_query(wanted->name, folder, &info) == CQSA_OK, "%s: %s", wanted->name, last_error());
  CHECK(info.state == wanted->state, "%s: state is %d", wanted->name, (int)info.state);
  CHECK(strcmp(info.name, wanted->name) == 0, "name is %s", info.name);
  CHECK(info.device_count == 0 && info.device[0] == 0, "%s has devices", wanted->name);
  check_text(info.reason, file, wanted);
  status = create(wanted->name, folder, 0, &context);
  CHECK(status == wanted->status, "%s: status is %d", wanted->name, (int)status);
  CHECK(context == (cqsa_context *)&info, "%s: a failing call wrote its output", wanted->name);
  check_text(last_error(), file, wanted);
  CHECK(!is_mapped(file), "%s is still loaded", file);
}

static void case_broken(const char *path, const char *folder) {
  size_t i;
  open_library(path);
  for (i = 0; i < sizeof expectations / sizeof *expectations; ++i) check_broken(&expectations[i], folder);
  dlclose(library);
  CHECK(!is_mapped(path), "the library stays without a ready plugin");
}

static void case_not_found(const char *path, const char *folder) {
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  cqsa_context *context = NULL;
  char own[4096];
  open_library(path);
  CHECK(backend_query("absent", folder, &info) == CQSA_OK, "%s", last_error());
  CHECK(info.state == CQSA_BACKEND_NOT_FOUND, "state is %d", (int)info.state);
  CHECK(strstr(info.reason, "libcqsa_absent.so") != NULL, "%s", info.reason);
  CHECK(strstr(info.reason, folder) != NULL, "%s", info.reason);
  CHECK(strstr(info.reason, "CQSA_BACKEND_PATH is not set") != NULL, "%s", info.reason);
  CHECK(realpath(path, own) != NULL, "%s", path);
  *strrchr(own, '/') = 0;
  CHECK(strstr(info.reason, own) != NULL, "\"%s\" does not name the library's folder %s", info.reason, own);
  CHECK(create("absent", folder, 0, &context) == CQSA_ERROR_BACKEND_NOT_FOUND, "%s", last_error());
  CHECK(context == NULL, "context was written");
  CHECK(strstr(last_error(), "libcqsa_absent.so") != NULL, "%s", last_error());
  dlclose(library);
}

/* Arguments that could lead out of the folders, or that depend on where the program stands. */
static void case_arguments(const char *path, const char *folder) {
  static const char *const bad_names[] = {"", "Cuda", "../no_driver", "a/b", "a.b", "a-b", "a b",
                                          "a_name_that_is_too_long_by_one_0"};
  static const char *const bad_paths[] = {"", ".", "plugins", "./plugins", "../x"};
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  cqsa_context *context = NULL;
  size_t i;
  open_library(path);
  for (i = 0; i < sizeof bad_names / sizeof *bad_names; ++i) {
    CHECK(backend_query(bad_names[i], folder, &info) == CQSA_ERROR_INVALID_ARGUMENT, "\"%s\"", bad_names[i]);
    CHECK(create(bad_names[i], folder, 0, &context) == CQSA_ERROR_INVALID_ARGUMENT, "\"%s\"", bad_names[i]);
    CHECK(strstr(last_error(), bad_names[i]) != NULL, "%s", last_error());
  }
  for (i = 0; i < sizeof bad_paths / sizeof *bad_paths; ++i) {
    CHECK(backend_query("cpu", bad_paths[i], &info) == CQSA_ERROR_INVALID_ARGUMENT, "\"%s\"", bad_paths[i]);
    CHECK(strstr(last_error(), "absolute") != NULL, "%s", last_error());
    CHECK(create("auto", bad_paths[i], 0, &context) == CQSA_ERROR_INVALID_ARGUMENT, "\"%s\"", bad_paths[i]);
    CHECK(create("cpu", bad_paths[i], 0, &context) == CQSA_ERROR_INVALID_ARGUMENT, "\"%s\"", bad_paths[i]);
  }
  CHECK(backend_query(NULL, folder, &info) == CQSA_ERROR_NULL_POINTER, "name NULL");
  CHECK(backend_query("cpu", folder, NULL) == CQSA_ERROR_NULL_POINTER, "info NULL");
  dlclose(library);
}

/* A whole plugin: its devices, their opening and closing, and that library and plugin then stay. */
static void case_ready(const char *path, const char *folder) {
  char file[4096];
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  cqsa_context *context = NULL;
  void *plugin;
  int (*devices_open)(void);
  void *symbol;
  snprintf(file, sizeof file, "%s/libcqsa_ready.so", folder);
  open_library(path);
  CHECK(backend_query("ready", folder, &info) == CQSA_OK, "%s", last_error());
  CHECK(info.state == CQSA_BACKEND_READY && info.reason[0] == 0, "%d %s", (int)info.state, info.reason);
  CHECK(info.device_count == 2 && strcmp(info.device, "Made-up accelerator") == 0, "%d %s", (int)info.device_count, info.device);
  plugin = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
  CHECK(plugin != NULL, "%s is not loaded", file);
  if (plugin == NULL) return;
  symbol = dlsym(plugin, "plugin_devices_open");
  memcpy(&devices_open, &symbol, sizeof symbol);

  CHECK(create("ready", folder, 0, &context) == CQSA_OK, "%s", last_error());
  CHECK(strcmp(context_backend(context), "ready") == 0, "%s", context_backend(context));
  CHECK(devices_open() == 1, "%d devices are open", devices_open());
  context_destroy(context);
  CHECK(devices_open() == 0, "%d devices are open", devices_open());

  CHECK(create("ready", folder, 2, &context) == CQSA_ERROR_NO_DEVICE, "device 2");
  CHECK(strstr(last_error(), "device is 2") != NULL && strstr(last_error(), "2 devices") != NULL, "%s", last_error());
  CHECK(create("ready", folder, -1, &context) == CQSA_ERROR_NO_DEVICE, "device -1");
  CHECK(create("ready", folder, 1, &context) == CQSA_ERROR_RUNTIME, "device 1");
  CHECK(strcmp(last_error(), "the made-up device refuses") == 0, "%s", last_error());

  dlclose(plugin);
  dlclose(library);
  CHECK(is_mapped(path), "a ready plugin must keep the library");
  CHECK(is_mapped(file), "a ready plugin must stay");
}

/* Run with CQSA_BACKEND_PATH set to the folder. */
static void case_environment(const char *path, const char *folder) {
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  open_library(path);
  CHECK(backend_query("cpu", NULL, &info) == CQSA_OK, "%s", last_error()); /* the first use: the variable is read here */
  unsetenv("CQSA_BACKEND_PATH");
  CHECK(backend_query("no_device", NULL, &info) == CQSA_OK, "%s", last_error());
  CHECK(info.state == CQSA_BACKEND_NO_DEVICE, "%d %s", (int)info.state, info.reason);
  CHECK(backend_query("no_driver", "/", &info) == CQSA_OK, "%s", last_error());
  CHECK(info.state == CQSA_BACKEND_NO_DRIVER, "%d %s", (int)info.state, info.reason);
  CHECK(backend_query("absent", "/", &info) == CQSA_OK, "%s", last_error());
  CHECK(strstr(info.reason, folder) != NULL && strstr(info.reason, "CQSA_BACKEND_PATH") != NULL, "%s", info.reason);
}

/* Run in the folder of the plugins, with CQSA_BACKEND_PATH=. */
static void case_relative_environment(const char *path, const char *folder) {
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  CHECK(chdir(folder) == 0 && access("libcqsa_no_driver.so", R_OK) == 0, "%s", folder);
  CHECK(setenv("LD_LIBRARY_PATH", ".", 1) == 0, "setenv");
  open_library(path);
  CHECK(backend_query("no_driver", NULL, &info) == CQSA_OK, "%s", last_error());
  CHECK(info.state == CQSA_BACKEND_NOT_FOUND, "the current folder was searched: %s", info.reason);
  CHECK(strstr(info.reason, "not absolute") != NULL, "%s", info.reason);
  CHECK(backend_query("no_driver", "/", &info) == CQSA_OK, "%s", last_error());
  CHECK(info.state == CQSA_BACKEND_NOT_FOUND, "the current folder was searched: %s", info.reason);
}

static void copy_file(const char *from, const char *to) {
  char buffer[65536];
  size_t length;
  FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
  if (in == NULL || out == NULL) exit(2);
  while ((length = fread(buffer, 1, sizeof buffer, in)) > 0) fwrite(buffer, 1, length, out);
  fclose(in);
  fclose(out);
}

/* A plugin beside the library is found, also when the library was opened by a relative path and the program then moved. */
static void case_own_folder(const char *path, const char *folder) {
  char here[] = "/tmp/cqsa-own-XXXXXX", from[4096], to[4096];
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  CHECK(mkdtemp(here) != NULL && chdir(here) == 0, "%s", here);
  snprintf(from, sizeof from, "%s/libcqsa_no_device.so", folder);
  snprintf(to, sizeof to, "%s/libcqsa_no_device.so", here);
  copy_file(from, to);
  copy_file(path, "libcqsa_copy.so.0");
  open_library("./libcqsa_copy.so.0");
  CHECK(chdir("/") == 0, "chdir");
  CHECK(backend_query("no_device", NULL, &info) == CQSA_OK, "%s", last_error());
  CHECK(info.state == CQSA_BACKEND_NO_DEVICE, "%d %s", (int)info.state, info.reason);
  CHECK(strstr(info.reason, to) != NULL, "\"%s\" does not name %s", info.reason, to);
  dlclose(library);
  unlink(to);
  snprintf(to, sizeof to, "%s/libcqsa_copy.so.0", here);
  unlink(to);
  rmdir(here);
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*run)(const char *path, const char *folder);
  } cases[] = {{"broken", case_broken},           {"not_found", case_not_found},
               {"arguments", case_arguments},     {"ready", case_ready},
               {"environment", case_environment}, {"relative_environment", case_relative_environment},
               {"own_folder", case_own_folder}};
  size_t i;
  for (i = 0; argc == 4 && i < sizeof cases / sizeof *cases; ++i) {
    if (strcmp(argv[1], cases[i].name) != 0) continue;
    cases[i].run(argv[2], argv[3]);
    return failures != 0;
  }
  printf("usage: test_plugins <case> <libcqsa.so> <folder of plugins>, paths absolute\n");
  return 2;
}
