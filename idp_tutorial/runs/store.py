"""Decide whether what is stored is what a run would compute, in one place.

Every run that is worth storing has a *fingerprint*: the fields of the config that can change its
result, and the digests of the weights, rows and files that it reads (`make_fingerprint`). Its
record contains the fingerprint, field by field. So a stored record is the result that is
needed if it agrees with the fingerprint; folders, devices and times play no part. A record that
lacks a field of the fingerprint is not the result, because nobody can tell.

Every record is written as soon as its run ends. A run that was interrupted is repeated by the
next call, and an incomplete last line that a kill may have left is removed.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from idp_tutorial.assembly.config import recorded_option
from idp_tutorial.runs.record import Record
from idp_tutorial.utils.durable import compute_digest
from idp_tutorial.utils.process_state import process_state
from idp_tutorial.utils.records import append_record, read_existing_records

__all__ = ["RunStore", "checkpoint_folder", "remove_checkpoints"]


def checkpoint_folder(
    records_file: Path | None,  # JSONL file that gets the record of the run
    fingerprint: Mapping[str, Any],  # from `make_fingerprint`
) -> Path | None:
    """Return the hidden folder of the checkpoints of a run, or None if it has none."""
    if records_file is None or process_state().num_processes > 1:
        return None
    name = compute_digest([json.dumps(fingerprint, sort_keys=True, default=str).encode()])
    return records_file.with_name(f".{records_file.stem}-checkpoints") / name


def remove_checkpoints(
    folder: Path | None,  # from `checkpoint_folder`
) -> None:
    """Remove the checkpoints of a run whose record is written."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other runs have checkpoints, or there is no folder
            folder.parent.rmdir()


def _agrees(record: Mapping[str, Any], name: str, value: Any) -> bool:
    """Return whether a record has a value; None stands for the default of an option."""
    if name not in record or record[name] is not None:
        return name in record and record[name] == value
    return value is None or ("method" in record and recorded_option(record, name) == value)


def _is_complete(record: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> bool:
    """Return whether a record has the result of the choice of a learning rate, if there was one."""
    return "lr_selection" not in fingerprint or {"lr", "status"} <= record.keys()


class RunStore:
    """Records of runs in a JSONL file, which are found again by their fingerprints."""

    def __init__(
        self,
        file: Path | str | None,  # JSONL file; None: records are kept in memory only
        earlier_records: Iterable[dict] = (),  # records of other files, which are not written
    ) -> None:
        self.file = Path(file) if file else None
        self.records: list[dict] = [*earlier_records, *read_existing_records(file)]

    def find(
        self,
        fingerprint: Mapping[str, Any],  # from `make_fingerprint`
    ) -> dict | None:
        """Return the last record that agrees with a fingerprint, or None."""
        for record in reversed(self.records):
            agrees = all(_agrees(record, name, value) for name, value in fingerprint.items())
            if agrees and _is_complete(record, fingerprint):
                return record
        return None

    def add(self, record: dict) -> dict:
        """Append a record to the file, and return it."""
        if self.file:
            append_record(record, self.file)
        self.records.append(record)
        return record

    def get_or_run(
        self,
        fingerprint: Mapping[str, Any],  # from `make_fingerprint`
        run: Callable[[], Record | dict],  # what to call if nothing is stored
    ) -> dict:
        """Return the stored record of a run; without one, run it and store its record.

        The new record gets the fields of the fingerprint, so that it is found again.
        """
        stored = self.find(fingerprint)
        if stored is not None:
            return stored
        result = run()
        record = result.to_dict() if isinstance(result, Record) else result
        return self.add({**record, **fingerprint})
