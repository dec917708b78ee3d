"""Tensors with their description, or the state of a run, in one file with a digest of every byte.

Two files that belong together can be separated: by a kill between two renames, or by a copy
that stopped. A safetensors file has a header that can contain a description, so one file is
enough. The format itself checks the header only: a changed number would be read without an
error. The description therefore starts with a digest of the whole file, computed with zeros in
the place of the digest.

PyTorch saves with pickle, and reading a pickle can run code. The state of an optimizer, a
schedule or a random number generator is a tree of dictionaries, lists and tensors. A snapshot
stores its tensors in such a file and the rest of the tree as the description, so that reading it
can create nothing but data. JSON has no tuples, and its keys are strings. Both are encoded, since
`random.setstate` needs tuples and the state of AdamW has integers as keys.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from idp_tutorial.utils.checks import UserError, explain_os_error
from idp_tutorial.utils.durable_files import refuse_pipe, write_atomically

PROMPTS_FILE = "prompts.safetensors"  # name of the file in the folder of a saved model
METADATA_KEY = "idp_tutorial"  # key of the safetensors metadata: a digest, a space, JSON
_MAX_HEADER_BYTES = 2**25  # names, shapes and description; a snapshot has some thousands of bytes
_ZERO_DIGEST = b"0" * 64
_DIGEST_IN_HEADER = re.compile(rb'"idp_tutorial":"([0-9a-f]{64}) ')


def serialise_tensors(
    tensors: Mapping[str, Tensor],  # name: tensor, on any device
    description: Any,  # anything that JSON can express
) -> bytes:  # content of a safetensors file
    """Return tensors and their description as bytes that contain a digest of both."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    blank = save(tensors, {METADATA_KEY: f"{_ZERO_DIGEST.decode()} {json.dumps(description)}"})
    match = _DIGEST_IN_HEADER.search(blank)
    assert match, "the metadata were just written"
    start = match.start(1)
    return blank[:start] + hashlib.sha256(blank).hexdigest().encode() + blank[start + 64 :]


def deserialise_tensors(
    data: bytes,  # content of a safetensors file
    name: Path | str = "these bytes",  # name of the file, for messages
) -> tuple[Any, dict[str, Tensor]]:  # the description and the tensors
    """Return the description and the tensors that `serialise_tensors` wrote.

    Raises: `UserError` if any byte was changed, or if the file is not of this package.
    """
    match = _DIGEST_IN_HEADER.search(data)
    header_size = int.from_bytes(data[:8], "little")
    is_intact = match and _digest_without_digest(data, match) == match[1]
    if not is_intact or header_size > _MAX_HEADER_BYTES:
        raise UserError(f"{name} is damaged, or was not written by idp_tutorial: save it again.")
    try:
        tensors = load(data)
        text = json.loads(data[8 : 8 + header_size])["__metadata__"][METADATA_KEY]
        description = json.loads(text[65:])
        json.dumps(description, ensure_ascii=False).encode()  # without lone surrogates
        return description, tensors
    except Exception as e:  # a valid digest of invalid content
        raise UserError(f"{name} cannot be read ({type(e).__name__}): save it again.") from None


def _digest_without_digest(data: bytes, match: re.Match) -> bytes:
    """Return the digest of a file in which zeros take the place of the digest."""
    blank = data[: match.start(1)] + _ZERO_DIGEST + data[match.end(1) :]
    return hashlib.sha256(blank).hexdigest().encode()


def save_tensors(
    file: Path | str,  # replaced as a whole; its folder is created if missing
    tensors: Mapping[str, Tensor],  # name: tensor, on any device
    description: Any,  # anything that JSON can express
) -> None:
    """Write tensors and their description to a file, as a whole or not at all."""
    data = serialise_tensors(tensors, description)  # before anything is written
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(file), data)


