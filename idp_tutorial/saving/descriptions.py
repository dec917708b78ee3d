"""Descriptions of saved models: their config, their task and the digests of their backbone.

A saved file may come from another machine or another person, so its content is untrusted data.
Its description is compared with a schema before anything is built: the classes `Saved...`, and
`Task` itself. Its config and its task are rebuilt field by field, no path in it is opened, and the
weights it names are compared with their identity (`backbone_id`) before they are used.

A path contains names of people and machines, so it does not belong in a file that is sent to
others. A saved model therefore stores only the last part of its backbone's path and the identity
of the backbone. The user can name the folder (`--backbone`); otherwise this machine remembers it
in a note in the cache, named by the digest and written when a model with this backbone was
saved. A note is only a hint: the weights that are loaded from the folder are compared with the
digest.
"""

import json
import re
import reprlib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.backbones.fetch import backbone_cache_folder
from idp_tutorial.backbones.load import find_local_backbone, load_backbone
from idp_tutorial.core.backbone import Backbone, backbone_id
from idp_tutorial.core.dtypes import DTYPES
from idp_tutorial.data.task import Task
from idp_tutorial.utils.checks import MissingFileError, UserError, is_number
from idp_tutorial.utils.durable_files import write_atomically
from idp_tutorial.utils.records import config_fingerprint, renew_digests
from idp_tutorial.utils.schemas import Count, check_schema
from idp_tutorial.utils.tensor_files import PROMPTS_FILE, deserialise_tensors, save_tensors


def path_notes_folder() -> Path:
    """Return the folder of the notes, below `$IDP_CACHE` or `~/.cache/idp_tutorial`."""
    return backbone_cache_folder() / "places"


def remember_local_backbone(
    saved_backbone: dict[str, Any],  # description that `describe_backbone` returned
    folder: Path | str,  # folder from which it was loaded
) -> None:
    """Write a note of the folder of a local backbone, which a saved model does not name.

    Nothing happens if the cache cannot be written, because a note is only a hint.
    """
    if not saved_backbone["local"]:
        return
    note = path_notes_folder() / saved_backbone["digests"][saved_backbone["dtype"]]
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, str(Path(folder).resolve()).encode())


def recall_backbone_path(
    digest: str,  # from a file, so it need not be a digest
) -> Path | None:
    """Return the folder that last contained these weights, or None if unknown or deleted."""
    if not re.fullmatch("[0-9a-f]{1,64}", digest):
        return None
    try:
        folder = Path((path_notes_folder() / digest).read_text("utf-8", errors="replace"))
    except OSError:
        return None
    return folder if folder.is_dir() else None


READABLE_DESCRIPTION_FILE = "prompts.json"  # copy of the description, for people


def write_prompts(
    folder: Path,  # created if missing
    tensors: Mapping[str, Tensor],  # by name
    description: dict[str, Any],  # from which the model can be built again
) -> None:
    """Write the tensors of a model with their description, and a copy of it for people."""
    save_tensors(folder / PROMPTS_FILE, tensors, description)
    note = (
        f"a copy of the description in {PROMPTS_FILE}, for people; the package reads only that file"
    )
    text = json.dumps(dict(note=note, **description), indent=1, ensure_ascii=False)
    write_atomically(folder / READABLE_DESCRIPTION_FILE, f"{text}\n".encode())


def read_prompts(
    folder: Path | str,  # folder of a saved model
) -> tuple[dict[str, Any], dict[str, Tensor]]:  # description, and tensors by name
    """Read the description and the tensors of a saved model, and check every byte.

    Raises: `MissingFileError` if there is no model, `UserError` if it is damaged.
    """
    file = Path(folder) / PROMPTS_FILE
    if not file.is_file():
        raise MissingFileError(
            f"no {PROMPTS_FILE} in {folder}: give a folder that `save_pretrained` or idp train "
            "wrote."
        )
    return deserialise_tensors(file.read_bytes(), file)


def read_fingerprint(
    folder: Path | str,  # folder of a saved model
) -> dict[str, Any]:  # the fields of the config that can change a result, and `digests`
    """Return what determined the run of a saved model, from the file of the model itself.

    It is empty without a model and for a damaged one. Raises: `UserError` for a model whose run is
    unknown, since it was saved without a record, or by another version.
    """
    try:
        description, _ = read_prompts(folder)
    except ValueError:  # no model, or a damaged one, which is trained again
        return {}
    check_save_format(description, folder)
    if description["digests"] is None:
        raise UserError(
            f"{folder} has a model that was saved without the record of its run: use another "
            f"folder, or delete its {PROMPTS_FILE}."
        )
    digests = renew_digests(description["digests"])
    return {**config_fingerprint(description["cfg"]), "digests": digests}


SAVE_FORMAT = 2  # format of saved models
# format of a `PromptModel` with parts that this package's own models do not have
PROMPT_MODEL_FORMAT = "prompt model"
# options with paths
_MACHINE_OPTIONS: dict[str, Any] = dict(data=None, init_from=None, cache_dir=None)


