"""Tensors and their description in one safetensors file, with a digest of every byte.

Two files that belong together can be separated: by a kill between two renames, or by a copy
that stopped. A safetensors file has a header that can contain a description, so one file is
enough. The format itself checks the header only: a changed number would be read without an
error. The description therefore starts with a digest of the whole file, computed with zeros in
the place of the digest.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.files import write_atomically

__all__ = [
    "PROMPTS_FILE",
    "METADATA_KEY",
    "serialise_tensors",
    "has_description",
    "deserialise_tensors",
    "save_tensors",
    "load_tensors",
]


PROMPTS_FILE = "prompts.safetensors"  # name of the file in the folder of a saved model
METADATA_KEY = "idp_tutorial"  # key of the safetensors metadata: a digest, a space, JSON
_ZERO_DIGEST = b"0" * 64
_DIGEST_IN_HEADER = re.compile(rb'"idp_tutorial":"([0-9a-f]{64}) ')


def serialise_tensors(
    tensors: dict[str, Tensor],  # name: tensor
    description: Any,  # anything that JSON can express
) -> bytes:  # content of a safetensors file
    """Return tensors and their description as bytes that contain a digest of both."""
    blank = save(tensors, {METADATA_KEY: f"{_ZERO_DIGEST.decode()} {json.dumps(description)}"})
    match = _DIGEST_IN_HEADER.search(blank)
    assert match, "the metadata were just written"
    start = match.start(1)
    return blank[:start] + hashlib.sha256(blank).hexdigest().encode() + blank[start + 64 :]


def has_description(data: bytes) -> bool:
    """Return whether the bytes of a safetensors file contain a description of this package."""
    return bool(_DIGEST_IN_HEADER.search(data))


def deserialise_tensors(
    data: bytes,  # content of a safetensors file
    name: Path | str = "these bytes",  # name of the file, for messages
    remedy: str = "save it again, or download it again",  # what usually fixes it, for messages
) -> tuple[Any, dict[str, Tensor]]:  # the description and the tensors
    """Return the description and the tensors that `serialise_tensors` wrote.

    Raises: `UserError` if any byte was changed, or if the file is not of this package.
    """
    match = _DIGEST_IN_HEADER.search(data)
    if not match or _digest_without_digest(data, match) != match[1]:
        raise UserError(
            f"{name} is damaged, or was not written by idp_tutorial (its checksum does not match): "
            f"{remedy}."
        )
    header_size = int.from_bytes(data[:8], "little")
    try:
        tensors = load(data)
        text = json.loads(data[8 : 8 + header_size])["__metadata__"][METADATA_KEY]
        return json.loads(text[65:]), tensors
    except Exception as e:  # a valid digest of invalid content
        raise UserError(f"{name} cannot be read ({type(e).__name__}): {remedy}.") from None


def _digest_without_digest(data: bytes, match: re.Match) -> bytes:
    """Return the digest of a file in which zeros take the place of the digest."""
    blank = data[: match.start(1)] + _ZERO_DIGEST + data[match.end(1) :]
    return hashlib.sha256(blank).hexdigest().encode()


def save_tensors(
    file: Path | str,  # replaced as a whole
    tensors: dict[str, Tensor],  # name: tensor
    description: Any,  # anything that JSON can express
) -> None:
    """Write tensors and their description to a file, as a whole or not at all."""
    write_atomically(Path(file), serialise_tensors(tensors, description))


def load_tensors(
    file: Path | str,  # written by `save_tensors`
    remedy: str = "save it again, or download it again",  # what usually fixes it, for messages
) -> tuple[Any, dict[str, Tensor]]:  # the description and the tensors
    """Return the description and the tensors in a file of `save_tensors`.

    Raises: `UserError` for a damaged file.
    """
    return deserialise_tensors(Path(file).read_bytes(), file, remedy)
