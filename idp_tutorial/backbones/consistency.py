"""Checks that the files of a backbone belong together: its config, its weights and its tokenizer.

A folder can be put together from several models, or its config edited. Without these checks, a
config with fewer layers than the weights gives another model in silence, one with far more builds
layers for hours, and a tokenizer of another model ends in an `IndexError` in the first batch.
"""

import copy
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from idp_tutorial.families.family import build_hf_model, get_family
from idp_tutorial.utils.checks import UserError

__all__ = [
    "check_model_files",
    "check_config_numbers",
    "check_layer_count",
    "check_tensor_shapes",
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


def _stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in safetensors files; {} if they cannot be read."""
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    shapes: dict[str, list[int]] = {}
    try:
        if not (folder / "model.safetensors").is_file():
            files = set(json.loads(index.read_bytes())["weight_map"].values())
        for file in files:
            header = _read_header(folder / file)
            shapes |= {k: value["shape"] for k, value in header.items() if k != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # loading says what is wrong
    return shapes


def _read_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(min(length, file.stat().st_size)))


def check_config_numbers(config: Any, name: str) -> None:
    """Check that the numbers in a config are finite, its dropout rates fractions, its ids valid.

    Raises: `UserError` for another number.
    """
    pad_id = getattr(config, "pad_token_id", None)
    if isinstance(pad_id, int) and pad_id < -1:  # Llama's is -1: none
        raise UserError(
            f"config.json of backbone {name!r} has pad_token_id={pad_id}, and needs a token id: "
            "correct it, or download or save the model again."
        )
    for key, value in config.to_dict().items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        is_rate = key.endswith(("dropout", "_dropout_prob", "_pdrop"))
        is_finite = abs(value) <= sys.float_info.max
        if not is_finite or (is_rate and not 0 <= value <= 1):
            raise UserError(
                f"config.json of backbone {name!r} has {key}={value!r:.40}, and needs "
                f"{'a fraction from 0 to 1' if is_rate else 'a finite number'}: correct it, or "
                "download or save the model again."
            )


def check_layer_count(folder: Path, config: Any, name: str) -> None:
    """Check that the config has as many layers as the weights, before a model is built.

    Weights in another format than safetensors are not read. Raises: `UserError` for another number.
    """
    layers_path = re.escape(get_family(config, name).backbone_class.layers_path)
    pattern = re.compile(rf"(?:^|\.){layers_path}\.(\d+)\.")
    matches = map(pattern.search, _stored_shapes(folder))
    indices = {int(match[1]) for match in matches if match and "decoder" not in match.string}
    n_layers = config.num_hidden_layers
    if indices and max(indices) + 1 != n_layers:
        raise UserError(
            f"config.json of backbone {name!r} says {n_layers:,} layers, but its weights have "
            f"{max(indices) + 1:,}. Correct the number of layers in config.json, or download or "
            "save the model again."
        )


def check_tensor_shapes(folder: Path, config: Any, name: str) -> None:
    """Check that the weights have the shapes that the config describes, before a model is built.

    The shapes come from a model of one layer on the meta device, which needs no memory. Raises:
    `UserError` for another shape.
    """
    stored = _stored_shapes(folder)
    config = copy.deepcopy(config)
    try:
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        with torch.device("meta"):
            model = build_hf_model(config)
    except Exception:
        return  # loading says what is wrong
    prefix = f"{model.base_model_prefix}."
    for tensor, expected in model.state_dict().items():
        inner = tensor.removeprefix(prefix)
        for key in (tensor, inner, prefix + inner):
            if key in stored and stored[key] != list(expected.shape):
                raise UserError(
                    f"config.json of backbone {name!r} describes a tensor {key} of shape "
                    f"{tuple(expected.shape)}, but its weights have {tuple(stored[key])}. Correct "
                    "the sizes in config.json, or download or save the model again."
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
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, (int, float)) or longest < 1:
        raise UserError(
            f"tokenizer_config.json of backbone {name!r} has model_max_length={longest!r:.40}, and "
            "needs a positive number: correct it, or download or save the model again."
        )
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