@dataclass
class SavedBackbone:
    """Schema of the weights that prompts belong to, as `describe_backbone` returns them."""

    name: str
    dtype: str
    digests: dict[str, str]  # `backbone_id` by dtype
    local: bool = False
    revision: str | None = None


@dataclass
class _Base:
    dtype: str
    digests: dict[str, str]  # `backbone_id` of the weights only, by dtype


@dataclass
class SavedPromptModel:
    """Schema of what only a `PromptModel` has."""

    task_type: Literal["SEQ_CLS", "CAUSAL_LM"]
    head: Literal["keep", "classification", "verbalizer"]
    label_token_ids: list[Count]
    base: _Base


@dataclass
class SavedModel:
    """Schema of the description in `prompts.safetensors`."""

    version: str
    cfg: dict[str, Any]  # checked option by option when the config is built
    task: Task
    backbone: SavedBackbone
    glove: str | None
    digests: dict[str, str] | None
    formula: list[str] = field(default_factory=list)
    prompt_model: SavedPromptModel | None = None


def _is_local_folder(backbone: str) -> bool:
    """Return whether a backbone is a folder of the user, and not a name that the package knows."""
    return not find_local_backbone(backbone) and Path(backbone).is_dir()


def _portable_name(backbone: str) -> str:
    return Path(backbone).resolve().name if _is_local_folder(backbone) else backbone


def describe_run(
    task: Task,  # task of the model; its examples are left out
    cfg: RunConfig,  # config of the model; paths of this machine are left out
) -> dict[str, Any]:  # 'cfg' and 'task', as JSON can represent them
    """Describe the config and the task of a model without any path of this machine."""
    glove = cfg.get("glove")
    cfg = cfg.with_options(
        backbone=_portable_name(cfg.backbone), glove=glove and Path(glove).name, **_MACHINE_OPTIONS
    )
    options = cfg.to_dict()
    if options["metric"] is None:  # a record has the metric of its task under this name
        del options["metric"]
    fields_of_task = asdict(replace(task, splits={}, convert_row=None))
    if not task.multi_label:  # most files do not have it
        del fields_of_task["multi_label"]
    return dict(cfg=options, task=fields_of_task)


def _check_prompt_sizes(cfg: RunConfig, tensors: Mapping[str, Tensor], source: Any) -> None:
    """Check that no size in a config exceeds the number of saved parameters.

    The model is built before its shapes can be compared, and a size of a billion fills the memory.
    """
    n_parameters = sum(tensor.numel() for tensor in tensors.values())
    for name, size in vars(cfg.method_config).items():
        if is_number(size, int) and size > max(n_parameters, 1000):
            raise UserError(
                f"{source} has {name}={size:,} and only {n_parameters:,} parameters: save the "
                "model again."
            )


def parse_run(
    description: Mapping[str, Any],  # with `cfg` and `task`, as `describe_run` returns them
) -> tuple[Task, RunConfig]:
    """Build the task and the config of a description; a field that it lacks has its default.

    Raises: `UserError` or `TypeError` for unknown fields, and for options that are refused.
    """
    values: dict[str, Any] = {**description["task"], "splits": {}, "convert_row": None}
    # JSON has no tuples
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Task(**values), RunConfig(**description["cfg"])


def parse_saved_run(
    # from a file, with `cfg` and `task`; checked by `check_save_format`
    description: dict[str, Any],
    source: Any,  # path of the file, for messages
    version: str,  # version that wrote the file
    tensors: Mapping[str, Tensor],  # saved tensors of the model
) -> tuple[Task, RunConfig]:
    """Build the task and the config that a file describes; paths in the file are discarded.

    Raises: `UserError` for unknown fields, for options that `RunConfig` refuses, and for sizes
    that do not fit the tensors.
    """
    try:
        task, cfg = parse_run(description)
    except (UserError, TypeError) as error:  # TypeError: a field that the class does not have
        raise UserError(
            f"the config or task of {source} is refused ({str(error).rstrip('.')}): install "
            f"idp_tutorial {reprlib.repr(version)}, which saved it, or train the model again."
        ) from None
    glove = cfg.get("glove")
    cfg = cfg.with_options(**_MACHINE_OPTIONS, glove=glove and Path(glove).name)
    _check_prompt_sizes(cfg, tensors, source)
    return task, cfg


def check_save_format(
    description: Any,  # description of a saved model
    source: Any,  # path of the file, for messages
    allow_prompt_model: bool = False,  # also accept a `PromptModel` with parts of its own
) -> None:
    """Check that this version can read a saved model, and that its description is complete.

    Raises: `UserError` for another format, a missing field, or a value of another type.
    """
    if not isinstance(description, dict):
        raise UserError(f"{source} has no description of a model: save the model again.")
    saved_format = description.get("format")
    if saved_format == PROMPT_MODEL_FORMAT and not allow_prompt_model:
        raise UserError(
            f"{source} is a prompt for a Hugging Face model object: load it with "
            "PromptModel.from_pretrained(model, folder)."
        )
    if saved_format not in (SAVE_FORMAT, PROMPT_MODEL_FORMAT):
        version = reprlib.repr(description.get("version")).strip("'\"")
        raise UserError(
            f"{source} has format {reprlib.repr(saved_format)}, not {SAVE_FORMAT}: install "
            f"idp_tutorial {version}, or train the model again."
        )
    check_schema(SavedModel, description, source, "save the model again")


