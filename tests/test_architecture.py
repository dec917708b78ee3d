"""The rules that the code keeps: imports, names, docstrings, types and words.

A failure names the place and the better word. CONTRIBUTING.md says why.
"""

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIB = ROOT / "idp_tutorial"
# a package imports only from packages on lines before its own
ORDER = [
    ["utils"],
    ["core", "data"],
    ["families", "training"],
    ["backbones"],
    ["methods"],
    ["assembly"],
    ["saving"],
    ["runs"],
    ["top", "huggingface", "serving"],
    ["cli"],
    ["reproduction"],
]
LEVEL = {package: i for i, packages in enumerate(ORDER) for package in packages}
# large or optional libraries that a function may import when it is called
HEAVY = {
    "accelerate",
    "datasets",
    "fastapi",
    "gguf",
    "h11",
    "ipywidgets",
    "matplotlib",
    "pandas",
    "peft",
    "scipy",
    "sklearn",
    "starlette",
    "statsmodels",
    "tabulate",
    "transformers",
    "uvicorn",
}
MODULES = sorted(p for p in LIB.rglob("*.py") if p.name not in ("__init__.py", "_modidx.py"))
NOTEBOOKS = sorted(
    p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "nbs").rglob("*.md")])
PYTHON_FILES = sorted(
    [
        *MODULES,
        *(
            p
            for folder in ("tests", "docs", "results", "configs")
            for p in (ROOT / folder).rglob("*.py")
        ),
    ]
)

# names that say nothing about the value: choose one that says what it holds
VAGUE_IDENTIFIERS = set(
    [
        "said",
        "own",
        "here",
        "there",
        "now",
        "theirs",
        "kept",
        "found",
        "wrong",
        "twice",
        "how",
        "what",
        "which",
        "some",
        "few",
        "of",
        "at",
        "by",
        "made",
        "asked",
        "left",
        "told",
    ]
)

# first words of a docstring that describe no action and name no thing
FRAGMENT = re.compile(
    r"^(of|by|as|with|without|in|on|at|from|what|which|who|whose|how|where|when|whether|all|"
    r"has|is|are|text by text)\b",
    re.I,
)


def load_docs_script(name: str):
    """Return a script of the folder `docs` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def module_name(path: Path) -> str:
    """Return the dotted name of a module inside the package: `core.steps`."""
    return ".".join(path.relative_to(LIB).with_suffix("").parts)


def package_of(module: str) -> str:
    """Return the package of a module; modules beside the packages are of `top`."""
    if module == "__main__":  # `python -m idp_tutorial` is the command
        return "cli"
    return module.split(".")[0] if "." in module else "top"


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> list[tuple[str, bool, int]]:
    """Return (imported module, is it inside a function, line) of the imports of a module."""
    return list(iterate_imports(path))


def iterate_imports(path: Path):
    """Yield what `imports` returns."""
    tree = parse(path)
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    inside = {id(n) for f in functions for n in ast.walk(f)}
    parent = module_name(path).split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in inside, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level] if node.level else []
            full = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            if node.level:
                full = f"idp_tutorial.{full}".strip(".")
            relative = full.removeprefix("idp_tutorial").strip(".")
            if full.startswith("idp_tutorial") and not is_module(relative):
                for alias in node.names:  # `from ..package import module`
                    yield f"{full}.{alias.name}", id(node) in inside, node.lineno
            else:
                yield full, id(node) in inside, node.lineno


def is_module(dotted: str) -> bool:
    """Return whether a dotted name is a module of the package."""
    return (LIB / (dotted.replace(".", "/") + ".py")).is_file()


@functools.cache
def local_imports(path: Path) -> set[str]:
    """Return the modules of the package that a module imports when it is imported.

    A command imports `reproduction` when it is called, which is not counted.
    """
    names = {
        name.removeprefix("idp_tutorial.")
        for name, is_inside, _ in imports(path)
        if not (is_inside and package_of(module_name(path)) == "cli" and ".reproduction." in name)
    }
    return names & {module_name(p) for p in MODULES}


def notebook_cells(path: Path, kind: str) -> list[str]:
    """Return the sources of the cells of one kind of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == kind]


def notebook_tree(path: Path) -> ast.Module:
    """Return the syntax tree of all code of a notebook, without its magics."""
    code = "\n".join(notebook_cells(path, "code"))
    return ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.M))


def relative(path: Path) -> str:
    """Return a path as seen from the repository's root."""
    return path.relative_to(ROOT).as_posix()


# ---- imports


