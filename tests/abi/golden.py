# SPDX-License-Identifier: Apache-2.0
"""Compares lines with a committed file. A golden file is changed with --update, and its diff is what a reviewer reads."""
import difflib
import os
import re


def compare(lines, path, update):
    """0 when the lines are those of the file."""
    text = "".join(line + "\n" for line in lines)
    if update:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        print("wrote", path)
        return 0
    before = open(path, encoding="utf-8").read() if os.path.exists(path) else ""
    if text == before:
        return 0
    name = os.path.basename(path)
    print("".join(difflib.unified_diff(before.splitlines(True), text.splitlines(True), "golden " + name, "now " + name)))
    removed = {line for line in set(before.splitlines()) - set(lines) if not re.fullmatch(r"\w+ size \d+", line)}  # may grow
    print("%s differs; %s" % (name, "the ABI is BROKEN: lines went away" if removed else "the ABI grew"))
    print("If that is meant, run this script with --update.")
    return 1
