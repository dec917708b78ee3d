"""Reading files runs no code: the package contains nothing that could."""

import ast
import re
from pathlib import Path

import pytest

LIB = Path(__file__).resolve().parents[2] / "idp_tutorial"
NEVER = {
    "eval",
    "exec",
    "pickle",
    "cPickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "torch.load",
    "torch.save",
}
LOADS = re.compile(
    r"Auto\w+\.from_pretrained"
)  # it could bring code; data sets cannot, from datasets 4 on


def named(node):
    """Return the dotted name of a call or an import, such as `torch.load`."""
    if isinstance(node, ast.Attribute):
        return f"{named(node.value)}.{node.attr}"
    return getattr(node, "id", "")


@pytest.mark.parametrize("path", sorted(LIB.rglob("*.py")), ids=lambda p: p.stem)
def test_a_module_neither_unpickles_nor_evaluates_code(path):
    violations = []
    for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(n, ast.Call) and named(n.func) in NEVER:
            violations.append(named(n.func))
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            violations += [a.name for a in n.names if a.name.split(".")[0] in NEVER]
        is_risky = isinstance(n, ast.keyword) and n.arg in ("trust_remote_code", "allow_pickle")
        if is_risky and ast.unparse(n.value) != "False":
            violations.append(f"{n.arg}={ast.unparse(n.value)}")
        if isinstance(n, ast.Call) and LOADS.fullmatch(named(n.func)):
            safe = any(k.arg == "trust_remote_code" for k in n.keywords)
            violations += [] if safe else [f"{named(n.func)} without trust_remote_code=False"]
    assert not violations
