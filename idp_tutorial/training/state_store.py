"""A store of hidden states in memory-mapped files, written as a whole and looked up by example.

The states of a frozen model are the same in every epoch of every run. They are stored on disk,
where later processes find them.

The key of a text is a hash of the model's input, so the same text has the same key in every
task, split and run. A *part* is a file with the states of the texts that one call added, followed
by an index: the key of each text, where its states end, and their digest. The index ends with
its own digest. The states are written one batch at a time, and read through a memory map, so
neither has to fit into memory. (A `.npy` or safetensors file would need all states at once, or
would write through the memory map, where a full disk kills the process.)
"""

import os
import shutil
import warnings
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idp_tutorial.utils.checks import Range, UserError, parse_number
from idp_tutorial.utils.digests import compute_digest
from idp_tutorial.utils.durable_files import open_atomically, remove_stale_part_files


def _digest(size: int, *blocks: Any) -> bytes:
    """Return a digest of `size` bytes of all blocks in order."""
    return bytes.fromhex(compute_digest(blocks, size))


def example_key(example: dict) -> bytes:
    """Return a hash (16 bytes) of the token ids and token types of an example."""
    ids = example["input_ids"]
    answer_start = [example["answer_start"]] if "answer_start" in example else []
    numbers = [len(ids), *ids, *example["token_type_ids"], *answer_start]
    return _digest(16, np.array(numbers, np.int32))


# one entry of the index: key of the text, position after its last state, digest of its states
INDEX_DTYPE = np.dtype([("key", "u1", 16), ("end", "<i8"), ("digest", "u1", 8)])
INDEX_FOOTER_BYTES = 24  # after the last entry: the number of entries, and the digest of the index


def cache_size_bytes(
    lengths: Iterable[int],  # states of each text: its number of tokens, or 1 for a sentence vector
    d: int,  # dimensions of a state
    dtype: str | np.dtype = "float32",
) -> int:
    """Return the exact size of a part of a store on disk, in bytes."""
    lengths = list(lengths)
    states = sum(lengths) * d * np.dtype(dtype).itemsize
    return states + len(lengths) * INDEX_DTYPE.itemsize + INDEX_FOOTER_BYTES


def _cache_limit_bytes() -> float:
    """Return the maximum size of all caches together in bytes, from `IDP_CACHE_LIMIT` (GB)."""
    value = os.environ.get("IDP_CACHE_LIMIT") or "50"
    hint = "the maximum size of all caches together in GB, such as 50"
    try:
        return 1e9 * Range(0, 1e40, hint, True).check(parse_number(value), "IDP_CACHE_LIMIT")
    except ValueError:
        raise UserError(
            f"IDP_CACHE_LIMIT must be a positive number, got {value!r} ({hint})."
        ) from None


_RESERVED_BYTES = 2**26  # of the disk, which must stay free: 64 MiB


def _make_room(
    root: Path, required_bytes: int, description: str, parts_in_use: Collection[Path]
) -> None:
    """Delete the least recently used parts until `required_bytes` more are within the limit.

    The limit is `IDP_CACHE_LIMIT`, or what the disk can have beside other files.
    """
    stats = {}
    for part in root.glob("*/*/*.states"):
        with suppress(FileNotFoundError):  # another process may have deleted it
            stats[part] = part.stat()
    total = sum(stat.st_size for stat in stats.values())
    free = shutil.disk_usage(root).free
    limit = min(_cache_limit_bytes(), total + free - _RESERVED_BYTES)
    if required_bytes > limit:
        raise UserError(
            f"{description} needs {required_bytes / 1e6:,.1f} MB, and all caches in {root} may "
            f"have {max(limit, 0) / 1e6:,.1f} MB (IDP_CACHE_LIMIT, or the free space); nothing is "
            "written. Set cache_dir to a larger disk, use cache_dtype='float16', or cache='none'."
        )
    for part in sorted(stats.keys() - set(parts_in_use), key=lambda part: stats[part].st_mtime):
        if total + required_bytes <= limit:
            return
        part.unlink(missing_ok=True)
        total -= stats[part].st_size


