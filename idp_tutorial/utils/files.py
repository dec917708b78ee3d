"""Write files atomically, and detect damaged files by their digests.

Disks fill up, jobs are killed, power fails, bits flip. Everything that the package writes goes
through this module, so that these cases are handled in one place.

A file is replaced in three steps: the new content is written beside it under a unique name,
brought to the disk, and renamed. The folder is brought to the disk too, so that after a power
cut either the old file or the new one is there. A reader never sees half a file.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.locks import folder_lock

__all__ = [
    "MANIFEST_NAME",
    "sync_folder",
    "open_atomically",
    "write_atomically",
    "repair_last_line",
    "append_line",
    "compute_digest",
    "dump_record",
    "load_record",
    "file_digest",
    "write_manifest",
    "read_manifest",
    "find_damaged_file",
    "asset_path",
]


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows does it by itself
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_atomically(
    file: Path | str,  # the file to write; a link is followed
    mode: str = "wb",  # 'wb' or 'w'
    **open_kwargs: Any,  # further arguments of `open`
) -> Iterator[IO]:  # an open file
    """Open a file that replaces the old one when the block ends without an error."""
    file = Path(os.path.realpath(file))
    if file.exists() and not file.is_file():  # a pipe or a device cannot be replaced
        with open(file, mode, **open_kwargs) as f:
            yield f
        return
    part = file.with_name(f".{file.name[:40]}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with open(part, mode.replace("w", "x"), **open_kwargs) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, file)
    except BaseException as e:
        part.unlink(missing_ok=True)
        if isinstance(e, OSError) and str(e.filename) == str(part):
            e.filename = str(file)  # the message names the file that the user knows
        raise
    sync_folder(file.parent)


def write_atomically(
    file: Path | str,  # the file to write; a link is followed
    data: bytes,  # its content
) -> None:
    """Write a file as a whole, or leave the old one unchanged."""
    with open_atomically(file) as f:
        f.write(data)


def repair_last_line(file: Path) -> None:
    """Remove an incomplete last line of a JSONL file, or add the line break that it lacks."""
    data = file.read_bytes()
    if not data or data.endswith(b"\n"):
        return
    start = data.rfind(b"\n") + 1
    try:
        json.loads(data[start:])
    except ValueError:
        write_atomically(file, data[:start])
    else:
        write_atomically(file, data + b"\n")


def append_line(file: Path, line: str) -> None:
    """Append a line to a file and flush it to disk; other processes wait."""
    # a lock of its own: that of the whole file may be held for hours
    with folder_lock(file.parent, file.name + "-end", wait=True):
        if file.exists():
            repair_last_line(file)
        with open(file, "ab") as f:
            f.write(line.encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
        sync_folder(file.parent)


def compute_digest(chunks: Iterable) -> str:  # 16 hexadecimal digits
    """Return the BLAKE2b digest of byte strings, one after the other."""
    h = hashlib.blake2b(digest_size=8)
    for chunk in chunks:
        h.update(chunk)
    return h.hexdigest()


_DIGEST_PATTERN = re.compile(r"[0-9a-f]{16}")


def dump_record(record: dict) -> str:
    """Return a record as a line of JSON that contains its digest."""
    text = json.dumps(record)
    return json.dumps({**json.loads(text), "digest": compute_digest([text.encode()])})


def load_record(line: str) -> dict:
    """Return the record in a line of JSON, without its digest.

    Raises: `ValueError` for a line that is not an object, or that was changed after it was written.
    """
    try:
        record = json.loads(line)
    except RecursionError:
        raise UserError("its brackets are nested too deeply") from None
    if not isinstance(record, dict):
        raise UserError(f"it is not a JSON object but {str(record)[:40]!r}")
    stored = record.pop("digest", None)
    # a record without digest is accepted, unless the damage is in the key 'digest' itself
    is_key_damaged = stored is None and any(
        isinstance(v, str) and _DIGEST_PATTERN.fullmatch(v) for v in record.values()
    )
    is_changed = stored is not None and stored != compute_digest([json.dumps(record).encode()])
    if is_key_damaged or is_changed:
        raise UserError("its digest does not match: the line was changed after it was written")
    return record


MANIFEST_NAME = "SHA256SUMS"


def file_digest(file: Path) -> str:  # 64 hexadecimal digits
    """Return the SHA-256 digest of a file, which may be larger than memory."""
    h = hashlib.sha256()
    with open(file, "rb") as f:
        while block := f.read(2**22):
            h.update(block)
    return h.hexdigest()


def write_manifest(
    folder: Path,  # the folder that gets the manifest
    *patterns: str,  # glob patterns of the files to list (default: all)
) -> None:
    """Write the digests of files in a folder, in the format of `sha256sum -c SHA256SUMS`."""
    paths = {p for pattern in patterns or ("**/*",) for p in folder.glob(pattern)}
    lines = []
    for path in sorted(paths):
        if path.is_file() and path.name != MANIFEST_NAME and not path.name.startswith("."):
            lines.append(f"{file_digest(path)}  {path.relative_to(folder).as_posix()}\n")
    write_atomically(folder / MANIFEST_NAME, "".join(lines).encode())


def read_manifest(folder: Path) -> dict[str, str]:  # file name: SHA-256 digest
    """Return the digests in the manifest of a folder."""
    try:
        lines = (folder / MANIFEST_NAME).read_text(encoding="utf-8").splitlines()
        return {name: sha256 for sha256, name in (line.split("  ", 1) for line in lines)}
    except ValueError:
        raise UserError(
            f"{folder / MANIFEST_NAME} is damaged: download or create the folder again."
        ) from None


def find_damaged_file(folder: Path) -> str:  # '' if no file is damaged
    """Return the first file that is missing or differs from the manifest of its folder."""
    for name, sha256 in read_manifest(folder).items():
        file = folder / name.replace("\0", "?")
        if not file.is_file() or file_digest(file) != sha256:
            return name
    return ""


def asset_path(
    name: str,  # name of a file in `idp_tutorial/assets`
) -> Path:
    """Return the path of a file of the package after its digest has been checked.

    Raises: `UserError` if it is missing or differs from the manifest.
    """
    root = Path(str(files("idp_tutorial"))) / "assets"
    if not (root / name).is_file() or file_digest(root / name) != read_manifest(root).get(name):
        raise UserError(
            f"{root / name} is damaged or missing: install the package again. "
            f"If you changed it yourself, write the output of `sha256sum {name}` into "
            f"{MANIFEST_NAME} beside it."
        )
    return root / name
