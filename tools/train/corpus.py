"""Builds the training corpus of the embedded model from released Python packages.

    python tools/train/corpus.py download --dir WHEELS      # pip download, wheels only
    python tools/train/corpus.py build --dir WHEELS --out OUT

`build` writes OUT/train.bin (files joined by NUL, UTF-8), OUT/heldout/<package>/...,
OUT/manifest.json and, with --fix-heldout, held_out.json (the 32 evaluation files, chosen once and
then committed).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Packages never trained on; the 32 evaluation files come from them.
HELD_OUT = ("networkx", "attrs", "rich")

# Permissive licences only (MIT, BSD, Apache-2.0, PSF, ISC, HPND): `licence_of` reads each one.
PACKAGES = """
numpy scipy scikit-learn pandas jax sympy transformers django sqlalchemy matplotlib statsmodels
astropy scikit-image dask distributed xarray bokeh sphinx twisted tornado aiohttp setuptools pip
mypy black pytest pydantic fastapi flask werkzeug jinja2 requests urllib3 httpx click ipython
jupyter-client jupyter-server nbconvert notebook babel docutils pillow tensorflow-cpu keras flax
optax optuna lightning accelerate diffusers peft datasets torchvision torchaudio torch-geometric
timm sentence-transformers huggingface-hub spacy nltk apache-airflow-core celery kombu scrapy
boto3 botocore prompt-toolkit pygments textual ray mlflow dagster prefect vllm deepspeed numba
cython pyarrow polars plotly altair seaborn pymc arviz trl wagtail djangorestframework
homeassistant openai langchain-core langchain kubernetes opentelemetry-sdk cvxpy qiskit pennylane
cirq-core biopython pyomo poetry virtualenv tox coverage fsspec
""".split()  # noqa: SIM905

# Read for deduplication only: left out of the training text to keep it near 370 MB.
LEFT_OUT = frozenset(
    """
    vllm homeassistant tensorflow-cpu ray pennylane pyomo mlflow dagster prefect openai kubernetes
    wagtail diffusers apache-airflow-core cirq-core qiskit timm astropy cvxpy biopython deepspeed
    """.split()  # noqa: SIM905
)

# Read from the interpreter's own environment: not on the index as a small wheel.
INSTALLED = ("torch",)

PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|Historical Permission|MIT-CMU"
    r"|Biopython|0BSD|CNRI)\b",
    re.I,
)
COPYLEFT = re.compile(
    r"\bGPL|\bLGPL|\bAGPL|GNU (Lesser |Affero )?General|Mozilla Public|\bMPL|EUPL|CC-BY-SA|SSPL",
    re.I,
)

# Generated or data-like files teach nothing and crowd out code.
SKIP_PATH = re.compile(
    r"(_pb2|_pb2_grpc|_version|unicodedata|mathtables|_tables?|cacert|entities|emoji\w*|_builtins|lextab|yacctab)\.py$"
    r"|/(_vendor|vendored|externals|extern|third_party|locale|lib2to3/tests/data|encodings)/"
    r"|^Lib/test/(encoded_modules|cjkencodings)|bad_|badsyntax",
)
MAX_FILE = 400_000
MIN_FILE = 200


def licence_of(meta: str) -> str:
    """The licence of a METADATA text; ValueError unless it is on the permissive list."""
    head = meta.split("\n\n", 1)[0]
    found = re.findall(r"^License-Expression: (.+)$", head, re.M)
    found += [
        c.split("::")[-1].strip() for c in re.findall(r"^Classifier: License :: (.+)$", head, re.M)
    ]
    found += [x.strip() for x in re.findall(r"^License: (.+)$", head, re.M) if len(x) < 120]
    found = [x for x in found if x and x != "OSI Approved"]
    text = found[0] if found else ""
    for x in found:
        if PERMISSIVE.search(x):
            text = x
            break
    first = re.split(r"\bAND\b", text)[0]  # "BSD-3-Clause AND ...": the rest names bundled binaries
    if not PERMISSIVE.search(first) or COPYLEFT.search(first):
        raise ValueError(f"licence must be permissive, got {found!r}")
    return text


def wheel_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Python sources of a wheel as (name inside, bytes)."""
    with zipfile.ZipFile(path) as z:
        for info in sorted(z.infolist(), key=lambda i: i.filename):
            if info.filename.endswith(".py") and MIN_FILE <= info.file_size <= MAX_FILE:
                yield info.filename, z.read(info)


def usable(name: str, data: bytes) -> str | None:
    """The text of a source file worth training on, or None."""
    if SKIP_PATH.search(name) or not MIN_FILE <= len(data) <= MAX_FILE or b"\0" in data:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if COPYLEFT.search(text[:4000]):
        return None
    text = text.replace("\r\n", "\n").replace("\f", "").rstrip() + "\n"
    lines = text.split("\n")
    if max(map(len, lines)) > 1000 or len(text) / len(lines) > 120:
        return None
    if sum(map(str.isdigit, text)) > 0.2 * len(text) or sum(c > "\x7f" for c in text) > 0.02 * len(
        text
    ):
        return None
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text


