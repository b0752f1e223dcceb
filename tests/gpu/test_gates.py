# SPDX-License-Identifier: Apache-2.0
"""That the gates of this folder bite: each is given what it must refuse, and what it must let pass.

    test_gates.py SOURCE_DIR [PTXAS ARCH]
"""
import contextlib
import io
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv[1])
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "gpu")]
import check_hip_objects
import check_sources
import ptxas_report

PTXAS = sys.argv[2:4]

LOG = """# source {source}, code {code}, compiler nvcc-13.0.88
# seconds 1
ptxas info    : 0 bytes gmem
{note}
ptxas info    : Compiling entry function '{kernel}' for '{code}'
ptxas info    : Function properties for {kernel}
    {stack} bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 376 bytes cmem[0]
"""
HIP_LOG = """# source backends/gpu/{kernel}.cu, code {chip}, lanes 64
a.cu:4:1: remark: Function Name: {kernel} [-Rpass-analysis=kernel-resource-usage]
a.cu:4:1: remark:     VGPRs: 20 [-Rpass-analysis=kernel-resource-usage]
a.cu:4:1: remark:     {field}: {spill} [-Rpass-analysis=kernel-resource-usage]
"""
# Above .target sm_70.
LDMATRIX = """.version 6.5
.target {target}
.address_size 64
.visible .entry k(.param .u64 p) {{
  .reg .b32 %r<3>;
  mov.u32 %r1, 0;
  ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r2}}, [%r1];
  ret;
}}
"""
BAD_SOURCES = ["int lane = threadIdx.x;", "cudaMalloc(x);", "cuMemAlloc(x);", "hipFree(p);", 'asm("x");', 'asm volatile("");', "__syncwarp();",
               "#ifdef __CUDA_ARCH__", "#include <cuda_fp16.h>", "int l = thread_index() % 32;", "int lane = t & 31;",
               "constexpr int lanes = 32;", "reduce<32>(x);", "v += __shfl_xor(v, m);", "int warp = 1;"]
GOOD_SOURCES = ["// cudaMalloc, asm, lane 32, warp", "int width = 32; x >> 32;", "/* hipFree\n threadIdx */ params.cu_seqlens_q[0];",
                "int cuda = acquire(current);", "shuffle_xor<Lanes>(x, 1);"]


