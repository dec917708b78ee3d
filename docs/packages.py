"""List the modules of each package in its docstring, from the first lines of theirs.

`python docs/packages.py` writes the lists; a test compares them with the modules.
"""

import ast
import textwrap
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1] / "idp_tutorial"
HEADING = "\n\nModules:\n\n"


def list_packages() -> list[Path]:
    """Return the `__init__.py` of each package below the library."""
    return sorted(p for p in LIBRARY.rglob("__init__.py") if p.parent != LIBRARY)


def _read_docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""


def _list_item(name: str, path: Path) -> str:
    """Return a line of the list: the name of a module, and the first paragraph of its docstring."""
    summary = " ".join(_read_docstring(path).split("\n\n")[0].split())
    text = f"- `{name}`: {summary[:1].upper()}{summary[1:]}"
    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)


def render_docstring(init: Path) -> str:
    """Return the docstring of a package with the list of its modules and packages."""
    folder = init.parent
    introduction = _read_docstring(init).partition(HEADING)[0].rstrip()
    modules = [p for p in sorted(folder.glob("*.py")) if not p.name.startswith("_")]
    packages = sorted(folder.glob("*/__init__.py"))
    items = [_list_item(path.stem, path) for path in modules]
    items += [_list_item(path.parent.name, path) for path in packages]
    return introduction + HEADING + "\n".join(items) + "\n"


def has_current_list(init: Path) -> bool:
    """Return whether the docstring of a package lists its modules as they are."""
    return _read_docstring(init) == render_docstring(init)


def write_list(init: Path) -> None:
    """Write the list of modules into the docstring of a package."""
    text = init.read_text(encoding="utf-8")
    node = ast.parse(text).body[0]
    code = "".join(text.splitlines(keepends=True)[node.end_lineno :])
    init.write_text(f'"""{render_docstring(init)}"""\n{code}', encoding="utf-8")


if __name__ == "__main__":
    for package in reversed(list_packages()):  # inner packages first
        write_list(package)
