/* SPDX-License-Identifier: Apache-2.0 */
#include <cqsa.h>
#include <stdio.h>

int main(void) {
  cqsa_context *context = NULL;
  if (cqsa_context_create(NULL, &context) != CQSA_OK) {
    puts(cqsa_last_error());
    return 1;
  }
  printf("cqsa %s, backend %s\n", cqsa_version_string(), cqsa_context_backend(context));
  cqsa_context_destroy(context);
  return cqsa_version() != CQSA_VERSION;
}