def status_of(program, *arguments):
    """(exit status, what it printed) of a program's main(), in this process: there are many calls."""
    said = io.StringIO()
    before, sys.argv = sys.argv, [program.__name__, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(said):
            status = int(program.main())
    except SystemExit as stop:
        status = 1 if isinstance(stop.code, str) else stop.code
    finally:
        sys.argv = before
    return status, said.getvalue()


class Registers(unittest.TestCase):
    def report(self, *options, logs=({},), files=None):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for number, log in enumerate(logs):
                values = dict(source="backends/gpu/a.cu", code="sm_80", kernel="k", note="", stack=0, spill=0, registers=100)
                (folder / f"{number}.log").write_text(LOG.format(**{**values, **log}))
            (folder / "logs.txt").write_text("\n".join(f"{number}.log" for number in range(len(logs))))
            for name, text in (files or {}).items():
                (folder / name).write_text(text)
                (folder / name).chmod(0o755)
            return status_of(ptxas_report, folder, *[option.replace("@", f"{folder}/") for option in options])

    def refused(self, words, *arguments, **keywords):
        status, said = self.report(*arguments, **keywords)
        self.assertEqual(status, 1, said)
        self.assertIn(words, said)

    def passes(self, *arguments, **keywords):
        status, said = self.report(*arguments, **keywords)
        self.assertEqual(status, 0, said)

    def test_spills(self):
        self.passes(logs=[{}, {"code": "sm_90a"}])
        self.passes(logs=[{"stack": 48}])
        self.refused("k for sm_80 spills 4 bytes", logs=[{"spill": 4}])

    def test_allowed_spills(self):
        spills = [{"spill": 80}, {"spill": 80, "code": "sm_90a"}]
        self.passes("--allowed", "@s", logs=spills, files={"s": "k sm_* 80 why\n"})
        self.refused("spills 80", "--allowed", "@s", logs=spills, files={"s": "k sm_* 79 why\n"})
        self.refused("sm_90a spills 80", "--allowed", "@s", logs=spills, files={"s": "k sm_80 80 why\n"})
        self.refused("take it off", "--allowed", "@s", files={"s": "k sm_* 80 why\n"})
        self.refused("spills 80", "--allowed", "@s", logs=[{"spill": 80, "source": "backends/cuda/sm80/a.cu"}], files={"s": "k sm_* 80 why\n"})

    def test_what_ptxas_ignored(self):
        self.refused("C7508", logs=[{"note": "ptxas info : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements."}])
        self.refused("C7510", logs=[{"note": "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"}])

    def test_missing_kernel(self):
        self.refused("j is not there for sm_90a", logs=[{}, {"code": "sm_90a"}, {"kernel": "j"}])
        self.passes(logs=[{}, {"code": "sm_90a"}, {"kernel": "j", "source": "backends/cuda/sm80/j.cu"}])

    def test_kernel_of_sm_80_on_later_chips(self):
        for code, source, missing in [("sm_86", "a.cu", False), ("sm_89", "a.cu", False), ("sm_86", "fp8_a.cu", False), ("sm_89", "fp8_a.cu", True)]:
            logs = [{}, {"code": code}, {"kernel": "j", "source": "backends/gpu/" + source}]
            self.refused("j is not there for sm_89", logs=logs) if missing else self.passes(logs=logs)
        self.refused("j is not there for sm_86", logs=[{"code": "sm_75", "kernel": "j"}, {"code": "sm_75"}, {"code": "sm_86"}])

    def test_table(self):
        table = "Compilers: {}. A cell\n\n| kernel | sm_80 |\n|---|---|\n{}"
        for text, fault in [("| `k` | 100 |\n", ""), ("| `k` | 107 |\n", ""), ("| `k` | 91 |\n", "registers 91, now 100"), ("", "has no k"),
                            ("| `k` | 100, stack 80 |\n", "stack 80, now 0"), ("| `k` | 100 |\n| `j` | 100 |\n", "still has j")]:
            files = {"t.md": table.format("nvcc-13.0", text)}
            if fault:
                self.refused(fault, "--compare", "@t.md", files=files)
            else:
                self.passes("--compare", "@t.md", files=files)
        self.passes("--compare", "@t.md", files={"t.md": table.format("nvcc-12.9", "| `k` | 50 |\n")})

    def test_dynamic_shared_memory(self):
        table = "Compilers: nvcc-13.0. A cell\n\n| kernel | dynamic shared | sm_80 |\n|---|---|---|\n| `k` | {} | 100 |\n"
        options = "--launches", "@run", "--compare", "@t.md"
        for said, cell in [("k 0 0", "0"), ("k 1024 1024", "1024"), ("k 8 64", "8-64")]:
            self.passes(*options, files={"run": f"#!/bin/sh\necho {said}\necho j 1 1\n", "t.md": table.format(cell)})
        files = {"run": "#!/bin/sh\necho k 8 65\n", "t.md": table.format("8-64")}
        self.refused("k has 8-64 bytes of dynamic shared memory, now 8-65", *options, files=files)
        self.refused("k has no bytes", *options, files={**files, "t.md": table.format("")})
        self.refused("run launches no k", *options, files={**files, "run": "#!/bin/sh\necho j 1 1\n"})
        self.passes("--launches", "@run", "--update", "@new.md", files=files)

    def test_nothing_built(self):
        self.assertEqual(self.report(logs=[])[0], 1)


class HipObjects(unittest.TestCase):
    GOOD = [{}, {"chip": "gfx1100"}, {"kernel": "j"}, {"kernel": "j", "chip": "gfx1100"}]

    def check(self, objects, sources=("k", "j")):
        """The objects of kernels, each with its log and a list of them, beside the sources of kernels."""
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            gpu = folder / "backends" / "gpu"
            gpu.mkdir(parents=True)
            for kernel in sources:
                (gpu / f"{kernel}.cu").write_text(f"CQSA_KERNEL(256, {kernel}, params) {{ }}\n")
            names = []
            for values in objects:
                values = dict(dict(kernel="k", chip="gfx90a", machine=224, field="VGPRs Spill", spill=0, descriptor=values.get("kernel", "k")), **values)
                names.append("{kernel}.{chip}.co".format(**values))
                head = b"\x7fELF" + bytes(14) + values["machine"].to_bytes(2, "little")
                (folder / names[-1]).write_bytes(head + values["descriptor"].encode() + b".kd")
                (folder / (names[-1] + ".log")).write_text(values.get("log", HIP_LOG.format(**values)))
            (folder / "objects.txt").write_text("\n".join(names))
            return status_of(check_hip_objects, folder, folder)

    def refused(self, words, *objects):
        status, said = self.check(objects)
        self.assertEqual(status, 1, said)
        self.assertIn(words, said)

    def test_complete(self):
        status, said = self.check(self.GOOD)
        self.assertEqual(status, 0, said)

    def test_missing_kernel(self):
        self.refused("j is not there for gfx1100", *self.GOOD[:3])
        self.refused("j is not there for gfx90a", *self.GOOD[:2])
        self.refused("no descriptor of k", {"descriptor": "j"}, *self.GOOD[1:])
        self.refused("k.gfx90a.co has no kernel", {"log": "# source a.cu, code gfx90a, lanes 64\n"}, *self.GOOD[1:])
        self.assertEqual(self.check([])[0], 1)

    def test_other_code(self):
        self.refused("not AMD code", {"machine": 190}, *self.GOOD[1:])

    def test_spills(self):
        self.refused("k spills 1 VGPRs, allowed are 0", {"spill": check_hip_objects.MOST_SPILLS + 1}, *self.GOOD[1:])
        self.refused("nothing is said of what k spills", {"field": "SGPRs Spill"}, *self.GOOD[1:])


class Sources(unittest.TestCase):
    def check(self, text, name="a.cuh", core="int x;"):
        with tempfile.TemporaryDirectory() as folder:
            for path, content in ((f"backends/gpu/{name}", text), ("src/a.h", core), ("include/a.h", "")):
                path = pathlib.Path(folder) / path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
            return status_of(check_sources, folder)[0]

    def test_portable_tier(self):
        for text in BAD_SOURCES:
            self.assertEqual(self.check(text), 1, text)
        for text in GOOD_SOURCES:
            self.assertEqual(self.check(text), 0, text)

    def test_core(self):
        self.assertEqual(self.check("", core="#include <cuda.h>"), 1)
        self.assertEqual(self.check("", core="#include <hip/hip_runtime.h>"), 1)


@unittest.skipUnless(PTXAS, "no ptxas")
class OldTarget(unittest.TestCase):
    def assemble(self, target):
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(LDMATRIX.format(target=target))
            file.flush()
            return subprocess.run([PTXAS[0], f"-arch=sm_{PTXAS[1]}", file.name, "-o", "/dev/null"], capture_output=True).returncode

    def test_ptxas_refuses_what_is_above_the_target(self):
        self.assertEqual(self.assemble("sm_75"), 0)
        self.assertNotEqual(self.assemble("sm_70"), 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
