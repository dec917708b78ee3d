"""A store of hidden states in memory-mapped files, written as a whole and looked up by example.

The states of a frozen model are the same in every epoch of every run. They are stored on disk,
where later processes find them.

The key of a text is a hash of the model's input, so the same text has the same key in every
task, split and run.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idp_tutorial.utils.checks import UserError, check_positive
from idp_tutorial.utils.files import sync_folder

__all__ = [
    "INDEX_DTYPE",
    "INDEX_DIGEST_BYTES",
    "example_key",
    "cache_size_bytes",
    "check_disk_space",
    "cache_limit_bytes",
    "evict_least_recently_used",
    "StateStore",
]


def example_key(example: dict) -> bytes:
    """Return a hash (16 bytes) of the token ids and token types of an example."""
    answer_start = [example["answer_start"]] if "answer_start" in example else []
    numbers = np.array(
        [
            len(example["input_ids"]),
            *example["input_ids"],
            *example["token_type_ids"],
            *answer_start,
        ],
        np.int32,
    )
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).digest()


# one entry of the index: key of the text, position after its last state, digest of its states
INDEX_DTYPE = np.dtype([("key", "u1", 16), ("end", "<i8"), ("digest", "u1", 8)])
INDEX_DIGEST_BYTES = 16  # digest of the index, written after its last entry


def cache_size_bytes(
    lengths: Iterable[int],  # states of each text: its number of tokens, or 1 for a sentence vector
    d: int,  # dimensions of a state
    dtype: str | np.dtype = "float32",
) -> int:
    """Return the exact size of a part of a store on disk, in bytes."""
    lengths = list(lengths)
    states = sum(lengths) * d * np.dtype(dtype).itemsize
    return states + len(lengths) * INDEX_DTYPE.itemsize + INDEX_DIGEST_BYTES


def check_disk_space(
    folder: Path,
    required_bytes: int,
    description: str = "this cache",  # for the message
    reserved_bytes: int = 2**26,  # that must stay free: 64 MiB
) -> None:
    """Raise `UserError` if a part does not fit on the disk of a folder."""
    free = shutil.disk_usage(folder).free
    if required_bytes + reserved_bytes > free:
        raise UserError(
            f"{description} needs {required_bytes / 1e6:,.1f} MB in {folder}, where "
            f"{free / 1e6:,.1f} MB are free; nothing is written. Set cache_dir to a larger "
            "disk, halve the size with cache_dtype='float16', use fewer or shorter texts (shots, "
            "max_len), or train with cache='none'."
        )


def cache_limit_bytes() -> float:
    """Return the maximum size of all caches together in bytes, from `IDP_CACHE_LIMIT` (GB)."""
    value = os.environ.get("IDP_CACHE_LIMIT") or "50"
    hint = "the maximum size of all caches together in GB, such as 50"
    try:
        return 1e9 * check_positive(float(value), "IDP_CACHE_LIMIT", hint)
    except ValueError:
        raise UserError(
            f"IDP_CACHE_LIMIT must be a positive number, got {value!r} ({hint})."
        ) from None


def evict_least_recently_used(
    root: Path,  # folder of all caches
    required_bytes: int,
    description: str = "this cache",  # for the message
    keep_parts: Collection[Path] = (),  # parts that are in use and not deleted
) -> None:
    """Delete the least recently used parts until `required_bytes` more are within the limit."""
    limit = cache_limit_bytes()
    if required_bytes > limit:
        raise UserError(
            f"{description} needs {required_bytes / 1e6:,.1f} MB, and IDP_CACHE_LIMIT allows "
            f"{limit / 1e6:,.1f} MB for all caches: increase it, or train with cache='none'."
        )
    sizes = {p: sum(f.stat().st_size for f in p.iterdir()) for p in root.glob("*/*/states-*")}
    for part in sorted(sizes.keys() - set(keep_parts), key=lambda p: p.stat().st_mtime):
        if sum(sizes.values()) + required_bytes <= limit:
            return
        shutil.rmtree(part, ignore_errors=True)
        del sizes[part]


def _blake2b_digest(size: int, *blocks: Any) -> bytes:
    """Return a digest of `size` bytes of all blocks in order."""
    digest = hashlib.blake2b(digest_size=size)
    for block in blocks:
        digest.update(block)
    return digest.digest()


def _write_synced(file: Path, blocks: Iterable) -> None:
    """Write a new file, and return when it is on the disk."""
    with open(file, "xb") as f:
        for block in blocks:
            f.write(block)
        f.flush()
        os.fsync(f.fileno())


def _remove_abandoned_folders(folder: Path, max_age_seconds: float = 86_400) -> None:
    """Delete the temporary folders of processes that were killed while they wrote a part."""
    for temporary in folder.glob(".writing-*"):
        if time.time() - temporary.stat().st_mtime > max_age_seconds:
            shutil.rmtree(temporary, ignore_errors=True)


class _Location(NamedTuple):
    """States of one text: where they are, and their digest."""

    states: np.ndarray  # of the whole part, memory-mapped `[N,d]`
    begin: int
    end: int
    digest: bytes
    part: Path


class StateStore:
    """States of texts on disk, in which `store[key]` is a memory-mapped array `[n,d]`."""

    def __init__(
        self,
        folder: Path | str,  # created if needed; its name should contain the backbone's fingerprint
        d: int,  # dimensions of a state
        dtype: str = "float32",  # or 'float16'
    ) -> None:
        self.folder = Path(folder)
        self.d = d
        self.dtype = np.dtype(dtype)
        self.locations: dict[bytes, _Location] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.refresh()

    def __len__(self) -> int:
        return len(self.locations)

    def __contains__(self, key: object) -> bool:
        return key in self.locations

    def __getitem__(self, key: bytes) -> np.ndarray:
        location = self.locations[key]
        return location.states[location.begin : location.end]

    def refresh(self) -> None:
        """Index all parts on disk; delete the damaged ones with a warning."""
        for part in sorted(self.folder.glob("states-*")):
            try:
                index_bytes = (part / "index").read_bytes()
                n_bytes = (part / "rows").stat().st_size
            except FileNotFoundError:  # another process may have deleted the part
                if part.exists():
                    self._discard(part, "a file is missing")
                continue
            index = self._parse_index(index_bytes)
            n = int(index["end"][-1]) if len(index) else 0
            if not n or n_bytes != n * self.d * self.dtype.itemsize:
                self._discard(part, "its index or its size has changed")
                continue
            states = np.asarray(np.memmap(part / "rows", self.dtype, "r", shape=(n, self.d)))
            for entry, begin in zip(index, [0, *index["end"][:-1]]):
                self.locations[entry["key"].tobytes()] = _Location(
                    states, int(begin), int(entry["end"]), entry["digest"].tobytes(), part
                )

    def _parse_index(self, data: bytes) -> np.ndarray:
        """Return the entries of an index; none if it is damaged or belongs to another store."""
        entries = data[:-INDEX_DIGEST_BYTES]
        is_valid = (
            len(data) > INDEX_DIGEST_BYTES
            and not len(entries) % INDEX_DTYPE.itemsize
            and self._index_digest(entries) == data[-INDEX_DIGEST_BYTES:]
        )
        return np.frombuffer(entries if is_valid else b"", INDEX_DTYPE)

    def _index_digest(self, index: bytes) -> bytes:
        """Return a digest of an index and of the store that it belongs to."""
        store_name = "/".join([*self.folder.absolute().parts[-2:], str(self.d), str(self.dtype)])
        return _blake2b_digest(INDEX_DIGEST_BYTES, index, store_name.encode())

    def _discard(self, part: Path, reason: str) -> None:
        warnings.warn(
            f"The cache {part} is damaged ({reason}): its states are computed again.", stacklevel=3
        )
        self.locations = {k: v for k, v in self.locations.items() if v.part != part}
        shutil.rmtree(part, ignore_errors=True)
        if part.exists():
            raise UserError(f"the damaged cache {part} cannot be removed: delete it.")

    def verify(self, keys: Iterable[bytes]) -> None:
        """Compare the states of texts with their digests; delete a damaged part with a warning."""
        for key in keys:
            location = self.locations.get(key)  # None: not stored, or its part was deleted
            if location and _blake2b_digest(8, key, self[key]) != location.digest:
                self._discard(location.part, "its states have changed")
        for part in {location.part for location in self.locations.values()}:
            # a part of another user may be readable only
            with contextlib.suppress(OSError):
                os.utime(part)  # the time of use, for `evict_least_recently_used`

    def add(
        self,
        keys: list[bytes],  # of the texts, in the order of `blocks`
        lengths: list[int],  # number of states of each text
        blocks: Iterable[np.ndarray],  # arrays `[n,d]`, together the states of all texts
        description: str = "this cache",  # for messages
    ) -> None:
        """Write a part; it appears when it is complete, or not at all."""
        required_bytes = cache_size_bytes(lengths, self.d, self.dtype)
        parts_in_use = {location.part for location in self.locations.values()}
        root = self.folder.absolute().parents[1]
        evict_least_recently_used(root, required_bytes, description, parts_in_use)
        check_disk_space(self.folder, required_bytes, description)
        _remove_abandoned_folders(self.folder)
        temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=self.folder))
        try:
            self._write_part(temporary, keys, lengths, blocks)
            part = self.folder / f"states-{_blake2b_digest(8, b''.join(keys)).hex()}"
            try:
                temporary.rename(part)
            except OSError:
                if not part.is_dir():  # otherwise another process has written the same part
                    raise
            sync_folder(self.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.refresh()

    def _write_part(
        self, folder: Path, keys: list[bytes], lengths: list[int], blocks: Iterable[np.ndarray]
    ) -> None:
        """Write the files of a part: the states, and the index with their digests."""
        index = np.zeros(len(keys), INDEX_DTYPE)
        index["key"] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
        index["end"] = np.cumsum(lengths)
        _write_synced(
            folder / "rows", (np.ascontiguousarray(block, self.dtype) for block in blocks)
        )
        states = np.memmap(folder / "rows", self.dtype, "r", shape=(sum(lengths), self.d))
        for i, (key, begin) in enumerate(zip(keys, [0, *index["end"][:-1]])):
            digest = _blake2b_digest(8, key, states[begin : index["end"][i]])
            index["digest"][i] = np.frombuffer(digest, np.uint8)
        _write_synced(folder / "index", [index.tobytes(), self._index_digest(index.tobytes())])