def _flatten(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a tree as values that JSON can express; its tensors are added to `tensors`."""
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"dict": [[_flatten(k, tensors), _flatten(v, tensors)] for k, v in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_flatten(v, tensors) for v in tree]}
    if isinstance(tree, list):
        return [_flatten(v, tensors) for v in tree]
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise TypeError(f"{type(tree).__name__} is neither a tensor nor a value that JSON can express")


def _unflatten(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the tree that `_flatten` was called with."""
    if isinstance(tree, list):
        return [_unflatten(v, tensors) for v in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if not isinstance(value, list):
        raise ValueError(f"{kind!r} must have a list")
    if kind == "dict":
        return {_unflatten(k, tensors): _unflatten(v, tensors) for k, v in value}
    if kind == "tuple":
        return tuple(_unflatten(v, tensors) for v in value)
    raise ValueError(f"{kind!r} is not a kind of tree")


class _DamagedFileError(UserError):
    """Error for a snapshot whose content differs from what was written."""


def list_snapshots(folder: Path | str) -> list[tuple[int, Path]]:
    """Return the steps and files of the snapshots in a folder, the newest first."""
    steps_and_files = []
    for path in Path(folder).glob("checkpoint-*.safetensors"):
        step = path.stem.rpartition("-")[2]
        if step.isascii() and step.isdecimal():
            steps_and_files.append((int(step), path))
    return sorted(steps_and_files, reverse=True)


def write_snapshot(
    folder: Path | str,  # folder of the run
    step: int,  # number of steps that are done
    tree: Any,  # the state: dictionaries, lists, tuples, tensors and plain values
) -> None:
    """Write the state of a run after a step, and keep one earlier snapshot.

    Raises: `UserError` if it cannot be written.
    """
    folder = Path(folder)
    try:
        tensors: dict[str, Tensor] = {}
        description = _flatten(dict(step=step, tree=tree), tensors)
        save_tensors(folder / f"checkpoint-{step}.safetensors", tensors, description)
        up_to_now = [path for s, path in list_snapshots(folder) if s <= step]
        for old in up_to_now[2:]:
            old.unlink(missing_ok=True)
    except OSError as e:
        intact = "The previous" if list_snapshots(folder) else "No previous"
        raise UserError(
            f"the checkpoint of step {step} cannot be written: {explain_os_error(e, folder)}. "
            f"{intact} checkpoint is there. Start the same run again afterwards."
        ) from e


def _read_snapshot(file: Path, step: int) -> Any:
    """Return the tree of a snapshot; raise `OSError` if the file cannot be read."""
    data = refuse_pipe(file).read_bytes()
    try:
        content = _unflatten(*deserialise_tensors(data))
        tree = content["tree"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise _DamagedFileError(f"{file} is damaged: it was changed after it was written") from e
    if content.get("step") != step:
        raise _DamagedFileError(f"{file} is damaged: its name and its content disagree")
    return tree


def read_last_snapshot(
    folder: Path | str,  # folder of the run
    required_keys: Collection[str] = (),  # keys that the tree must have
) -> Any:  # the tree of the last `write_snapshot`; None if there is no snapshot
    """Return the state of a run in its last snapshot; a damaged one is skipped with a warning.

    Raises: `UserError` if all snapshots are damaged, if the last one cannot be read, or if it
    lacks a key.
    """
    errors: list[str] = []
    for step, file in list_snapshots(folder):
        try:
            tree = _read_snapshot(file, step)
        except _DamagedFileError as e:
            errors.append(str(e))
            continue
        except OSError as e:
            raise UserError(
                f"the checkpoint in {folder} cannot be read: {explain_os_error(e, folder)}. "
                "It may be intact, so do not delete it."
            ) from e
        if required_keys and not (isinstance(tree, dict) and {*required_keys} <= tree.keys()):
            raise UserError(
                f"{file} is a checkpoint of another kind of run, or of an older version. Use "
                "another folder."
            )
        if errors:
            warnings.warn(
                f"{errors[0]}; the run continues from {file.name}, which is intact", stacklevel=2
            )
        return tree
    if errors:
        files = "it" if len(errors) == 1 else "them"
        raise UserError(f"{'; '.join(errors)}. Delete {files} to start this run again.")
    return None


def remove_snapshots(folder: Path | str) -> None:
    """Remove all snapshots of a run."""
    for _, file in list_snapshots(folder):
        file.unlink(missing_ok=True)
