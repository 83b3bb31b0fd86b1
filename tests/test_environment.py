"""docs/environment.md lists the environment variables that the code reads, and no other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = [ROOT / "setup.py", ROOT / "tests/conftest.py"]
for _folder in ("torch_dflash", "integrations", "benchmarks", "tools"):
    CODE += sorted((ROOT / _folder).rglob("*.py"))
KERNELS = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h", ".inl", ".cu"))
NAME = r"[A-Z][A-Z0-9_]*"
ENVIRONMENT = re.compile(r"(.*\.)?(environ|environment)")


def keys(tree):
    """Expressions of the variables that a module looks up."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=mapping, slice=key):
                pass
            case ast.Call(func=ast.Attribute(value=mapping, attr=method), args=[key, *_]):
                if method == "getenv":
                    yield key
                    continue
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[mapping]):
                pass
            case _:
                continue
        if ENVIRONMENT.fullmatch(ast.unparse(mapping)):
            yield key


def strings(node):
    constants = (str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant))
    return {c for c in constants if re.fullmatch(NAME, c)}


def read_by(text):
    """Variables that a Python file reads: constants, or names of a constant, of what a loop goes
    through, or of a parameter.
    """
    tree, found = ast.parse(text), set()
    for key in keys(tree):
        values = strings(key)
        for node in ast.walk(tree):
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id)], value=ast.AST() as value)
                    | ast.AnnAssign(target=ast.Name(id), value=ast.AST() as value)
                    | ast.For(target=ast.Name(id), iter=value)
                ) if id == ast.unparse(key):
                    values |= strings(value)
                case ast.FunctionDef(name=name, args=ast.arguments(args=parameters)):
                    at = [p.arg for p in parameters].index(key.id) if is_in(key, parameters) else -1
                    if at >= 0:
                        values |= passed(tree, name, at)
        assert values, f"which variable is {ast.unparse(key)}?"
        found |= values
    return found


def is_in(key, parameters):
    return isinstance(key, ast.Name) and key.id in [p.arg for p in parameters]


def passed(tree, function, at):
    """Constants that are the argument of a function at this place."""
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call))
    mine = (c for c in calls if ast.unparse(c.func) == function and len(c.args) > at)
    return set().union(*(strings(c.args[at]) for c in mine))


def test_the_table_is_what_the_code_reads():
    read = set().union(*(read_by(path.read_text()) for path in CODE))
    for path in KERNELS:
        read |= set(re.findall(r'getenv\("(.*?)"\)', path.read_text()))
    text = (ROOT / "docs/environment.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    assert sorted(n for row in rows for n in re.findall(rf"`({NAME})`", row)) == sorted(read)


@pytest.mark.parametrize(
    "text, found",
    [
        ('NAME = "DFLASH_NEW"\nos.environ.get(NAME)', {"DFLASH_NEW"}),
        ('for n in ("A", "B"): environ[n]', {"A", "B"}),
        ('def f(x, n): return n in os.environ\nf(1, "A"); f(2, "B")', {"A", "B"}),
        ('os.getenv("A", "b")', {"A"}),
        ('{"A": 1}.get("A")', set()),
    ],
)
def test_how_it_is_read(text, found):
    assert read_by(text) == found


def test_a_key_that_cannot_be_read_is_not_passed_over():
    with pytest.raises(AssertionError, match="which variable is key"):
        read_by("environ[key]")
