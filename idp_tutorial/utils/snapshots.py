"""The state of a run in one file: tensors as safetensors, the rest as JSON, with a digest.

PyTorch saves with pickle, and reading a pickle can run code. The state of an optimizer, a
schedule or a random number generator is a tree of dictionaries, lists and tensors. A snapshot
stores the tensors in a safetensors file and the rest of the tree in its header, so that reading
it can create nothing but data.

JSON has no tuples, and its keys are strings. Both are encoded, since `random.setstate` needs
tuples and the state of AdamW has integers as keys.
"""

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.tensor_files import deserialise_tensors, save_tensors

__all__ = [
    "DamagedFileError",
    "write_tree",
    "read_tree",
    "write_snapshot",
    "read_last_snapshot",
    "describe_previous_snapshot",
    "remove_snapshots",
]


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
    if kind == "dict":
        return {_unflatten(k, tensors): _unflatten(v, tensors) for k, v in value}
    return tuple(_unflatten(v, tensors) for v in value)


class DamagedFileError(UserError):
    """Error for a file whose content differs from what was written."""


def write_tree(
    file: Path | str,  # replaced as a whole
    tree: Any,  # dictionaries, lists, tuples, tensors and plain values
) -> None:
    """Write a tree of tensors and plain values to a file, as a whole or not at all."""
    tensors: dict[str, Tensor] = {}
    description = _flatten(tree, tensors)
    save_tensors(file, tensors, description)


def read_tree(file: Path | str) -> Any:
    """Return the tree that `write_tree` wrote.

    Raises: `DamagedFileError` for a damaged file, `OSError` for one that cannot be read.
    """
    data = Path(file).read_bytes()
    try:
        description, tensors = deserialise_tensors(data)
        return _unflatten(description, tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise DamagedFileError(f"{file} is damaged: it was changed after it was written") from e


def _list_snapshots(folder: Path | str, name: str) -> list[tuple[int, Path]]:
    """Return the steps and files of the snapshots, the newest first."""
    steps_and_files = []
    for path in Path(folder).glob(f"{name}-*.safetensors"):
        step = path.stem.rpartition("-")[2]
        if step.isdecimal():
            steps_and_files.append((int(step), path))
    return sorted(steps_and_files, reverse=True)


def write_snapshot(
    folder: Path | str,  # folder of the run
    step: int,  # number of steps that are done
    tree: Any,  # the state: dictionaries, lists, tuples, tensors and plain values
    name: str = "checkpoint",  # start of the file's name
) -> None:
    """Write the state of a run after a step, and keep one earlier snapshot."""
    folder = Path(folder)
    write_tree(folder / f"{name}-{step}.safetensors", dict(step=step, tree=tree))
    up_to_now = [path for s, path in _list_snapshots(folder, name) if s <= step]
    for old in up_to_now[2:]:
        old.unlink(missing_ok=True)


def _read_snapshot(file: Path, step: int) -> Any:
    state = read_tree(file)
    if state["step"] != step:
        raise DamagedFileError(
            f"{file} is damaged: its name and its content (step {state['step']}) disagree"
        )
    return state["tree"]


def read_last_snapshot(
    folder: Path | str,  # folder of the run
    name: str = "checkpoint",  # start of the files' names
) -> Any:  # the tree of the last `write_snapshot`; None if there is no snapshot
    """Return the state of a run in its last snapshot; a damaged one is skipped with a warning.

    Raises: `DamagedFileError` if all snapshots are damaged, `OSError` for one that cannot be read.
    """
    errors: list[str] = []
    for step, file in _list_snapshots(folder, name):
        try:
            tree = _read_snapshot(file, step)
        except DamagedFileError as e:
            errors.append(str(e))
            continue
        if errors:
            warnings.warn(
                f"{errors[0]}; the run continues from {file.name}, which is intact", stacklevel=2
            )
        return tree
    if errors:
        files = "it" if len(errors) == 1 else "them"
        raise DamagedFileError(f"{'; '.join(errors)}. Delete {files} to start this run again.")
    return None


def describe_previous_snapshot(folder: Path | str, name: str = "checkpoint") -> str:
    """Return a sentence about the earlier snapshot, for the error of a new one."""
    if _list_snapshots(folder, name):
        return "The previous snapshot is intact"
    return "There is no previous snapshot"


def remove_snapshots(folder: Path | str, name: str = "checkpoint") -> None:
    """Remove all snapshots of a run."""
    for _, file in _list_snapshots(folder, name):
        file.unlink(missing_ok=True)
