"""Checks that the files of a backbone belong together: its config, its weights and its tokenizer.

A folder can be put together from several models, or its config edited. Without these checks, a
config with fewer layers than the weights gives another model in silence, one with far more builds
layers for hours, and a tokenizer of another model ends in an `IndexError` in the first batch.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from idp_tutorial.families.family import get_family
from idp_tutorial.utils.checks import UserError

__all__ = [
    "check_model_files",
    "check_layer_count",
    "check_tensor_sizes",
    "check_unexpected_tensors",
    "check_tokenizer_size",
]

_FILE_SUFFIXES = (".json", ".txt", ".model", ".safetensors", ".bin")
# buffers that earlier versions of transformers saved, and a module that the layer loop does not use
_IGNORED_TENSORS = re.compile(r"pooler|position_ids$|rotary_emb\.inv_freq$|attn\.(masked_)?bias$")


def check_model_files(folder: Path, name: str) -> None:
    """Check that each entry of a folder that should be a file is one.

    Raises: `UserError` for a folder of that name, a link to nothing, or a link to itself.
    """
    for entry in sorted(folder.iterdir()):
        if entry.suffix not in _FILE_SUFFIXES or entry.is_file():
            continue
        kind = "a folder" if entry.is_dir() else "a link that leads to no file"
        raise UserError(
            f"{entry.name} of backbone {name!r} is {kind}, and must be a file: copy or download it "
            "again."
        )


def _read_header(weights: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: its metadata, and type and shape of each tensor."""
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(min(length, weights.stat().st_size)))


def _stored_tensor_names(folder: Path) -> list[str]:
    """Return the names of the tensors in safetensors files; [] if they cannot be read."""
    index = folder / "model.safetensors.index.json"
    weights = folder / "model.safetensors"
    try:
        if weights.is_file():
            return [*_read_header(weights)]
        return [*json.loads(index.read_bytes())["weight_map"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # loading says what is wrong


def _largest_stored_dimension(folder: Path) -> int:
    """Return the largest dimension of the tensors in safetensors files; 0 if it is unknown."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    try:
        if not files[0].is_file():
            files = [folder / f for f in set(json.loads(index.read_bytes())["weight_map"].values())]
        tensors = [t for f in files for name, t in _read_header(f).items() if name[:2] != "__"]
        return max((size for tensor in tensors for size in tensor["shape"]), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0  # loading says what is wrong


def check_layer_count(folder: Path, config: Any, name: str) -> None:
    """Check that the config has as many layers as the weights, before a model is built.

    Weights in another format than safetensors are not read. Raises: `UserError` for another number.
    """
    layers_path = re.escape(get_family(config, name).backbone_class.layers_path)
    pattern = re.compile(rf"(?:^|\.){layers_path}\.(\d+)\.")
    matches = map(pattern.search, _stored_tensor_names(folder))
    indices = {int(match[1]) for match in matches if match and "decoder" not in match.string}
    n_layers = config.num_hidden_layers
    if indices and max(indices) + 1 != n_layers:
        raise UserError(
            f"config.json of backbone {name!r} says {n_layers:,} layers, but its weights have "
            f"{max(indices) + 1:,}. Correct the number of layers in config.json, or download or "
            "save the model again."
        )


def check_tensor_sizes(folder: Path, config: Any, name: str) -> None:
    """Check that no size in the config is larger than any stored tensor, before a model is built.

    Other differences are found when the weights are loaded, but tensors that do not fit are built
    first, which fills the memory if they are large. Raises: `UserError` for a size that is larger.
    """
    largest = _largest_stored_dimension(folder)
    for field in ("vocab_size", "hidden_size", "intermediate_size"):
        size = getattr(config, field, None)
        if largest and isinstance(size, int) and size > largest:
            raise UserError(
                f"config.json of backbone {name!r} describes tensors of other shapes than its "
                f"weights have: {field} is {size:,}, but no dimension of the weights is larger "
                f"than {largest:,}. Correct the sizes in config.json, or download or save the "
                "model again."
            )


def check_unexpected_tensors(model: Any, names: Iterable[str], name: str) -> None:
    """Check that a model uses all tensors of its checkpoint, except those of heads and poolers.

    Raises: `UserError` for other tensors, such as those of further layers.
    """
    prefix = model.base_model_prefix
    base = getattr(model, prefix, model)
    parts = tuple(f"{part}." for part, _ in base.named_children())
    unused = [
        tensor
        for tensor in sorted(names)
        if tensor.removeprefix(f"{prefix}.").startswith(parts)
        and not _IGNORED_TENSORS.search(tensor)
    ]
    if unused:
        raise UserError(
            f"the checkpoint of backbone {name!r} has {len(unused)} tensors that its config does "
            f"not use ({unused[0]}, …), so it would be another model. Correct config.json, or "
            "download or save the model again."
        )


def check_tokenizer_size(model: Any, tokenizer: Any, name: str) -> None:
    """Check that the word embeddings have a row for each token of the tokenizer.

    Special tokens beyond the table are accepted, since no text contains them (Gemma 3 has one).
    Raises: `UserError` for other tokens.
    """
    n_rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= n_rows:
        return
    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    unknown = [i for i in tokenizer.get_vocab().values() if i >= n_rows and i not in special_ids]
    if unknown:
        raise UserError(
            f"the tokenizer of backbone {name!r} has token ids up to {max(unknown)}, but the word "
            f"embeddings of the model have only {n_rows} rows. Use the tokenizer of the model; "
            "after adding tokens, call resize_token_embeddings(len(tokenizer)) on the model and "
            "save both."
        )