def test_every_package_has_its_level():
    assert {package_of(module_name(p)) for p in MODULES} == set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_follow_the_order_of_packages(path):
    package = package_of(module_name(path))
    upward = [
        name
        for name in local_imports(path)
        if package_of(name) != package and LEVEL[package_of(name)] >= LEVEL[package]
    ]
    assert not upward, (
        f"{module_name(path)} (package {package}) imports {upward}: "
        f"a package imports only from packages before it, {ORDER}"
    )


def test_the_page_of_packages_lists_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Packages")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| [\d–]+ \| (.*?) \|", table, re.M)
    names = {name for cell in listed for name in re.findall(r"`(\w+)`", cell)}
    beside = {p.stem for p in LIB.glob("[a-z]*.py")}
    assert names == (set(LEVEL) - {"top"}) | beside


def names_of_missing_modules(text: str):
    """Yield the dotted names and paths in a text that should be modules or files, but are not."""
    packages = "|".join(p.name for p in LIB.iterdir() if (p / "__init__.py").is_file())
    dotted = re.findall(rf"`((?:{packages})(?:\.[a-z]\w*)+)(?:\.\w+)*`", text)
    dotted += re.findall(rf"\bidp_tutorial\.((?:{packages})\.[a-z]\w*)", text)
    for name in (n for n in dotted if not n.endswith((".json", ".jsonl"))):
        parents = [name.rsplit(".", i)[0] for i in range(name.count("."))]
        if not any(is_module(p) or (LIB / p.replace(".", "/")).is_dir() for p in parents):
            yield name
    for path in re.findall(r"\b((?:idp_tutorial|tests)/[a-z_/0-9]+\.py)\b", text):
        if not (ROOT / path).is_file():
            yield path


FILES_WITH_NAMES = sorted(
    [
        *(p for p in PAGES if p.name not in ("CHANGELOG.md",)),
        *NOTEBOOKS,
        *PYTHON_FILES,
        *(ROOT / ".github").rglob("*.yml"),
    ]
)


@pytest.mark.parametrize("path", FILES_WITH_NAMES, ids=relative)
def test_modules_that_are_named_exist(path):
    missing = sorted(set(names_of_missing_modules(path.read_text(encoding="utf-8"))))
    assert not missing, f"{relative(path)} names {missing}"


def test_every_package_lists_its_modules():
    script = load_docs_script("packages")
    stale = [relative(p) for p in script.list_packages() if not script.has_current_list(p)]
    assert not stale, f"run `python docs/packages.py`, which changes {stale}"


def test_the_page_of_options_is_current():
    """In a process of its own: other tests register methods."""
    code = "import options, sys; sys.stdout.write(options.render())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "docs",
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == result.stdout, "run `python docs/options.py`" + result.stderr


def test_imports_have_no_circle():
    edges = {module_name(p): local_imports(p) for p in MODULES}
    finished = set()
    path = []

    def visit(module):
        if module in path:
            pytest.fail("a circle of imports: " + " → ".join([*path[path.index(module) :], module]))
        if module in finished:
            return
        path.append(module)
        for name in sorted(edges[module]):
            visit(name)
        path.pop()
        finished.add(module)

    for module in edges:
        visit(module)
    assert finished == set(edges)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_are_at_the_top(path):
    if package_of(module_name(path)) == "cli":
        pytest.skip("commands import late, so that --help is fast (test_command_line.py)")
    late = [
        f"line {line}: {name}"
        for name, is_inside, line in imports(path)
        if is_inside and name.split(".")[0] not in HEAVY
    ]
    assert not late, f"{module_name(path)} imports inside a function what is not heavy: {late}"


# ---- names


def test_a_public_name_exists_once():
    places = defaultdict(set)
    for path in MODULES:
        for node in parse(path).body:
            names = []
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = [node.name]
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            for name in names:
                if not name.startswith("_") and name != "logger":  # each module has its logger
                    places[name].add(module_name(path))
    doubled = {name: sorted(modules) for name, modules in places.items() if len(modules) > 1}
    assert not doubled, f"public names that exist more than once: {doubled}"


