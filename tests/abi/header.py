# SPDX-License-Identifier: Apache-2.0
"""Reads cqsa.h: its functions, structs and constants. It knows the style of that one file and refuses anything else, so
that nothing is left out in silence."""
import re


def clean(path):
    """The text without comments, and the preprocessor lines apart."""
    text = open(path, encoding="utf-8").read()
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = text.replace("\\\n", " ")
    directives = re.findall(r"^\s*#.*$", text, flags=re.M)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    return text.replace('extern "C" {', ""), directives


def one_line(text):
    return re.sub(r"\s+", " ", text).strip()


def declarations(path):
    """Top-level declarations, split at semicolons outside braces."""
    text, _ = clean(path)
    found, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += {"{": 1, "}": -1}.get(c, 0)
        if c == ";" and depth == 0:
            found.append(one_line(text[start:i]))
            start = i + 1
    rest = one_line(text[start:])
    if rest not in ("", "}"):  # the brace of extern "C"
        raise SystemExit("header.py: cannot read the end of %s: %r" % (path, rest))
    return found


def functions(path):
    """{name: prototype}, in the order of the header."""
    found = {}
    for text in declarations(path):
        if text.startswith("CQSA_API "):
            text = text[len("CQSA_API "):]
            name = re.search(r"(\w+)\(", text).group(1)
            found[name] = text
        elif "(" in text and not text.startswith(("typedef", "enum")):
            raise SystemExit("header.py: a function without CQSA_API: %r" % text)
    return found


def split_fields(body):
    for text in filter(None, (one_line(part) for part in body.split(";"))):
        pointer = re.fullmatch(r"(.*)\(\*(\w+)\)(\(.*\))", text)
        if pointer:
            yield pointer.group(2), "%s(*)%s" % (pointer.group(1), pointer.group(3))
            continue
        if "," in text or "{" in text:
            raise SystemExit("header.py: one field a line, please: %r" % text)
        plain = re.fullmatch(r"(.*?[ *])(\w+)((?:\[\w+\])*)", text)
        if not plain:
            raise SystemExit("header.py: cannot read the field %r" % text)
        yield plain.group(2), plain.group(1).strip() + plain.group(3)


def structs(path):
    """{struct: [(field, type), ..]}; opaque ones are left out."""
    found = {}
    for text in declarations(path):
        match = re.fullmatch(r"typedef struct (\w+) \{(.*)\} (\w+)", text)
        if match:
            if match.group(1) != match.group(3):
                raise SystemExit("header.py: two names for one struct: %r" % text)
            found[match.group(1)] = list(split_fields(match.group(2)))
        elif "struct" in text and "{" in text:
            raise SystemExit("header.py: cannot read the struct %r" % text[:80])
    return found


def constants(path):
    """Names of all constants: enumerators and numeric macros. The version is not one: it is meant to change."""
    names = []
    for text in declarations(path):
        match = re.fullmatch(r"enum \{(.*)\}", text)
        if match:
            names += re.findall(r"(\w+) =", match.group(1))
            if match.group(1).count("=") != len([e for e in match.group(1).split(",") if e.strip()]):
                raise SystemExit("header.py: an enumerator without a value: %r" % text)
    _, directives = clean(path)
    for line in directives:
        match = re.match(r"\s*#\s*define\s+(CQSA_\w+)\s+(\S.*)", line)
        if match and "{" not in match.group(2) and not match.group(1).startswith(("CQSA_API", "CQSA_VERSION")):
            names.append(match.group(1))
    return names


def initialisers(path):
    """Names of the *_INIT macros."""
    _, directives = clean(path)
    return re.findall(r"#define (CQSA_\w+_INIT)\b", "\n".join(directives))


def typedefs(path):
    """Scalar and function pointer types, as written."""
    return [text for text in declarations(path) if text.startswith("typedef") and not text.startswith("typedef struct")]
