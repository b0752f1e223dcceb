# SPDX-License-Identifier: Apache-2.0
"""The ctypes declarations against the header itself; needs a C compiler, not the library."""
import ctypes
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import cqsa
from cqsa import _errors, _ffi

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
INCLUDE = pathlib.Path(__file__).parents[2] / "include"
HEADER = (INCLUDE / "cqsa.h").read_text()


@pytest.fixture(scope="module")
def of_header(tmp_path_factory):
    """Sizes, offsets and constants as a C compiler sees them: {"cqsa_tensor": 48, "cqsa_tensor.data": 0, ..}."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    lines = []
    for name, struct in _ffi.STRUCTS.items():
        lines.append(f'P("{name}", sizeof({name}));')
        lines += [f'P("{name}.{field[0]}", offsetof({name}, {field[0]}));' for field in struct._fields_]
        lines += [f'P("sizeof {name}.{field[0]}", sizeof((({name} *)0)->{field[0]}));' for field in struct._fields_]
    lines += [f'P("{name}", {name});' for name in sorted(set(re.findall(r"\b(CQSA_[A-Z0-9_]+) =", HEADER)))]
    lines.append('P("CQSA_ABI_VERSION", CQSA_ABI_VERSION);')
    folder = tmp_path_factory.mktemp("layout")
    source = folder / "layout.c"
    source.write_text('#include <stddef.h>\n#include <stdio.h>\n#include "cqsa.h"\n'
                      '#define P(name, value) printf("%s=%lld\\n", name, (long long)(value))\n'
                      "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
    subprocess.run([compiler, "-I", INCLUDE, source, "-o", folder / "layout"], check=True)
    printed = subprocess.run([folder / "layout"], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split("=") for line in printed.splitlines())}


@pytest.mark.parametrize("name", _ffi.STRUCTS)
def test_struct_layout(of_header, name):
    struct = _ffi.STRUCTS[name]
    assert ctypes.sizeof(struct) == of_header[name]
    for field in struct._fields_:
        descriptor = getattr(struct, field[0])
        assert (field[0], descriptor.offset) == (field[0], of_header[f"{name}.{field[0]}"])
        assert (field[0], descriptor.size) == (field[0], of_header[f"sizeof {name}.{field[0]}"])


def test_every_public_struct_and_field_is_declared():
    structs = dict(re.findall(r"typedef struct (cqsa_\w+) \{(.*?)\n\} \1;", HEADER, re.DOTALL))
    assert set(structs) == set(_ffi.STRUCTS)
    for name, body in structs.items():
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
        fields = []
        for declaration in filter(None, (part.strip() for part in body.split(";"))):
            function = re.search(r"\(\*(\w+)\)", declaration)
            fields += [function.group(1)] if function else [
                re.search(r"(\w+)(\[\d+\])?$", part.strip()).group(1) for part in declaration.split(",")]
        assert fields == [field[0] for field in _ffi.STRUCTS[name]._fields_]


def test_every_function_is_declared_with_as_many_arguments():
    found = re.findall(r"^CQSA_API\s+[\w\s*]+?[\s*](cqsa_\w+)\((.*?)\);", HEADER, re.DOTALL | re.MULTILINE)
    assert {name for name, _ in found} == set(_ffi.FUNCTIONS)
    for name, arguments in found:
        count = 0 if arguments.strip() == "void" else arguments.count(",") + 1
        assert (name, len(_ffi.FUNCTIONS[name][1])) == (name, count)


def test_declarations_are_those_of_the_header():
    done = subprocess.run([sys.executable, TOOLS / "declarations.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_arguments_are_of_the_declared_kinds():
    """ctypes' prototypes beside what cffi reads in the same declarations."""
    ffi = pytest.importorskip("cqsa.cffi", reason="no cffi").ffi
    lib = cqsa.cffi.library()
    for name, (result, arguments) in _ffi.FUNCTIONS.items():
        kind = ffi.typeof(getattr(lib, name))
        assert (name, [_kind_of(argument) for argument in arguments]) == (name, [_declared(argument) for argument in kind.args])
        assert (name, _kind_of(result)) == (name, _declared(kind.result))


def _declared(kind):
    return kind.kind if kind.kind in ("pointer", "void") else kind.cname


def _kind_of(kind):
    if kind is None:
        return "void"
    if kind in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(kind, ctypes._Pointer):
        return "pointer"
    return {ctypes.c_int32: "int32_t", ctypes.c_int64: "int64_t", ctypes.c_uint64: "uint64_t", ctypes.c_float: "float"}[kind]


