/* SPDX-License-Identifier: Apache-2.0
 * Runs every conformance vector through the C interface of a library that is opened at run time, with the default schedule:
 *
 *     run_vectors_c LIBRARY FOLDER
 *
 * README.md describes the vectors. Exit status: 0 all passed, 1 something failed, 2 the vectors or the library could not be read.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cqsa.h"

static void die(const char *format, ...) {
  va_list list;
  va_start(list, format);
  fputs("run_vectors_c: ", stderr);
  vfprintf(stderr, format, list);
  fputc('\n', stderr);
  va_end(list);
  exit(2);
}

static void *take(size_t bytes) {
  void *memory = calloc(bytes ? bytes : 1, 1);
  if (memory == NULL) die("out of memory");
  return memory;
}

static unsigned char *read_file(const char *folder, const char *name, size_t *bytes_out) {
  char path[4096];
  FILE *file;
  long length = 0;
  unsigned char *bytes;
  if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) die("%s: the path is too long", folder);
  file = fopen(path, "rb");
  if (file == NULL || fseek(file, 0, SEEK_END) != 0 || (length = ftell(file)) < 0 || fseek(file, 0, SEEK_SET) != 0)
    die("cannot read %s", path);
  bytes = take((size_t)length);
  if (fread(bytes, 1, (size_t)length, file) != (size_t)length) die("cannot read %s", path);
  fclose(file);
  *bytes_out = (size_t)length;
  return bytes;
}

/* ---------------------------------------------------------------------------------------------------------------- JSON
 * A node for every value, in the order of the text: a container is followed by all that is in it. Members of an object are
 * a string and a value. Strings have no escapes here; one is refused. */

enum { json_object, json_array, json_string, json_word };

typedef struct json_node {
  int kind;
  int size;           /* values in a container; an object's names count too */
  int after;          /* index of the first node past it and what is in it */
  const char *text;   /* of a string or a word (number, true, false, null), not terminated */
  size_t length;
} json_node;

static json_node *nodes;
static int num_nodes, node_capacity;
static const char *at, *end; /* what is left of the text */

static void skip_space(void) {
  while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) ++at;
}

static char peek(void) {
  skip_space();
  return at < end ? *at : '\0';
}

static void expect(char c) {
  if (peek() != c) die("manifest.json: expected '%c'", c);
  ++at;
}

static int add_node(int kind) {
  if (num_nodes == node_capacity) {
    node_capacity = node_capacity ? 2 * node_capacity : 1024;
    nodes = realloc(nodes, sizeof *nodes * (size_t)node_capacity);
    if (nodes == NULL) die("out of memory");
  }
  memset(&nodes[num_nodes], 0, sizeof *nodes);
  nodes[num_nodes].kind = kind;
  return num_nodes++;
}

static void parse_string(void) {
  const int node = add_node(json_string);
  expect('"');
  nodes[node].text = at;
  while (at < end && *at != '"') {
    if (*at == '\\') die("manifest.json: escapes are not read here");
    ++at;
  }
  nodes[node].length = (size_t)(at - nodes[node].text);
  expect('"');
  nodes[node].after = num_nodes;
}

static void parse_word(void) {
  const int node = add_node(json_word);
  nodes[node].text = at;
  while (at < end && strchr("+-.0123456789abcdefghijklmnopqrstuvwxyzE", *at) != NULL && *at != '\0') ++at;
  nodes[node].length = (size_t)(at - nodes[node].text);
  if (nodes[node].length == 0) die("manifest.json: expected a value");
  nodes[node].after = num_nodes;
}

static void parse_value(int depth);

static void parse_container(int kind, int depth) {
  const int node = add_node(kind);
  const char close = kind == json_object ? '}' : ']';
  int size = 0;
  ++at;
  if (depth > 16) die("manifest.json: too deep");
  while (peek() != close) {
    if (size > 0) expect(',');
    if (kind == json_object) {
      skip_space();
      parse_string();
      expect(':');
      ++size;
    }
    parse_value(depth + 1);
    ++size;
  }
  ++at;
  nodes[node].size = size;
  nodes[node].after = num_nodes;
}

static void parse_value(int depth) {
  const char c = peek();
  if (c == '{') parse_container(json_object, depth);
  else if (c == '[') parse_container(json_array, depth);
  else if (c == '"') parse_string();
  else parse_word();
}

static int same(int node, const char *text) {
  return nodes[node].length == strlen(text) && memcmp(nodes[node].text, text, nodes[node].length) == 0;
}

