# SPDX-License-Identifier: Apache-2.0
"""Runs the C and Python programs that README.md prints, so that they stay true.
usage: readme_programs.py SOURCE_DIR LIBCQSA C_COMPILER"""
import os
import re
import subprocess
import sys
import tempfile


def blocks(text, language):
    return re.findall(r"```" + language + r"\n(.*?)```", text, re.S)


def run(command, **keywords):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **keywords)
    print("$", " ".join(command))
    print(done.stdout)
    if done.returncode:
        sys.exit(f"exit status {done.returncode}")
    return done.stdout


def main(source, library, compiler):
    with open(os.path.join(source, "README.md"), encoding="utf-8") as file:
        readme = file.read()
    c_programs = [b for b in blocks(readme, "c") if "int main" in b]
    python_programs = blocks(readme, "python")
    if not c_programs or not python_programs:
        sys.exit("README.md has no C program or no Python program")
    folder = os.path.dirname(library)
    with tempfile.TemporaryDirectory() as scratch:
        for number, program in enumerate(c_programs):
            name = os.path.join(scratch, f"readme{number}")
            with open(name + ".c", "w", encoding="utf-8") as file:
                file.write(program)
            run([compiler, "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wstrict-prototypes", "-Werror", name + ".c", "-o", name,
                 "-I" + os.path.join(source, "include"), library, "-Wl,-rpath," + folder])
            run([name])
    environment = dict(os.environ, PYTHONPATH=os.path.join(source, "bindings", "python"), CQSA_LIBRARY=library)
    for program in python_programs:
        run([sys.executable, "-c", program], env=environment)


if __name__ == "__main__":
    main(*sys.argv[1:])