def vague_names(tree: ast.Module):
    """Yield (line, name) of variables and parameters whose name says nothing."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
        if name in VAGUE_IDENTIFIERS:
            yield node.lineno, name


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_names_say_what_they_hold(path):
    vague = list(vague_names(parse(path)))
    assert not vague, f"{relative(path)}: name what the value is, not {vague[:5]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=relative)
def test_names_in_notebooks_say_what_they_hold(path):
    vague = list(vague_names(notebook_tree(path)))
    assert not vague, f"{relative(path)}: name what the value is, not {[n for _, n in vague[:5]]}"


# ---- docstrings and types


def definitions(path: Path):
    """Yield (qualified name, node, is it public) of the functions and classes of a module."""
    for node in parse(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            is_public = not node.name.startswith("_")
            yield node.name, node, is_public
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        visible = is_public and not method.name.startswith("_")
                        yield f"{node.name}.{method.name}", method, visible


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_docstrings_are_sentences(path):
    """`ruff` checks the period and the imperative; this finds fragments that it lets through."""
    for name, node, _ in definitions(path):
        first_line = (ast.get_docstring(node) or "").split("\n")[0]
        assert not FRAGMENT.match(first_line), (
            f"{module_name(path)}.{name}: {first_line!r} is a fragment: "
            "begin with a verb and its object, such as 'Return the ...'"
        )


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_public_functions_have_types(path):
    for name, node, is_public in definitions(path):
        is_init = name.endswith(".__init__") and not name.startswith("_")
        if not isinstance(node, ast.FunctionDef) or not (is_public or is_init):
            continue
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        missing = [a.arg for a in named if a.annotation is None and a.arg not in ("self", "cls")]
        assert not missing, f"{module_name(path)}.{name}: no type for {', '.join(missing)}"
        if not is_init:
            assert node.returns is not None, f"{module_name(path)}.{name}: no return type"


# ---- tests

# modules without a test file of their name, and where they are tested
NO_TEST_FILE = {
    "cli.fetch": "only hands its options to `backbones.fetch`: backbones/test_fetch.py",
    "families.distilbert": "every family in turn: families/test_families.py",
    "families.electra": "every family in turn: families/test_families.py",
    "families.explicit_layer": "the families that use it: families/test_families.py",
    "families.gpt2": "every family in turn: families/test_families.py",
    "families.modernbert": "every family in turn: families/test_families.py",
    "families.mpnet": "every family in turn: families/test_families.py",
    "families.t5": "every family in turn: families/test_families.py",
    "data.config": "options of tables, which data/test_user_data.py reads",
    "serving.limits": "numbers, which the server applies: serving/test_server.py",
}
# test files in the folders of packages that are about more than one module
NO_MODULE = {
    "assembly.option_pairs": "pairs of options, of every method",
    "cli.own_texts": "tables of the user, given to all commands that read them",
    "families.families": "every family in turn",
    "huggingface.supported_uses": "uses and models that docs/huggingface.md lists",
    "methods.left_padding": "every method in turn",
    "training.gradient_checkpointing": "an option of training, with every family and method",
    "training.switches": "options that change a method, and what each of them changes",
}


def test_every_module_has_a_test_file_of_its_name():
    tests = ROOT / "tests"
    packages = {package_of(module_name(p)) for p in MODULES} - {"top"}
    modules = {module_name(p) for p in MODULES} - {"__main__"}
    tested = {
        ".".join([*p.parent.relative_to(tests).parts, p.stem.removeprefix("test_")])
        for p in tests.rglob("test_*.py")
    }
    assert modules - tested == set(NO_TEST_FILE)
    assert {n for n in tested - modules if n.split(".")[0] in packages} == set(NO_MODULE)


# ---- form


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_comprehension_for_its_effect(path):
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    lines = [
        n.lineno
        for n in ast.walk(parse(path))
        if isinstance(n, ast.Expr) and isinstance(n.value, kinds)
    ]
    assert not lines, f"{module_name(path)}: lines {lines} build a list that nothing reads"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_comprehension_inside_another(path):
    """A generator that is the argument of `any`, `all`, `sum` or `tuple` may be inside one."""
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp)
    for outer in ast.walk(parse(path)):
        if isinstance(outer, (*kinds, ast.GeneratorExp)):
            children = ast.iter_child_nodes(outer)
            inner = [n for child in children for n in ast.walk(child) if isinstance(n, kinds)]
            assert not inner, (
                f"{module_name(path)}, line {outer.lineno}: a comprehension inside another: "
                "write a loop, or a function with a name"
            )


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_classes_are_written_in_one_place(path):
    patched = [
        n.name
        for n in ast.walk(parse(path))
        if isinstance(n, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "patch" for d in n.decorator_list)
    ]
    assert not patched, f"{module_name(path)}: write {patched} inside the class, not with @patch"


def test_rules_see_what_they_forbid():
    """The checks above fail on an example of each offence."""
    tree = ast.parse("def f(said):\n    found = 1\n")
    assert [name for _, name in vague_names(tree)] == ["said", "found"]
    assert FRAGMENT.match("Of a name, or one of torch's") and not FRAGMENT.match("Return it.")
