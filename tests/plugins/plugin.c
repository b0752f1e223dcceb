/* SPDX-License-Identifier: Apache-2.0
 *
 * One source, many plugins, each broken in one way; PLUGIN_<NAME> says which. PLUGIN_READY is whole. All take the build id
 * from the library that loads them, so that they need not be built with it. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cqsa_backend.h"

#define EXPORT __attribute__((visibility("default")))

static int devices_open;

/* For the test: how many devices are open now. */
EXPORT int plugin_devices_open(void);
EXPORT int plugin_devices_open(void) { return devices_open; }

static const char *last_error(void) { return "the made-up device refuses"; }

static int32_t state(char *reason, uint64_t size) {
  const char *text = "";
  int32_t result = CQSA_BACKEND_READY;
#if defined(PLUGIN_NO_DRIVER)
  text = "the driver library libmadeup.so.1 is absent";
  result = CQSA_BACKEND_NO_DRIVER;
#elif defined(PLUGIN_NO_DEVICE)
  text = "the driver counts 0 devices";
  result = CQSA_BACKEND_NO_DEVICE;
#elif defined(PLUGIN_NO_CODE)
  text = "device 0 is sm_12, this build has code for sm_75 and newer";
  result = CQSA_BACKEND_NO_DEVICE_CODE;
#elif defined(PLUGIN_NO_REASON)
  result = CQSA_BACKEND_NO_DEVICE;
#elif defined(PLUGIN_ODD_STATE)
  result = 77;
#endif
  if (size > 0) {
    strncpy(reason, text, (size_t)size - 1);
    reason[size - 1] = 0;
  }
  return result;
}

static int32_t device_count(void) { return 2; }

static cqsa_status device_properties(int32_t device, cqsa_device_properties *out) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, device == 0 ? "Made-up accelerator" : "Made-up accelerator that refuses");
  return CQSA_OK;
}

static cqsa_status device_open(int32_t device, void **device_out) {
  if (device != 0) return CQSA_ERROR_RUNTIME;
  *device_out = &devices_open;
  ++devices_open;
  return CQSA_OK;
}

static void device_close(void *device) { --*(int *)device; }

static cqsa_backend_v1 backend;

#if defined(PLUGIN_UNRESOLVED)
void a_function_that_nobody_has(void);
#endif

#if defined(PLUGIN_NO_ENTRY)
#define ENTRY cqsa_backend_entry_v999
#else
#define ENTRY cqsa_backend_entry_v1
#endif

EXPORT cqsa_status ENTRY(const cqsa_host_v1 *host, const cqsa_backend_v1 **backend_out);
EXPORT cqsa_status ENTRY(const cqsa_host_v1 *host, const cqsa_backend_v1 **backend_out) {
  static char build_id[256];
  if (host->struct_size != sizeof *host || host->abi_version != CQSA_ABI_VERSION) return CQSA_ERROR_ABI_MISMATCH;
  strncpy(build_id, host->build_id, sizeof build_id - 1);
  backend.struct_size = sizeof backend;
  backend.name = PLUGIN_NAME;
  backend.build_id = build_id;
  backend.device_type = CQSA_DEVICE_EXT;
  backend.last_error = last_error;
  backend.state = state;
  backend.device_count = device_count;
  backend.device_properties = device_properties;
  backend.device_open = device_open;
  backend.device_close = device_close;
#if defined(PLUGIN_WRONG_BUILD)
  backend.build_id = "another build";
#elif defined(PLUGIN_REFUSES) /* checks by itself and says so, as the real ones do */
  backend.build_id = "yet another build";
  *backend_out = &backend;
  return CQSA_ERROR_ABI_MISMATCH;
#elif defined(PLUGIN_REFUSES_SILENTLY)
  return CQSA_ERROR_ABI_MISMATCH;
#elif defined(PLUGIN_SMALL_STRUCT)
  backend.struct_size -= 8;
  backend.build_id = "an older build";
#elif defined(PLUGIN_TINY_STRUCT) /* too short to have a build id: nothing past it may be read */
  backend.struct_size = 8;
  backend.build_id = (const char *)1;
#elif defined(PLUGIN_WRONG_NAME)
  backend.name = "somebody_else";
#elif defined(PLUGIN_ENTRY_ERROR)
  return CQSA_ERROR_RUNTIME;
#elif defined(PLUGIN_NO_BACKEND)
  return CQSA_OK;
#elif defined(PLUGIN_HOLLOW)
  backend.device_open = NULL;
#elif defined(PLUGIN_UNRESOLVED)
  a_function_that_nobody_has();
#endif
  *backend_out = &backend;
  return CQSA_OK;
}