def test_calls_by_cffi_alone():
    ffi = pytest.importorskip("cqsa.cffi", reason="no cffi").ffi
    lib = cqsa.cffi.library()
    context = ffi.new("cqsa_context **")
    assert lib.cqsa_context_create(ffi.NULL, context) == lib.CQSA_OK
    values = np.random.default_rng(1).standard_normal((3, 1, 2, 9, 8)).astype(np.float32)
    out = np.empty_like(values[0])
    shape = ffi.new("int64_t[4]", values.shape[1:])
    q, k, v, to = [ffi.new("cqsa_tensor *", {"data": ffi.from_buffer(a), "device_type": lib.CQSA_DEVICE_CPU, "ndim": 4,
                                             "dtype": lib.CQSA_DTYPE_F32, "shape": shape}) for a in (*values, out)]
    params = ffi.new("cqsa_attention_params *", {"struct_size": ffi.sizeof("cqsa_attention_params"), "causal": lib.CQSA_CAUSAL_TOP_LEFT})
    args = ffi.new("cqsa_attention_args *", {"struct_size": ffi.sizeof("cqsa_attention_args"), "q": q, "k": k, "v": v, "out": to})
    assert lib.cqsa_attention(context[0], params, args, ffi.NULL) == lib.CQSA_OK
    np.testing.assert_array_equal(out, cqsa.attention(*values, causal="top_left"))
    params.causal = 9
    assert lib.cqsa_attention(context[0], params, args, ffi.NULL) == lib.CQSA_ERROR_UNKNOWN_FLAG
    assert b"causal" in ffi.string(lib.cqsa_last_error())
    lib.cqsa_context_destroy(context[0])


def test_constants(of_header):
    for name in dir(_ffi):
        if re.match(r"(DTYPE|DEVICE|ATTENTION|SELECTED|FP8|MOE)_|ABI_VERSION", name) and isinstance(getattr(_ffi, name), int):
            assert (name, getattr(_ffi, name)) == (name, of_header["CQSA_" + name])
    for names, prefix in ((_ffi.BACKEND_STATES, "CQSA_BACKEND_"), (_ffi.SCHEDULES, "CQSA_SCHEDULE_"),
                          (_ffi.MEMORIES, "CQSA_MEMORY_"), (_ffi.CAUSAL, "CQSA_CAUSAL_"),
                          (_ffi.PRECISIONS, "CQSA_PRECISION_"), (_ffi.FP8_SCALES, "CQSA_FP8_SCALES_"), (_ffi.FP8_NAN, "CQSA_FP8_NAN_"),
                          (_ffi.FP8_PROVIDERS, "CQSA_FP8_PROVIDER_")):
        wanted = {prefix + name.upper(): value for value, name in enumerate(names)}
        assert wanted == {name: value for name, value in of_header.items() if name.startswith(prefix)}
    for names, prefix in ((_ffi.MOE_ACTIVATIONS, "CQSA_MOE_"), (_ffi.MOE_LAYOUTS, "CQSA_MOE_"), (_ffi.MOE_OUTPUTS, "CQSA_MOE_"), (_ffi.MOE_SCORINGS, "CQSA_MOE_"),
                          (_ffi.MOE_PRECISIONS, "CQSA_MOE_PRECISION_"), (_ffi.MOE_GROUP_SCORES, "CQSA_MOE_GROUP_")):
        for value, name in enumerate(names):
            assert (name, value) == (name, of_header[prefix + name.upper()])
    for value, name in enumerate(_ffi.FP8_RINGS):
        assert of_header["CQSA_FP8_RING_" + name.upper()] == value
    assert _ffi.FP8_ACCUMULATE == {"promote": of_header["CQSA_FP8_PROMOTE_128"], "fast": of_header["CQSA_FP8_FAST"]}


def test_statuses(of_header):
    wanted = {name: value for name, value in of_header.items() if re.match(r"CQSA_(OK$|ERROR_)", name)}
    assert {name: status for status, name in _errors.STATUS_NAMES.items()} == wanted
    for name in dir(_errors):
        if name.startswith("ERROR_"):
            assert getattr(_errors, name) == of_header["CQSA_" + name]


@pytest.mark.parametrize("status, family", [(1, ValueError), (19, ValueError), (20, NotImplementedError),
                                            (40, MemoryError), (60, RuntimeError), (80, RuntimeError)])
def test_error_families(status, family):
    error = _errors.error_for(status, "a sentence")
    assert isinstance(error, family) and isinstance(error, _errors.CqsaError)
    assert (error.status, str(error)) == (status, "a sentence")