/* The value of a member, -1 when there is none. */
static int find(int object, const char *name) {
  int node = object + 1, i;
  if (object < 0 || nodes[object].kind != json_object) die("manifest.json: %s is wanted of something that is no object", name);
  for (i = 0; i < nodes[object].size; i += 2) {
    if (same(node, name)) return node + 1;
    node = nodes[node + 1].after;
  }
  return -1;
}

static int member(int object, const char *name) {
  const int node = find(object, name);
  if (node < 0) die("manifest.json: %s is missing", name);
  return node;
}

static void copy_text(int node, char *buffer, size_t size) {
  if (nodes[node].length >= size) die("manifest.json: a text is too long");
  memcpy(buffer, nodes[node].text, nodes[node].length);
  buffer[nodes[node].length] = '\0';
}

static double number_at(int node) {
  char text[64], *stop;
  double value;
  copy_text(node, text, sizeof text);
  value = strtod(text, &stop);
  if (nodes[node].kind != json_word || *stop != '\0') die("manifest.json: %s is no number", text);
  return value;
}

static double number_of(int object, const char *name) {
  const int node = find(object, name);
  return node < 0 ? 0 : number_at(node);
}

static int64_t integer_of(int object, const char *name) { return (int64_t)number_of(object, name); }

/* Position of a member's text in a list of names, 0 when it is absent. */
static int32_t choice_of(int object, const char *name, const char *const *names, int32_t count) {
  const int node = find(object, name);
  int32_t i;
  if (node < 0) return 0;
  for (i = 0; i < count; ++i)
    if (same(node, names[i])) return i;
  die("manifest.json: unknown value of %s", name);
  return 0;
}

/* --------------------------------------------------------------------------------------------------------------- types */

typedef struct type_row {
  cqsa_dtype dtype;
  size_t bytes;
  int exponent_bits, mantissa_bits; /* of the small float types */
} type_row;

static const char *const type_names[] = {"none", "f64", "f32", "f16", "bf16", "e4m3fn", "e5m2", "i8", "i32", "i64", "bool", "u8"};
static const type_row type_rows[] = {
    {CQSA_DTYPE_NONE, 0, 0, 0},    {CQSA_DTYPE_F64, 8, 0, 0},  {CQSA_DTYPE_F32, 4, 0, 0}, {CQSA_DTYPE_F16, 2, 5, 10},
    {CQSA_DTYPE_BF16, 2, 8, 7},    {CQSA_DTYPE_E4M3FN, 1, 4, 3}, {CQSA_DTYPE_E5M2, 1, 5, 2}, {CQSA_DTYPE_I8, 1, 0, 0},
    {CQSA_DTYPE_I32, 4, 0, 0},     {CQSA_DTYPE_I64, 8, 0, 0},  {CQSA_DTYPE_BOOL, 1, 0, 0}, {CQSA_DTYPE_U8, 1, 0, 0}};

static const type_row *type_of(int object, const char *name) { return &type_rows[choice_of(object, name, type_names, 12)]; }

/* A finite value within the type's range, rounded to nearest even. */
static uint32_t encode_small(float value, const type_row *type) {
  const int lowest = 2 - (1 << (type->exponent_bits - 1)); /* exponent of the smallest normal number */
  const double size = fabs((double)value);
  int exponent = lowest;
  uint32_t code;
  if (size != 0) {
    (void)frexp(size, &exponent);
    exponent = exponent - 1 > lowest ? exponent - 1 : lowest;
  }
  code = ((uint32_t)(exponent - lowest) << type->mantissa_bits) + (uint32_t)nearbyint(ldexp(size, type->mantissa_bits - exponent));
  return value < 0 ? code | 1u << (type->exponent_bits + type->mantissa_bits) : code;
}