def tensor_shapes(
    tensors: Mapping[str, Tensor],  # by name
) -> dict[str, tuple]:
    """Return the shape of each tensor, and whether its numbers are real."""
    return {name: (*t.shape, t.is_floating_point()) for name, t in tensors.items()}


_DTYPES = {**DTYPES, "float16": torch.float16, "float64": torch.float64}


def describe_weights(bb: Backbone, weights_only: bool = False) -> dict[str, Any]:
    """Return the dtype of a backbone, and its `backbone_id` in this dtype and in shorter ones."""
    size = _DTYPES[bb.dtype_name].itemsize
    names = [n for n, dtype in _DTYPES.items() if dtype.itemsize < size or n == bb.dtype_name]
    digests = {name: backbone_id(bb, _DTYPES[name], weights_only) for name in names}
    return dict(dtype=bb.dtype_name, digests=digests)


def describe_backbone(
    bb: Backbone,  # the backbone that the prompts were trained on
    name: str,  # its name or folder in the config
) -> dict[str, Any]:
    """Describe the weights that prompts belong to: name, revision, dtype, and identities."""
    return dict(
        name=_portable_name(name),
        local=_is_local_folder(name),
        revision=getattr(bb.config, "_commit_hash", None),
        **describe_weights(bb),
    )


# length of the digests of earlier versions, which differed with the version of transformers
_EARLIER_LENGTHS = (16, 64)


def check_backbone_matches(
    saved_backbone: dict[str, Any],  # with `dtype` and `digests`, as `describe_backbone` returns
    bb: Backbone,  # the backbone to check
    dependent: str,  # what was trained on it, for messages, such as 'the prompts of runs/a'
    name: str,  # name of the backbone that is needed
    weights_only: bool = False,  # the digests are those of `backbone_id(..., weights_only=True)`
) -> None:
    """Check that a backbone has the weights that prompts were trained on.

    A digest of an earlier version cannot be checked; it is accepted with a warning.

    Raises: `UserError` for other weights.
    """
    # the weights may have been rounded to the dtype of training
    for dtype in (bb.dtype_name, saved_backbone["dtype"]):
        saved_id = saved_backbone["digests"].get(dtype)
        if saved_id is None or dtype not in _DTYPES:
            continue
        if len(saved_id) in _EARLIER_LENGTHS:
            warnings.warn(
                f"{dependent} were saved by an earlier version, whose digest of {name!r} cannot "
                "be checked: make sure that it is the same model, and save them again.",
                stacklevel=2,
            )
            return
        if saved_id == backbone_id(bb, _DTYPES[dtype], weights_only):
            return
    raise UserError(
        f"{dependent} belong to another backbone: they need {name!r}, and the weights of "
        f"{bb.name!r} differ. Load the backbone they were trained on."
    )


def _locate_backbone(saved_backbone: dict[str, Any], name: str) -> str | None:
    """Return the name or the path to load; return None for a folder that is not known."""
    if not saved_backbone["local"]:
        return name
    path = recall_backbone_path(saved_backbone["digests"].get(saved_backbone["dtype"], ""))
    if path is None and Path(name, "config.json").is_file():
        return name
    return None if path is None else str(path)


def load_saved_backbone(
    saved_backbone: dict[str, Any],  # as for `check_backbone_matches`
    name: str,  # name of the backbone in the saved config
    # a backbone that the user gave, or its folder or name; None: the one that the saved model names
    bb: Backbone | str | Path | None,
    dependent: str,  # what needs the backbone, for messages, such as 'the prompts of runs/a'
    **load_options: Any,  # arguments of `load_backbone`, such as `revision` and `token`
) -> Backbone:
    """Load the backbone of a saved model, and compare its weights with the saved digest.

    Raises: `MissingFileError` if its folder is not known, `UserError` if its weights differ.
    """
    hint = "give its folder or name (bb=…)"
    location = _locate_backbone(saved_backbone, name) if bb is None else bb
    if location is None:
        raise MissingFileError(
            f"{dependent} need their backbone, a folder {name!r} that this machine does not have: "
            f"{hint}."
        )
    if isinstance(location, Backbone):
        backbone = location
    else:
        try:
            backbone = load_backbone(str(location), **load_options)
        except ValueError as error:
            raise UserError(f"{str(error).rstrip('.')}; {dependent} need it: {hint}.") from error
    check_backbone_matches(saved_backbone, backbone, dependent, name)
    return backbone
