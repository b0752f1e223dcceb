# SPDX-License-Identifier: Apache-2.0
"""Installs a build into an empty prefix and uses it from there: by find_package, by pkg-config, and the cqsa command.
usage: check_install.py CMAKE BUILD_DIR SOURCE_DIR"""
import json
import os
import shutil
import subprocess
import sys
import tempfile


def run(*command, **keywords):
    print("$", " ".join(command))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **keywords)
    print(done.stdout)
    if done.returncode:
        sys.exit(f"exit status {done.returncode}")
    return done.stdout


def main(cmake, build, source):
    with tempfile.TemporaryDirectory() as scratch:
        prefix = os.path.join(scratch, "prefix")
        run(cmake, "--install", build, "--prefix", prefix)
        consumer = os.path.join(source, "tests", "install", "consumer")
        run(cmake, "-S", consumer, "-B", scratch + "/c", "-DCMAKE_PREFIX_PATH=" + prefix)
        run(cmake, "--build", scratch + "/c")
        run(scratch + "/c/consumer")

        pc = [root for root, _, files in os.walk(prefix) if "cqsa.pc" in files]
        if len(pc) != 1:
            sys.exit("cqsa.pc is not installed exactly once")
        if shutil.which("pkg-config"):
            environment = dict(os.environ, PKG_CONFIG_PATH=pc[0])
            flags = run("pkg-config", "--cflags", "--libs", "cqsa", env=environment).split()
            run("cc", consumer + "/consumer.c", "-o", scratch + "/by_pkg_config", *flags, "-Wl,-rpath," + os.path.dirname(pc[0]))
            run(scratch + "/by_pkg_config")
        # A plugin works beside the library it was built with; whatever it then misses of the machine is its own affair.
        built = os.path.exists(os.path.join(build, "lib", "libcqsa_cuda.so"))
        if os.path.exists(os.path.join(os.path.dirname(pc[0]), "libcqsa_cuda.so")) != built:
            sys.exit(f"libcqsa_cuda.so is {'not ' if built else ''}installed beside libcqsa.so")
        tool = os.path.join(prefix, "bin", "cqsa")
        if os.path.exists(tool):
            environment = {name: value for name, value in os.environ.items() if name != "CQSA_BACKEND_PATH"}
            run(tool, "doctor", env=environment)
            states = {b["name"]: b["state"] for b in json.loads(run(tool, "doctor", "--json", env=environment))["backends"]}
            if built and states["cuda"] in ("not found", "load failed", "abi mismatch"):
                sys.exit(f"the installed CUDA plugin is {states['cuda']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