static double decode(const unsigned char *from, const type_row *type) {
  uint32_t bits = 0;
  float value;
  if (type->bytes == 8) {
    double wide;
    memcpy(&wide, from, sizeof wide);
    return wide;
  }
  memcpy(&bits, from, type->bytes);
  if (type->dtype == CQSA_DTYPE_F16) {
    const int exponent = (int)(bits >> 10 & 31);
    const double mantissa = (double)(bits & 1023);
    const double size = exponent == 31   ? (mantissa == 0 ? HUGE_VAL : NAN)
                        : exponent == 0 ? ldexp(mantissa, -24)
                                        : ldexp(mantissa + 1024, exponent - 25);
    return bits >> 15 ? -size : size;
  }
  if (type->dtype == CQSA_DTYPE_BF16) bits <<= 16;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* ------------------------------------------------------------------------------------------------------------- tensors */

enum { guard = 256, max_axes = 4, max_operands = 16 };

typedef struct operand {
  const char *name;
  const type_row *type;
  int64_t shape[max_axes], strides[max_axes], first;
  size_t bytes;              /* of the buffer, which lies between two guard zones */
  unsigned char *memory;     /* guard, buffer, guard */
  unsigned char *before;     /* the same as it was before the run */
  cqsa_tensor tensor;
} operand;

static uint64_t splitmix64(uint64_t seed, uint64_t n) {
  uint64_t z = seed + (n + 1) * UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static void fill_random(operand *o, int record) {
  const uint64_t seed = (uint64_t)number_of(record, "seed");
  const float scale = (float)number_of(record, "scale"), shift = (float)number_of(record, "shift");
  unsigned char *to = o->memory + guard;
  uint64_t n;
  for (n = 0; n * o->type->bytes < o->bytes; ++n, to += o->type->bytes) {
    const uint64_t z = splitmix64(seed, n);
    const float product = ((float)(z >> 40) * (1.0f / 8388608) - 1.0f) * scale;
    const float value = product + shift;
    if (o->type->dtype == CQSA_DTYPE_I8) {
      *to = (unsigned char)(z >> 56);
    } else if (o->type->exponent_bits != 0) {
      const uint32_t code = encode_small(value, o->type);
      const unsigned char bytes[2] = {(unsigned char)(code & 255), (unsigned char)(code >> 8)};
      memcpy(to, bytes, o->type->bytes);
    } else if (o->type->dtype == CQSA_DTYPE_F32) {
      memcpy(to, &value, sizeof value);
    } else {
      const double wide = value;
      memcpy(to, &wide, sizeof wide);
    }
  }
}

static void read_axes(int record, const char *name, int64_t *axes, int32_t *ndim) {
  const int node = member(record, name);
  int i;
  if (nodes[node].kind != json_array || nodes[node].size > max_axes) die("manifest.json: %s is no list of up to 4 numbers", name);
  for (i = 0; i < nodes[node].size; ++i) axes[i] = (int64_t)number_at(node + 1 + i);
  *ndim = nodes[node].size;
}

static void read_operand(operand *o, const char *name, int record, const unsigned char *file, size_t file_bytes) {
  int32_t ndim = 0;
  memset(o, 0, sizeof *o);
  o->name = name;
  o->type = type_of(record, "dtype");
  read_axes(record, "shape", o->shape, &ndim);
  read_axes(record, "strides", o->strides, &ndim);
  o->first = integer_of(record, "first");
  o->bytes = (size_t)integer_of(record, "elements") * o->type->bytes;
  o->memory = take(o->bytes + 2 * guard);
  o->before = take(o->bytes + 2 * guard);
  memset(o->memory, 0xFF, o->bytes + 2 * guard);
  if (find(record, "seed") >= 0) fill_random(o, record);
  if (find(record, "at") >= 0) {
    const size_t from = (size_t)integer_of(record, "at");
    if (from > file_bytes || o->bytes > file_bytes - from) die("%s reaches past its file", name);
    memcpy(o->memory + guard, file + from, o->bytes);
  }
  memcpy(o->before, o->memory, o->bytes + 2 * guard);
  o->tensor.data = o->memory + guard;
  o->tensor.device_type = CQSA_DEVICE_CPU;
  o->tensor.ndim = ndim;
  o->tensor.dtype = o->type->dtype;
  o->tensor.shape = o->shape;
  o->tensor.strides = o->strides;
  o->tensor.byte_offset = (uint64_t)o->first * o->type->bytes;
}

static int64_t count_of(const operand *o) {
  int64_t count = 1;
  int32_t i;
  for (i = 0; i < o->tensor.ndim; ++i) count *= o->shape[i];
  return count;
}

/* Byte offset, in memory, of element n in row-major order. */
static size_t offset_of(const operand *o, int64_t n) {
  int64_t element = o->first;
  int32_t i;
  for (i = o->tensor.ndim - 1; i >= 0; n /= o->shape[i], --i) element += n % o->shape[i] * o->strides[i];
  if (element < 0 || (size_t)(element + 1) * o->type->bytes > o->bytes) die("%s: an element lies outside of its buffer", o->name);
  return guard + (size_t)element * o->type->bytes;
}

/* ------------------------------------------------------------------------------------------------------------- library */

static struct {
  cqsa_status (*context_create)(const cqsa_context_params *, cqsa_context **);
  void (*context_destroy)(cqsa_context *);
  cqsa_status (*attention)(cqsa_context *, const cqsa_attention_params *, const cqsa_attention_args *, void *);
  const char *(*last_error)(void);
  int32_t (*abi_version)(void);
} lib;

static void load(void *library, const char *name, void *function_out) {
  void *symbol = dlsym(library, name);
  if (symbol == NULL) die("the library lacks %s", name);
  memcpy(function_out, &symbol, sizeof symbol);
}

static void load_library(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) die("%s", dlerror());
  load(library, "cqsa_context_create", &lib.context_create);
  load(library, "cqsa_context_destroy", &lib.context_destroy);
  load(library, "cqsa_attention", &lib.attention);
  load(library, "cqsa_last_error", &lib.last_error);
  load(library, "cqsa_abi_version", &lib.abi_version);
  if (lib.abi_version() != CQSA_ABI_VERSION) die("the library has another ABI");
}

/* --------------------------------------------------------------------------------------------------------------- cases */

static void read_params(int record, cqsa_attention_params *p) {
  static const char *const flags[] = {"window", "varlen", "paged", "seqused_k", "mask", "bias", "alibi", "sinks", "lse"};
  static const char *const causal[] = {"none", "top_left", "bottom_right"};
  static const char *const scales[] = {"none", "tensor", "head", "token", "group"};
  const cqsa_attention_params defaults = CQSA_ATTENTION_PARAMS_INIT;
  const int list = member(record, "flags");
  int i, bit;
  *p = defaults;
  for (i = 0; i < nodes[list].size; ++i)
    for (bit = 0; bit < 9; ++bit)
      if (same(list + 1 + i, flags[bit])) p->flags |= 1u << bit;
#define INTEGER(field) p->field = integer_of(record, #field)
  INTEGER(batch), INTEGER(num_heads), INTEGER(num_kv_heads), INTEGER(head_dim), INTEGER(head_dim_v), INTEGER(seqlen_q);
  INTEGER(seqlen_k), INTEGER(total_q), INTEGER(total_k), INTEGER(page_size), INTEGER(num_pages), INTEGER(kv_group);
  INTEGER(window_left), INTEGER(window_right);
#undef INTEGER
  p->dtype_q = type_of(record, "dtype_q")->dtype;
  p->dtype_kv = type_of(record, "dtype_kv")->dtype;
  p->dtype_out = type_of(record, "dtype_out")->dtype;
  p->dtype_bias = type_of(record, "dtype_bias")->dtype;
  p->scale_k = choice_of(record, "scale_k", scales, 5);
  p->scale_v = choice_of(record, "scale_v", scales, 5);
  p->causal = choice_of(record, "causal", causal, 3);
  p->softmax_scale = number_of(record, "softmax_scale");
  p->softcap = number_of(record, "softcap");
  p->mask_broadcast = (uint32_t)integer_of(record, "mask_broadcast");
  p->bias_broadcast = (uint32_t)integer_of(record, "bias_broadcast");
}

static const cqsa_tensor **slot_of(cqsa_attention_args *args, const char *name) {
#define SLOT(field) \
  if (strcmp(name, #field) == 0) return &args->field
  SLOT(q);
  SLOT(k);
  SLOT(v);
  SLOT(k_scale);
  SLOT(v_scale);
  SLOT(mask);
  SLOT(bias);
  SLOT(alibi_slopes);
  SLOT(sinks);
  SLOT(cu_seqlens_q);
  SLOT(cu_seqlens_k);
  SLOT(seqused_k);
  SLOT(page_table);
  SLOT(out);
  SLOT(lse);
#undef SLOT
  die("manifest.json: unknown operand %s", name);
  return NULL;
}

static const char *const operand_names[] = {"q", "k", "v", "k_scale", "v_scale", "mask", "bias", "alibi_slopes", "sinks",
                                            "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "out", "lse"};

static int read_operands(int record, operand *operands, cqsa_attention_args *args, const unsigned char *file, size_t file_bytes) {
  const int inputs = member(record, "inputs"), outputs = member(record, "outputs");
  int count = 0;
  size_t i;
  for (i = 0; i < sizeof operand_names / sizeof *operand_names; ++i) {
    const char *name = operand_names[i];
    const int node = find(strcmp(name, "out") == 0 || strcmp(name, "lse") == 0 ? outputs : inputs, name);
    if (node < 0) continue;
    read_operand(&operands[count], name, node, file, file_bytes);
    *slot_of(args, name) = &operands[count++].tensor;
  }
  return count;
}

/* NULL, or what is wrong. */
static const char *check_values(const operand *o, const unsigned char *expected, const type_row *type, double tolerance) {
  static char text[256];
  int64_t n;
  for (n = 0; n < count_of(o); ++n) {
    const double got = decode(o->memory + offset_of(o, n), o->type);
    const double want = decode(expected + (size_t)n * type->bytes, type);
    if (got == want || (isfinite(want) && fabs(got - want) <= tolerance * (fabs(want) > 1 ? fabs(want) : 1))) continue;
    snprintf(text, sizeof text, "%s[%ld] is %.9g, wanted %.9g", o->name, (long)n, got, want);
    return text;
  }
  return NULL;
}

static const char *check_untouched(operand *o, int is_output) {
  static char text[128];
  int64_t n;
  if (is_output)
    for (n = 0; n < count_of(o); ++n) memset(o->memory + offset_of(o, n), 0xFF, o->type->bytes);
  if (memcmp(o->memory, o->before, o->bytes + 2 * guard) == 0) return NULL;
  snprintf(text, sizeof text, "%s was written where it must not be", o->name);
  return text;
}

static const char *check_output(operand *o, int expected, const unsigned char *file, size_t file_bytes) {
  const type_row *type = type_of(expected, "dtype");
  char key[32];
  size_t from;
  const char *wrong;
  snprintf(key, sizeof key, "%s_at", o->name);
  from = (size_t)number_at(member(expected, key));
  if (from > file_bytes || (size_t)count_of(o) * type->bytes > file_bytes - from) die("expected values reach past the file");
  snprintf(key, sizeof key, "%s_tolerance", o->name);
  wrong = check_values(o, file + from, type, number_at(member(expected, key)));
  return wrong != NULL ? wrong : check_untouched(o, 1);
}

static const char *run_case(cqsa_context *context, int record, const char *folder) {
  cqsa_attention_params params;
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  operand operands[max_operands];
  char name[256];
  size_t file_bytes;
  unsigned char *file;
  const char *wrong = NULL;
  int count, i;
  copy_text(member(record, "file"), name, sizeof name);
  file = read_file(folder, name, &file_bytes);
  read_params(member(record, "params"), &params);
  count = read_operands(record, operands, &args, file, file_bytes);
  if (lib.attention(context, &params, &args, NULL) != CQSA_OK) wrong = lib.last_error();
  for (i = 0; i < count && wrong == NULL; ++i) {
    const int is_output = &operands[i].tensor == args.out || &operands[i].tensor == args.lse;
    wrong = is_output ? check_output(&operands[i], member(record, "expected"), file, file_bytes) : check_untouched(&operands[i], 0);
  }
  for (i = 0; i < count; ++i) {
    free(operands[i].memory);
    free(operands[i].before);
  }
  free(file);
  return wrong;
}

int main(int argc, char **argv) {
  const cqsa_context_params params = {sizeof(cqsa_context_params), 0, "cpu", NULL, 0, 2, NULL, NULL, NULL, NULL, NULL};
  cqsa_context *context = NULL;
  size_t bytes;
  unsigned char *text;
  int cases, record, i, count, failed = 0;
  if (argc != 3) die("usage: run_vectors_c LIBRARY FOLDER");
  load_library(argv[1]);
  text = read_file(argv[2], "manifest.json", &bytes);
  at = (const char *)text;
  end = at + bytes;
  parse_value(0);
  cases = member(0, "cases");
  if (number_of(0, "format") != 1 || nodes[cases].kind != json_array) die("the manifest has another format than 1");
  if (lib.context_create(&params, &context) != CQSA_OK) die("%s", lib.last_error());
  count = nodes[cases].size;
  for (i = 0, record = cases + 1; i < count; ++i, record = nodes[record].after) {
    char name[256];
    const char *wrong = run_case(context, record, argv[2]);
    copy_text(member(record, "name"), name, sizeof name);
    if (wrong != NULL) printf("FAILED %s: %s\n", name, wrong);
    failed += wrong != NULL;
  }
  lib.context_destroy(context);
  printf("%d cases, %d failed\n", count, failed);
  free(nodes);
  free(text);
  return failed != 0 || count == 0;
}
