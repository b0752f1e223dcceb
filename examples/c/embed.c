/* SPDX-License-Identifier: Apache-2.0
 * How an engine embeds libcqsa without linking to it: dlopen, look up what it uses, compare the ABI number, go on without it
 * when it is not there.   usage: embed /path/to/libcqsa.so.0 */
#define _POSIX_C_SOURCE 200809L
#include <cqsa.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

struct api {
  int32_t (*abi_version)(void);
  const char *(*version_string)(void);
  const char *(*last_error)(void);
  cqsa_status (*context_create)(const cqsa_context_params *, cqsa_context **);
  void (*context_destroy)(cqsa_context *);
  cqsa_status (*attention)(cqsa_context *, const cqsa_attention_params *, const cqsa_attention_args *, void *);
};

/* ISO C has no cast from an object pointer to a function pointer; POSIX promises that the bytes are the same. */
static int look_up(void *library, const char *name, void *function_out) {
  void *symbol = dlsym(library, name);
  memcpy(function_out, &symbol, sizeof symbol);
  return symbol != NULL;
}

static int load(void *library, struct api *api) {
  return look_up(library, "cqsa_abi_version", &api->abi_version) && look_up(library, "cqsa_version_string", &api->version_string) &&
         look_up(library, "cqsa_last_error", &api->last_error) && look_up(library, "cqsa_context_create", &api->context_create) &&
         look_up(library, "cqsa_context_destroy", &api->context_destroy) && look_up(library, "cqsa_attention", &api->attention) &&
         api->abi_version() == CQSA_ABI_VERSION;
}

int main(int argc, char **argv) {
  void *library = dlopen(argc > 1 ? argv[1] : "libcqsa.so.0", RTLD_NOW | RTLD_LOCAL);
  struct api api;
  if (library == NULL || !load(library, &api)) {
    fprintf(stderr, "no usable libcqsa: %s\n", library ? "another ABI" : dlerror());
    return 1;
  }
  /* Two keys with equal logits: the result is the mean of the two values, (2, 3). */
  float q[2] = {0, 0}, k[4] = {1, 2, 3, 4}, v[4] = {1, 2, 3, 4}, out[2] = {0, 0};
  int64_t one[4] = {1, 1, 1, 2}, two[4] = {1, 1, 2, 2};
  cqsa_tensor tq = {q, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, one, NULL, 0};
  cqsa_tensor tk = {k, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, two, NULL, 0};
  cqsa_tensor tv = {v, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, two, NULL, 0};
  cqsa_tensor to = {out, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, one, NULL, 0};
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = &tq;
  args.k = &tk;
  args.v = &tv;
  args.out = &to;
  cqsa_context *context = NULL;
  cqsa_status status = api.context_create(NULL, &context);
  if (status == CQSA_OK) status = api.attention(context, &params, &args, NULL);
  if (status == CQSA_OK) printf("cqsa %s by dlopen: out = (%g, %g)\n", api.version_string(), out[0], out[1]);
  else fprintf(stderr, "%s\n", api.last_error());
  api.context_destroy(context);
  dlclose(library);
  return status != CQSA_OK || out[0] != 2.0f || out[1] != 3.0f;
}