class _Location(NamedTuple):
    """States of one text: an array `[n,d]` of a memory-mapped part, and their digest."""

    states: np.ndarray
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
        return self.locations[key].states

    def refresh(self) -> None:
        """Index all parts on disk; delete the damaged ones with a warning."""
        for part in sorted(self.folder.glob("*.states")):
            try:
                data = np.asarray(np.memmap(part, np.uint8, "r"))
            except FileNotFoundError:  # another process has deleted it
                continue
            except ValueError:  # an empty file
                data = np.empty(0, np.uint8)
            index = self._read_index(data)
            if index is None:
                self._discard(part, "its index or its size has changed")
                continue
            n_bytes = int(index["end"][-1]) * self.d * self.dtype.itemsize
            states = data[:n_bytes].view(self.dtype).reshape(-1, self.d)
            for entry, begin in zip(index, [0, *index["end"][:-1]]):
                self.locations[entry["key"].tobytes()] = _Location(
                    states[begin : entry["end"]], entry["digest"].tobytes(), part
                )

    def _read_index(self, data: np.ndarray) -> np.ndarray | None:
        """Return the index of a part; None if it is damaged or belongs to another store."""
        n = int(data[-INDEX_FOOTER_BYTES:].view("<i8")[0]) if len(data) > INDEX_FOOTER_BYTES else 0
        n_bytes = n * INDEX_DTYPE.itemsize + INDEX_FOOTER_BYTES
        if n < 1 or n_bytes > len(data):
            return None
        footer = data[-n_bytes:]
        index = footer[:-INDEX_FOOTER_BYTES].view(INDEX_DTYPE)
        if footer.tobytes() != self._dump_index(index):
            return None
        ends = index["end"]
        if ends[0] < 1 or (np.diff(ends) < 1).any():
            return None
        size_of_states = int(ends[-1]) * self.d * self.dtype.itemsize
        return index if len(data) == size_of_states + n_bytes else None

    def _dump_index(self, index: np.ndarray) -> bytes:
        """Return an index with its footer; the digest depends on the store, too."""
        store_name = "/".join([*self.folder.absolute().parts[-2:], str(self.d), str(self.dtype)])
        entries = index.tobytes() + len(index).to_bytes(8, "little")
        return entries + _digest(16, entries, store_name.encode())

    def _discard(self, part: Path, reason: str) -> None:
        warnings.warn(
            f"The cache {part} is damaged ({reason}): its states are computed again.", stacklevel=3
        )
        self.locations = {k: v for k, v in self.locations.items() if v.part != part}
        try:
            part.unlink(missing_ok=True)
        except OSError:
            raise UserError(f"the damaged cache {part} cannot be removed: delete it.") from None

    def verify(self, keys: Iterable[bytes]) -> None:
        """Compare the states of texts with their digests; delete a damaged part with a warning."""
        for key in keys:
            location = self.locations.get(key)  # None: not stored, or its part was deleted
            if location and _digest(8, key, location.states) != location.digest:
                self._discard(location.part, "its states have changed")
        for part in {location.part for location in self.locations.values()}:
            # a part of another user may be readable only
            with suppress(OSError):
                os.utime(part)  # the time of use, for `_make_room`

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
        _make_room(root, required_bytes, description, parts_in_use)
        remove_stale_part_files(self.folder)
        index = np.zeros(len(keys), INDEX_DTYPE)
        index["key"] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
        index["end"] = np.cumsum(lengths)
        part = self.folder / f"{_digest(8, b''.join(keys)).hex()}.states"
        with open_atomically(part) as f:
            for block in blocks:
                f.write(np.ascontiguousarray(block, self.dtype))
            f.flush()
            states = np.memmap(f.name, self.dtype, "r", shape=(sum(lengths), self.d))
            for entry, begin in zip(index, [0, *index["end"][:-1]]):
                digest = _digest(8, entry["key"], states[begin : entry["end"]])
                entry["digest"] = np.frombuffer(digest, np.uint8)
            f.write(self._dump_index(index))
        self.refresh()
