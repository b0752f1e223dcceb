/* SPDX-License-Identifier: Apache-2.0
 *
 * cqsa_tensor is DLTensor: same offsets, sizes and numbers, so that one is the other. Checked by compiling. */
#include <dlpack/dlpack.h>
#include <stddef.h>

#include "cqsa.h"

#define SAME_FIELD(ours, theirs)                                                                        \
  _Static_assert(offsetof(cqsa_tensor, ours) == offsetof(DLTensor, theirs), #ours " is elsewhere");     \
  _Static_assert(sizeof(((cqsa_tensor *)0)->ours) == sizeof(((DLTensor *)0)->theirs), #ours " differs in size")

_Static_assert(sizeof(cqsa_tensor) == sizeof(DLTensor) && sizeof(cqsa_tensor) == 48, "size differs");
SAME_FIELD(data, data);
SAME_FIELD(ndim, ndim);
SAME_FIELD(dtype, dtype);
SAME_FIELD(shape, shape);
SAME_FIELD(strides, strides);
SAME_FIELD(byte_offset, byte_offset);
_Static_assert(offsetof(cqsa_tensor, device_type) == offsetof(DLTensor, device) + offsetof(DLDevice, device_type), "device_type");
_Static_assert(offsetof(cqsa_tensor, device_id) == offsetof(DLTensor, device) + offsetof(DLDevice, device_id), "device_id");

_Static_assert((int)CQSA_DEVICE_CPU == (int)kDLCPU, "cpu");
_Static_assert((int)CQSA_DEVICE_CUDA == (int)kDLCUDA, "cuda");
_Static_assert((int)CQSA_DEVICE_CUDA_HOST == (int)kDLCUDAHost, "cuda host");
_Static_assert((int)CQSA_DEVICE_ROCM == (int)kDLROCM, "rocm");
_Static_assert((int)CQSA_DEVICE_ROCM_HOST == (int)kDLROCMHost, "rocm host");
_Static_assert((int)CQSA_DEVICE_EXT == (int)kDLExtDev, "ext");

/* {code, bits, lanes} as a little-endian number; lanes is 1. */
#define PACKED(code, bits) ((code) | (bits) << 8 | 1 << 16)
_Static_assert(CQSA_DTYPE_I8 == PACKED(kDLInt, 8), "i8");
_Static_assert(CQSA_DTYPE_I32 == PACKED(kDLInt, 32), "i32");
_Static_assert(CQSA_DTYPE_I64 == PACKED(kDLInt, 64), "i64");
_Static_assert(CQSA_DTYPE_U8 == PACKED(kDLUInt, 8), "u8");
_Static_assert(CQSA_DTYPE_F16 == PACKED(kDLFloat, 16), "f16");
_Static_assert(CQSA_DTYPE_F32 == PACKED(kDLFloat, 32), "f32");
_Static_assert(CQSA_DTYPE_F64 == PACKED(kDLFloat, 64), "f64");
_Static_assert(CQSA_DTYPE_BF16 == PACKED(kDLBfloat, 16), "bf16");
/* Codes that DLPack got after 0.6 (bool: 0.8, fp8: 1.1), pinned here because the installed header may be older. */
_Static_assert(CQSA_DTYPE_BOOL == PACKED(6, 8), "bool");
_Static_assert(CQSA_DTYPE_E4M3FN == PACKED(10, 8), "e4m3fn");
_Static_assert(CQSA_DTYPE_E5M2 == PACKED(12, 8), "e5m2");

int main(void) {
  /* The order of the bytes, which the numbers above take for granted. */
  const DLDataType f16 = {kDLFloat, 16, 1};
  const cqsa_dtype ours = CQSA_DTYPE_F16;
  const unsigned char *a = (const unsigned char *)&f16, *b = (const unsigned char *)&ours;
  return !(a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3]);
}
