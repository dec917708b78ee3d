"""Files on this machine that record which folder holds the weights with a given digest.

A path contains names of people and machines, so it does not belong in a file that is sent to
others. A saved model therefore stores only the last part of its backbone's path and the digest
of the weights. The user can name the folder (`--backbone`); otherwise this machine remembers it
in a note in the cache, named by the digest and written when a model with this backbone was
saved. A note is only a hint: the weights that are loaded from the folder are compared with the
digest.
"""

import re
from contextlib import suppress
from pathlib import Path

from idp_tutorial.backbones.fetch import backbone_cache_folder
from idp_tutorial.utils.durable import write_atomically

__all__ = ["path_notes_folder", "remember_backbone_path", "recall_backbone_path"]


def path_notes_folder() -> Path:
    """Return the folder of the notes, below `$IDP_CACHE` or `~/.cache/idp_tutorial`."""
    return backbone_cache_folder() / "places"


def remember_backbone_path(
    digest: str,  # digest of the weights, from `weights_digest`
    folder: Path | str,  # folder from which they were loaded
) -> None:
    """Write a note of the folder that contains these weights.

    Nothing happens if the cache cannot be written, because a note is only a hint.
    """
    with suppress(OSError):
        path_notes_folder().mkdir(parents=True, exist_ok=True)
        write_atomically(path_notes_folder() / digest, str(Path(folder).resolve()).encode())


def recall_backbone_path(
    digest: object,  # value from a file, which need not be a valid digest
) -> Path | None:
    """Return the folder that last contained these weights, or None if unknown or deleted."""
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]+", digest):
        return None
    try:
        folder = Path((path_notes_folder() / digest).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return folder if folder.is_dir() else None
