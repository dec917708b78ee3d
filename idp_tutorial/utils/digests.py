"""Digests of bytes and files, and the manifest of a folder, with which its files are compared.

A manifest lists the SHA-256 digests of the files of a folder, as `sha256sum` does.
"""

import hashlib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.durable_files import write_atomically


def compute_digest(
    chunks: Iterable,  # byte strings, or arrays of bytes
    size: int = 8,  # bytes of the digest
) -> str:  # two hexadecimal digits for each byte
    """Return the BLAKE2b digest of byte strings, one after the other."""
    h = hashlib.blake2b(digest_size=size)
    for chunk in chunks:
        h.update(chunk)
    return h.hexdigest()


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
        digests = {name: sha256 for sha256, name in (line.split("  ", 1) for line in lines)}
    except ValueError:
        raise UserError(
            f"{folder / MANIFEST_NAME} is damaged: download or create the folder again."
        ) from None
    for name in digests:
        parts = name.split("/")
        is_odd = "" in parts or ".." in parts or "\0" in name or "\\" in name
        if is_odd or any(len(part.encode()) > 255 for part in parts):
            raise UserError(
                f"{folder / MANIFEST_NAME} names the file {name!r:.60}, which is not in this "
                "folder: download or create the folder again."
            )
    return digests


def find_damaged_file(
    folder: Path,
    digests: Mapping[str, str] | None = None,  # file name: SHA-256 digest; None: the manifest's
) -> str:  # '' if no file is damaged
    """Return the first file of a folder that is missing or does not have its digest."""
    for name, sha256 in (read_manifest(folder) if digests is None else digests).items():
        file = folder / name
        if not file.is_file() or file_digest(file) != sha256:
            return name
    return ""


def require_intact_files(
    folder: Path,
    remedy: str,  # what usually fixes a damaged file, as a sentence, for the message
    digests: Mapping[str, str] | None = None,  # file name: SHA-256 digest; None: the manifest's
) -> Path:  # `folder`
    """Return a folder after all its files have been compared with their digests.

    Raises: `UserError` that names the first file which is missing or damaged.
    """
    damaged = find_damaged_file(folder, digests)
    if damaged:
        raise UserError(
            f"{folder / damaged} is damaged or missing: its SHA-256 digest is not the expected "
            f"one. {remedy}"
        )
    return folder


def asset_path(
    name: str,  # name of a file in `idp_tutorial/assets`
) -> Path:
    """Return the path of a file of the package after its digest has been checked.

    Raises: `UserError` if it is missing or differs from the manifest.
    """
    root = Path(str(files("idp_tutorial"))) / "assets"
    remedy = (
        "Install the package again. If you changed the file yourself, write the output of "
        f"`sha256sum {name}` into {MANIFEST_NAME} beside it."
    )
    return require_intact_files(root, remedy, {name: read_manifest(root).get(name, "")}) / name
