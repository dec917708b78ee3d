"""The pretraining corpus without held-out text, and saving of a backbone with checksums.

Pretraining and distillation contain the method. This notebook reads the corpus that they are
applied to, and saves the result. What the training achieves is in the lab: pretraining.

The corpus consists of plain text files and, optionally, a folder of tasks: the sentences of
their *training* splits are text from the same domains as the tasks. Text of a test or
validation split is excluded wherever it occurs (`exclude_overlapping_lines`). Only the
validation rows of a few-shot folder such as `k100/` are used, because they are training rows
that were not sampled. Short texts are repeated four times, because most tasks are single
sentences. SST-2 is skipped: its training split consists of phrases, some of which are cut from
sentences in MR's test split.
"""

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from idp_tutorial.backbones.downloads import move_into_place
from idp_tutorial.reproduction.pretraining.corpus import exclude_overlapping_lines, read_lines
from idp_tutorial.utils.checks import MissingFileError
from idp_tutorial.utils.files import MANIFEST_NAME, write_manifest

__all__ = ["read_corpus", "save_backbone"]


def read_corpus(
    paths: Sequence[Path | str],  # text files for `read_lines`
    # folder with a folder for each task, which has `train`, `validation` and `test` as `.jsonl` or
    # `.jsonl.xz`; None: only the text files
    tasks: Path | str | None = None,
    skip_tasks: Sequence[str] = ("sst2",),  # tasks whose training texts are not used
    repeats: int = 4,  # how often a short text of a task is in the corpus
    max_words_to_repeat: int = 64,  # longer texts are not repeated
) -> list[str]:
    """Return all texts to train on, without those that overlap with held-out texts of the tasks.

    Raises: `MissingFileError` if a text file or the folder of tasks does not exist.
    """
    lines = list(read_lines(*paths))
    if tasks is None:
        return lines
    root = Path(tasks)
    if not root.is_dir():
        raise MissingFileError(
            f"there is no folder of tasks at {tasks}: pass a folder that contains a folder for "
            "each task, or omit `tasks`."
        )
    train, held_out = _split_task_files(root, skip_tasks)
    task_lines = list(dict.fromkeys(read_lines(*train)))
    lines = list(exclude_overlapping_lines([*lines, *task_lines], read_lines(*held_out)))
    remaining = set(lines)
    short = [
        line
        for line in task_lines
        if line in remaining and len(line.split()) <= max_words_to_repeat
    ]
    return lines + short * (repeats - 1)


def _split_task_files(root: Path, skip_tasks: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the files to train on, and those whose texts are excluded."""
    files: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for file in sorted(root.glob("**/*.jsonl*")):
        files.setdefault(file.name.split(".")[0], []).append(file)
    # the validation rows of a few-shot folder are training rows that were not sampled
    few_shot = [f for f in files["validation"] if f.parent.parent != root]
    train = [
        f for f in [*files["train"], *few_shot] if f.relative_to(root).parts[0] not in skip_tasks
    ]
    held_out = [*files["test"], *(f for f in files["validation"] if f not in few_shot)]
    return train, held_out


_DROPOUT_OPTIONS = (  # of RoBERTa's and GPT-2's configs
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
)


def save_backbone(
    model: Any,  # model of Transformers; it is not changed
    tokenizer: Any,  # tokenizer of Transformers
    folder: Path | str,  # created if needed
    dtype: torch.dtype = torch.float16,  # of the saved weights
    dropout: float = 0.1,  # dropout probability in the saved config, for fine-tuning
) -> None:
    """Write weights, config, tokenizer and checksums to a folder that `load_backbone` reads."""
    folder = Path(folder)
    copied = copy.deepcopy(model).to(dtype)
    for name in _DROPOUT_OPTIONS:
        if hasattr(copied.config, name):
            setattr(copied.config, name, dropout)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as tmp:
        new = Path(tmp)
        copied.save_pretrained(new)
        tokenizer.save_pretrained(new)
        write_manifest(new)
        # the checksums are moved last, so that a mixture of old and new files is refused
        for file in sorted(new.iterdir(), key=lambda file: file.name == MANIFEST_NAME):
            file.chmod(0o644)
            move_into_place(file, folder / file.name)