class Dedup:
    """Exact duplicates by hash; near ones when over 70 % of the distinct lines were seen."""

    def __init__(self) -> None:
        self.files: set[bytes] = set()
        self.lines: set[int] = set()

    def fresh(self, text: str) -> bool:
        norm = {s for s in (line.strip() for line in text.split("\n")) if len(s) > 12}
        digest = hashlib.sha256("\n".join(sorted(norm)).encode()).digest()
        keys = {int.from_bytes(hashlib.blake2b(s.encode(), digest_size=8).digest()) for s in norm}
        if digest in self.files or not keys or len(keys & self.lines) > 0.7 * len(keys):
            return False
        self.files.add(digest)
        self.lines |= keys
        return True


def sources(wheels: Path) -> Iterator[tuple[dict[str, object], Iterator[tuple[str, bytes]]]]:
    """(manifest entry, files) per package: standard library, installed packages, wheels."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])

    def tree(root: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
        for p in sorted(root.rglob("*.py")):
            rel = p.relative_to(root).as_posix()
            if not rel.startswith("site-packages/"):
                yield prefix + rel, p.read_bytes()

    yield (
        {"package": "cpython-stdlib", "version": sys.version.split()[0], "licence": "PSF-2.0"},
        tree(stdlib, "Lib/"),
    )
    for name in INSTALLED:
        dist = metadata.distribution(name)
        record = dist.read_text("RECORD") or ""
        entry: dict[str, object] = {
            "package": name,
            "version": dist.version,
            "licence": licence_of(dist.read_text("METADATA") or ""),
            "record_sha256": hashlib.sha256(record.encode()).hexdigest(),
        }
        yield entry, tree(Path(str(dist.locate_file(name))), name + "/")
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as z:
            meta = next(n for n in z.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
            text = z.read(meta).decode()
        name, version = path.name.split("-")[:2]
        entry = {"package": name.replace("_", "-"), "version": version, "wheel": path.name}
        try:
            entry["licence"] = licence_of(text)
        except ValueError as e:
            print(f"skipped {path.name}: {e}", file=sys.stderr)
            continue
        h = hashlib.sha256()
        with path.open("rb") as f:
            while block := f.read(1 << 20):
                h.update(block)
        entry["sha256"] = h.hexdigest()
        yield entry, wheel_files(path)


def choose_held_out(files: dict[str, str]) -> list[str]:
    """32 files by a fixed shuffle: 16 networkx, 8 attrs, 8 rich, 3 to 60 kB (attrs: from 1)."""
    picked: list[str] = []
    for package, count in zip(HELD_OUT, (16, 8, 8), strict=True):
        least = 1_000 if package == "attrs" else 3_000
        names = sorted(
            n for n, t in files.items() if n.startswith(package + "/") and least <= len(t) <= 60_000
        )
        random.Random(20261130).shuffle(names)
        picked += names[:count]
    return picked


def build(wheels: Path, out: Path, fix: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    dedup = Dedup()
    manifest: list[dict[str, object]] = []
    texts: list[str] = []
    held: dict[str, str] = {}
    for entry, files in sources(wheels):
        package = str(entry["package"])
        count = total = 0
        for name, data in files:
            text = usable(name, data)
            if text is None or not dedup.fresh(text):
                continue
            count, total = count + 1, total + len(text.encode())
            if package in HELD_OUT:
                held[f"{package}/{name}"] = text
            elif package not in LEFT_OUT:
                texts.append(text)
        role = "held out" if package in HELD_OUT else "left out" if package in LEFT_OUT else "train"
        manifest.append({**entry, "role": role, "files": count, "bytes": total})
        print(
            f"{package:28s} {entry['version']!s:14s} {count:6d} files {total / 1e6:8.2f} MB",
            flush=True,
        )
    if fix:
        rows = [
            {
                "file": n,
                "sha256": hashlib.sha256(held[n].encode()).hexdigest(),
                "bytes": len(held[n].encode()),
            }
            for n in choose_held_out(held)
        ]
        (HERE / "held_out.json").write_text(json.dumps(rows, indent=1) + "\n")
    for row in json.loads((HERE / "held_out.json").read_text()):
        path = out / "heldout" / row["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        data = held[row["file"]].encode()
        if hashlib.sha256(data).hexdigest() != row["sha256"]:
            raise ValueError(
                f"held_out.json: {row['file']} must hash to {row['sha256'][:12]}; another release?"
            )
        path.write_bytes(data)
    random.Random(1).shuffle(texts)
    (out / "train.bin").write_bytes("\0".join(texts).encode())
    total = sum(len(t.encode()) for t in texts)
    (out / "manifest.json").write_text(
        json.dumps({"files": len(texts), "bytes": total, "sources": manifest}, indent=1)
    )
    print(f"train: {len(texts)} files, {total / 1e6:.1f} MB; held out: {len(held)} files")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("command", choices=("download", "build"))
    p.add_argument("--dir", type=Path, required=True)
    p.add_argument("--out", type=Path, default=Path("corpus"))
    p.add_argument("--fix-heldout", action="store_true")
    a = p.parse_args()
    if a.command == "build":
        build(a.dir, a.out, a.fix_heldout)
        return
    pinned = {}
    if (HERE / "manifest.json").exists():  # the releases that were used
        for row in json.loads((HERE / "manifest.json").read_text())["sources"]:
            pinned[row["package"]] = f"{row['package']}=={row['version']}"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    for name in (*PACKAGES, *HELD_OUT):
        if subprocess.run([*pip, "-d", str(a.dir), pinned.get(name, name)]).returncode:
            print(f"not available as a wheel, skipped: {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
