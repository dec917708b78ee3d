"""Limits of size, time and memory under which the files of somebody else's model are opened.

The libraries that read a model trust its files. A `tokenizer.json` of 2 kB can describe rules that
double a text 28 times, a regular expression that ends the process, or a table that fills the
memory; the header of a safetensors file may have 80 MB of names. All files of a folder are
therefore checked here before any library reads them. What can be calculated is calculated: sizes,
and how much longer the rules of a tokenizer make a text. The tokenizer is then tried on a few texts
in a process of its own, whose time and memory the operating system limits, so that an error of the
library written in Rust (a panic), a hang, or a lack of memory ends that process only.
"""

import json
import math
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from idp_tutorial.utils.checks import UserError

MODEL_FILE_SUFFIXES = (".json", ".txt", ".model", ".safetensors", ".bin")
_MAX_HEADER_BYTES = 2**22  # of a safetensors file; 40,000 tensors
# files that the libraries read: largest number of bytes
_MAX_BYTES = {
    **dict.fromkeys(("config.json", "generation_config.json", "tokenizer_config.json"), 2**22),
    **dict.fromkeys(("special_tokens_map.json", "added_tokens.json"), 2**22),
    **dict.fromkeys(("adapter_config.json", "chat_template.json"), 2**22),
    **dict.fromkeys(("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"), 2**26),
    **dict.fromkeys(("spiece.model", "sentencepiece.bpe.model", "tokenizer.model"), 2**26),
    "model.safetensors.index.json": 2**24,
}
_MAX_ADDED_TOKENS = 20_000  # of a tokenizer, beside its vocabulary; Gemma has 6,400
_MAX_GROWTH = 64  # largest factor by which the rules of a tokenizer make a text longer
_TRIAL_SECONDS = 30
_TRIAL_BYTES = 2**32
_TRIAL = """
import json, sys
try:
    import resource
except ImportError:  # Windows has time limits only
    pass
else:
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
for text in json.load(sys.stdin):
    tokenizer.decode(tokenizer.encode(text, text).ids)
"""
_TRIAL_TEXTS = [
    "",
    "The tea was cold, and the rain was heavy (again): it's 3.50 \u20ac!",
    f"{'a' * 200} {'ab' * 100} {'1' * 100} {' ' * 100}\n\t{'-' * 100}x",
    "Na\u00efve caf\u00e9, \u96e8\u3068\u8336, \u0434\u043e\u0436\u0434\u044c, "
    "\U0001f327\ufe0f <b>html</b> \ufdfa",
]


def refuse_file(name: str, reason: str) -> NoReturn:
    """Raise `UserError` for files of a backbone that are damaged, or do not belong together."""
    raise UserError(
        f"backbone {name!r} cannot be used: {reason}. Correct this file, or download or save the "
        "model again."
    )


def _check_size(file: Path, name: str) -> None:
    """Refuse a file of text, or the header of a file of weights, that is too large to be one."""
    size = file.stat().st_size
    kind = "this file"
    limit = _MAX_BYTES.get(file.name, size)
    if file.suffix == ".safetensors":
        with open(file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
        kind = "its header"
        limit = _MAX_HEADER_BYTES
    if size > limit:
        refuse_file(name, f"{file.name} has {size:,} bytes where {kind} has at most {limit:,}")


def _check_archive(file: Path, name: str) -> None:
    """Refuse an archive of weights that is compressed, which PyTorch never writes."""
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            compressed = [e for e in archive.infolist() if e.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError):
        return  # loading says what is wrong
    if compressed:
        refuse_file(name, f"{file.name} is compressed, and torch.save writes files that are not")


def _iterate_parts(tree: Any) -> Iterator[dict]:
    """Yield the objects in a tree of JSON, without recursion."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
        if isinstance(node, (dict, list)):
            waiting += node.values() if isinstance(node, dict) else node


def _rule_growth(rule: dict) -> float:
    """Return the factor by which a rule of a tokenizer can make a text longer, at least 1."""
    if rule.get("type") == "Replace" and isinstance(rule.get("pattern"), dict):
        pattern = str(rule["pattern"].get("String", "x"))  # a regular expression may match a letter
        replacement = str(rule.get("content", ""))
        return max(1.0, len(replacement) / len(pattern) if pattern else len(replacement) + 1.0)
    if rule.get("type") == "TemplateProcessing":
        sides = (rule.get("single"), rule.get("pair"))
        return float(max(1, *(len(side) for side in sides if isinstance(side, list)), 1))
    return 1.0


def _check_rules(file: Path, name: str) -> None:
    """Refuse rules of a tokenizer that together make a text very long, and too many of them."""
    try:
        tree = json.loads(file.read_bytes())
        n_added = len(tree.get("added_tokens") or ())
        stages = [tree.get(s) for s in ("normalizer", "pre_tokenizer", "decoder", "post_processor")]
    except (ValueError, RecursionError, AttributeError, TypeError):
        return  # the trial says what is wrong
    if n_added > _MAX_ADDED_TOKENS:
        refuse_file(
            name,
            f"{file.name} has {n_added:,} added tokens, and at most {_MAX_ADDED_TOKENS:,} are read",
        )
    for stage in stages:
        growth = math.prod(map(_rule_growth, _iterate_parts(stage)))
        if growth > _MAX_GROWTH:
            refuse_file(
                name,
                f"the rules of {file.name} make a text up to {growth:.2g} times as long, and at "
                f"most {_MAX_GROWTH} is allowed",
            )


@lru_cache(maxsize=64)
def _try_tokenizer(file: Path, changed: int, size: int) -> str:
    """Return why a tokenizer fails on a few texts in a process of its own; '' if it does not."""
    limits = [str(_TRIAL_SECONDS), str(_TRIAL_BYTES)]
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-c", _TRIAL, str(file), *limits],
            input=json.dumps(_TRIAL_TEXTS).encode(),
            capture_output=True,
            timeout=4 * _TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {4 * _TRIAL_SECONDS} seconds"
    if process.returncode == 0:
        return ""
    lines = process.stderr.decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else ""
    if re.match(r"[\w.]+: ", last):
        return last[:120]
    return f"it takes more than {_TRIAL_SECONDS} seconds or {_TRIAL_BYTES >> 30} GB, or crashes"


def check_untrusted_files(
    folder: Path,  # a folder with the files of a model
    name: str,  # of the backbone, for messages
) -> None:
    """Check the files of a model before a library reads them.

    Raises: `UserError` for a file that is not a regular file, is too large, is compressed, or
    describes a tokenizer that fails, hangs or fills the memory.
    """
    for file in sorted(folder.iterdir()):
        if file.suffix not in MODEL_FILE_SUFFIXES:
            continue
        if not file.is_file():
            refuse_file(
                name, f"{file.name} must be a file, but is a folder, a pipe or a broken link"
            )
        _check_size(file, name)
        if file.suffix == ".bin":
            _check_archive(file, name)
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        _check_rules(tokenizer, name)
        stat = tokenizer.stat()
        if reason := _try_tokenizer(tokenizer.absolute(), stat.st_mtime_ns, stat.st_size):
            refuse_file(name, f"its tokenizer.json cannot be read ({reason})")
