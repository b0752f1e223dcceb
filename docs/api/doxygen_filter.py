# SPDX-License-Identifier: Apache-2.0
"""The header as Doxygen reads it: doxygen_filter.py <cqsa.h>, to standard output. The header itself stays plain C with plain comments.

A section's banner becomes a group that holds what follows, a comment in front of a declaration documents that declaration, and a comment behind a field or
a constant documents what is on its line. Lines stay where they are, so that warnings name those of the header.
"""
import re
import sys

RULE = re.compile(r"^/\* =+$")
SECTION = re.compile(r"^ \* (\d+)\. (.*)$")

# Fields that mean the same wherever they are without a comment.
USUAL = {"struct_size": "sizeof of this struct, as the caller knows it", "workspace_bytes": "that lie at workspace", "reserved": "0"}


def escape(text):
    """What Markdown or Doxygen would take for its own."""
    return re.sub(r"(?<!\S)\.\.(?!\S)", "…", re.sub(r"(?<!\\)([<>@#&])(?=\w)", r"\\\1", text))


def is_prose(line):
    """Formulas and tables are further to the right."""
    return not line.startswith(" *    ")


def banner(lines, at, is_open):
    """Lines of a section's banner as one comment that opens its group, and where it ends."""
    number, title = SECTION.match(lines[at + 1]).groups()
    end = next(i for i in range(at + 1, len(lines)) if lines[i].rstrip().endswith("*/"))
    close = "/** @} */ " if is_open else ""
    body = [" *" + escape(line[2:]) if is_prose(line) else line for line in lines[at + 2:end]]
    for n, line in enumerate(body):
        before, after = (0 <= m < len(body) and not is_prose(body[m]) for m in (n - 1, n + 1))
        if not is_prose(line):
            body[n] = (line if before else " * @verbatim" + line[2:]) + ("" if after else " @endverbatim")
    return [f"{close}/** @defgroup section{number} {number}. {title}", " *"] + body + [" * @{ */"], end + 1


def comments(line):
    """Plain comments of one line as Doxygen's: behind code, of that code; otherwise of what follows."""
    initialiser = re.match(r"#define CQSA_(\w+)_INIT ", line)
    if initialiser:
        return f"/** A cqsa_{initialiser.group(1).lower()} with all defaults. */ {line}"
    usual = re.match(r"^\s*[\w ]+ (\w+);$", line)
    if usual and usual.group(1) in USUAL:
        return f"{line} /**< {USUAL[usual.group(1)]} */"
    if re.match(r"^\s*/\*(?![*=])", line):
        return escape(re.sub(r"/\*", "/**", line, count=1))
    if re.match(r"^\s+\* ", line):  # goes on with a comment
        return escape(line)
    return re.sub(r"(?<=\S)(\s+)/\* (.*)", lambda found: found.group(1) + "/**< " + escape(found.group(2)), line)


def main():
    lines = open(sys.argv[1], encoding="utf-8").read().splitlines()
    out, at, is_open = ["/** @file cqsa.h"], 1, False
    while at < len(lines):
        if RULE.match(lines[at]) and at + 1 < len(lines) and SECTION.match(lines[at + 1]):
            made, at = banner(lines, at, is_open)
            out += made
            is_open = True
            continue
        if lines[at].startswith("#endif") and is_open and at == len(lines) - 1:
            out.append("/** @} */")
        out.append(comments(lines[at]))
        at += 1
    print("\n".join(out))


if __name__ == "__main__":
    main()
