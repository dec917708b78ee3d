"""Send a saved model to the Hugging Face hub, and load it by its name and revision.

A repository on the hub has the files of a saved model: the tensors, the readable description
and the model card. The backbone is named and not copied. Paths of this machine are not sent.

`huggingface_hub` has a mixin for classes that are built from a config alone. Models of this
package are built from a config, a task and a backbone, and checked against digests, so we use
its building blocks: `HfApi`, `snapshot_download`, `ModelCard`.
"""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, snapshot_download
from torch import Tensor

from idp_tutorial.saving.descriptions import (
    PROMPTS_FILE,
    READABLE_DESCRIPTION_FILE,
    check_save_format,
    read_prompts,
    write_prompts,
)
from idp_tutorial.saving.model_card import build_model_card
from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.durable_files import write_atomically
from idp_tutorial.utils.hub_access import is_hub_reachable, split_revision
from idp_tutorial.utils.records import (
    check_record,
    config_fingerprint,
    describe_differences,
    load_record,
)

MODEL_CARD_FILE = "README.md"
RECORD_FILE = "record.jsonl"
# files of a repository
HUB_FILES = (PROMPTS_FILE, READABLE_DESCRIPTION_FILE, MODEL_CARD_FILE)


def write_model_card(
    folder: Path,  # folder of a saved model
    description: dict[str, Any],  # its description
    record: dict | None = None,  # record of its run
    **card_options: Any,  # arguments of `build_model_card`: `controls`, `location` and `licence`
) -> None:
    """Write the model card, unless the folder has a README that this package did not write."""
    file = folder / MODEL_CARD_FILE
    if file.is_file():
        beginning = file.read_text(encoding="utf-8", errors="replace")[:400]
        if "library_name: idp_tutorial" not in beginning:
            return
    card = build_model_card(description, record, **card_options)
    write_atomically(file, str(card).encode())


_CARD_FIELDS = {
    "validation",
    "metric",
    "steps",
    "lr",
    "params",
    "split_sizes",
    "checkpoint_selection",
}


def read_run_record(
    folder: Path | str,  # folder of a saved model
    cfg: dict[str, Any],  # config of the model, as a dictionary
) -> dict | None:  # None: there is no record, or it is of another run
    """Read the record of the run that trained a saved model."""
    file = Path(folder) / RECORD_FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        if not lines:
            return None
        record = check_record(load_record(lines[-1]), must_be_run=True)
    except ValueError as e:
        raise UserError(f"{file} has no record ({e}): delete it, or train again.") from None
    if any(record.get(name) is None for name in _CARD_FIELDS):
        return None
    if not all(isinstance(n, int) for n in record["split_sizes"].values()):
        return None  # a record of several tasks
    recorded = {name: record[name] for name in cfg if name in record}
    differences = describe_differences(config_fingerprint(recorded), config_fingerprint(cfg))
    return None if differences else record


def push_to_hub(
    folder: Path | str,  # folder of a saved model
    repo_id: str,  # name of the repository, such as 'me/tickets'; created if missing
    token: str | None = None,  # access token; None: the one that `hf auth login` stored
    revision: str | None = None,  # branch, created if missing; None: main
    private: bool | None = None,  # create a private repository
    licence: str | None = None,  # licence as the hub spells it, such as 'apache-2.0'
    controls: Sequence[dict] = (),  # records of other methods, for the model card
) -> str:  # address of the commit
    """Check a saved model and send it to the hub.

    Raises: `UserError` if it is damaged or of another version.
    """
    description, tensors = read_prompts(folder)
    check_save_format(description, folder, allow_prompt_model=True)
    if description["backbone"]["local"]:  # do not send a path of this machine
        description["cfg"] |= dict(backbone=description["backbone"]["name"])
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as tmp:
        write_prompts(Path(tmp), tensors, description)
        record = read_run_record(folder, description["cfg"])
        write_model_card(
            Path(tmp), description, record, controls=controls, location=repo_id, licence=licence
        )
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repo_id,
                folder_path=tmp,
                revision=revision,
                commit_message="A trained prompt, without its backbone",
                allow_patterns=list(HUB_FILES),
            )
        )


def resolve_model_folder(
    name: Path | str,  # a folder, or a repository such as 'me/tickets' or 'me/tickets@v2'
    revision: str | None = None,  # branch, tag or commit; None: main
    token: str | None = None,  # access token of the hub
) -> Path:
    """Return the folder of a saved model; a repository is downloaded or taken from the cache.

    Raises: `MissingFileError` if there is no such folder or repository.
    """
    folder = Path(name)
    repo, name_revision = split_revision(str(name))
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        if revision:
            raise UserError(f"{folder}: only a repository of the hub has revisions.")
        return folder
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision or name_revision,
                token=token,
                local_files_only=not is_hub_reachable(),
                allow_patterns=list(HUB_FILES),
            )
        )
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # of this machine, such as a full disk
            raise
        raise MissingFileError(
            f"there is no folder {name}, and the hub cannot be reached or has no such repository "
            f"({type(error).__name__}): give a folder with {PROMPTS_FILE}, or token= if private."
        ) from None


class SavedPrompts(NamedTuple):
    """Content of the folder of a saved model, which is read once."""

    source: Path | str  # folder or repository as the user gave it, for messages
    folder: Path  # folder on this machine
    description: dict[str, Any]  # its format and its fields are checked
    tensors: dict[str, Tensor]  # by name


def read_saved_prompts(
    source: Path | str,  # as for `resolve_model_folder`
    revision: str | None = None,  # branch, tag or commit; None: main
    token: str | None = None,  # access token of the hub
    allow_prompt_model: bool = False,  # as for `check_save_format`
) -> SavedPrompts:
    """Find and read a saved model, and check its format.

    Raises: `MissingFileError` if there is no model, `UserError` if it is damaged or of another
    version.
    """
    folder = resolve_model_folder(source, revision, token)
    description, tensors = read_prompts(folder)
    check_save_format(description, source, allow_prompt_model=allow_prompt_model)
    return SavedPrompts(source, folder, description, tensors)
