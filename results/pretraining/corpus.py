"""The pretraining corpus: raw text without held-out text, tokenizer, stream of ids, windows.

A bundled backbone is pretrained on plain text. A file contains one document per line, plain or
compressed (`.xz`); of a task's `.jsonl` the sentences are read.

The corpus consists of plain text files and, optionally, a folder of tasks: the sentences of
their *training* splits are text from the same domains as the tasks. Text of a test or
validation split is excluded wherever it occurs (`exclude_overlapping_lines`). Only the
validation rows of a few-shot folder such as `k100/` are used, because they are training rows
that were not sampled. Short texts are repeated four times, because most tasks are single
sentences. SST-2 is skipped: its training split consists of phrases, some of which are cut from
sentences in MR's test split.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, ByteLevelBPETokenizer, processors

from idp_tutorial.data.file_readers import iterate_lines, parse_json_object
from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.digests import (
    MANIFEST_NAME,
    compute_digest,
    find_damaged_file,
    write_manifest,
)
from idp_tutorial.utils.durable_files import folder_lock, write_atomically


def read_lines(
    *paths: Path | str,  # text files with a document per line, or `.jsonl` of task rows; also `.xz`
) -> Iterator[str]:
    """Yield the non-empty lines of text files, and the sentences of task rows, stripped."""
    for path in map(Path, paths):
        if not path.is_file():
            raise MissingFileError(
                f"no text file at {path}: pass text files with one document a line (.txt, .jsonl; "
                "also .xz)."
            )
        if {".csv", ".tsv", ".parquet", ".json"} & {*path.suffixes}:
            raise UserError(
                f"{path} is a table, whose labels and quotes would be trained on as text. Write "
                "only its texts to a .txt, one a line, or to a .jsonl as sentence1."
            )
        for i, line in iterate_lines(path):
            if not line.strip():
                continue
            if ".jsonl" in path.suffixes:
                where = f"{path}, line {i}"
                yield from _iterate_sentences(parse_json_object(line, where), where)
            else:
                yield line.strip()


def _iterate_sentences(row: dict, where: str) -> Iterator[str]:
    for column in ("sentence1", "sentence2"):
        text = row.get(column)
        if text is not None and not isinstance(text, str):
            raise UserError(f"{where}: {column!r} must be a text, got {text!r:.60}.")
        if text and text.strip():
            yield text.strip()


_OVERLAP_LENGTH = 12  # consecutive words that a training text may not share with a held-out one


def _ngram_hashes(text: str) -> set[int]:
    """Return hashes of all sequences of `_OVERLAP_LENGTH` words, or of a text that is shorter.

    Words are compared in lower case and without punctuation.
    """
    n = _OVERLAP_LENGTH
    words = re.sub(r"[^\w ]|_", "", text.lower()).split()
    if not words:
        return set()
    return {hash(" ".join(words[i : i + n])) for i in range(max(1, len(words) - n + 1))}


def exclude_overlapping_lines(
    lines: Iterable[str],  # texts to train on
    held_out: Iterable[str],  # texts that must not be trained on
) -> Iterator[str]:
    """Yield the lines that share no sequence of twelve words with any held-out text."""
    held_out_hashes = set().union(*map(_ngram_hashes, held_out))
    for line in lines:
        if not _ngram_hashes(line) & held_out_hashes:
            yield line


SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def read_corpus(
    paths: Sequence[Path | str],  # text files for `read_lines`
    # folder with a folder for each task, which has `train`, `validation` and `test` as `.jsonl` or
    # `.jsonl.xz`; None: only the text files
    tasks: Path | str | None = None,
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
    train, held_out = _split_task_files(root)
    task_lines = list(dict.fromkeys(read_lines(*train)))
    lines = list(exclude_overlapping_lines([*lines, *task_lines], read_lines(*held_out)))
    remaining = set(lines)
    short = [line for line in task_lines if line in remaining and len(line.split()) <= 64]
    return lines + short * 3  # four times in all


def _split_task_files(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the files to train on, and those whose texts are excluded."""
    files: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for file in sorted(root.glob("**/*.jsonl*")):
        files.setdefault(file.name.split(".")[0], []).append(file)
    # the validation rows of a few-shot folder are training rows that were not sampled
    few_shot = [f for f in files["validation"] if f.parent.parent != root]
    train = [*files["train"], *few_shot]
    train = [file for file in train if file.relative_to(root).parts[0] != "sst2"]
    held_out = [*files["test"], *(f for f in files["validation"] if f not in few_shot)]
    return train, held_out


LABEL_WORDS = [  # words of the verbalizers, which should be single tokens
    *("terrible", "great", "negative", "positive", "subjective", "objective", "bad", "good"),
    *("description", "entity", "expression", "human", "location", "number", "abbreviation"),
    *("person", "place", "yes", "no", "maybe", "true", "false", "right", "wrong"),
    *("similar", "different"),
]


def train_tokenizer(
    lines: Iterable[str],
    vocab_size: int = 8192,
) -> Any:
    """Return an uncased byte-level BPE `PreTrainedTokenizerFast`, trained on texts.

    It encodes a text as `<s> A </s>` and a pair as `<s> A </s></s> B </s>`, as RoBERTa's does.
    A word of a verbalizer (`LABEL_WORDS`) is one token with a leading space.
    """
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer(add_prefix_space=True, lowercase=True, unicode_normalizer="nfkc")
    special_tokens = [*SPECIAL_TOKENS[:4], AddedToken("<mask>", lstrip=True, special=True)]
    frequent_words = (" ".join([word] * 2000) for word in LABEL_WORDS)
    bpe.train_from_iterator(
        chain(lines, frequent_words), vocab_size, show_progress=False, special_tokens=special_tokens
    )
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
        model_max_length=256,
    )


def encode_stream(
    lines: Iterable[str],
    tokenizer: Any,  # a tokenizer of Transformers with `eos_token_id`
) -> np.ndarray:
    """Return the token ids of all documents as one stream `[N]`, with `</s>` after each."""
    lines = list(lines)
    encoded = []
    for i in range(0, len(lines), 1000):
        for ids in tokenizer(lines[i : i + 1000], add_special_tokens=False)["input_ids"]:
            encoded.append(np.array([*ids, tokenizer.eos_token_id], np.uint16))
    return np.concatenate(encoded) if encoded else np.zeros(0, np.uint16)


def draw_windows(
    n: int,  # length of the stream
    tokens: int,  # token ids in a batch, B·T
    rng: np.random.Generator,
    lengths: Sequence[int] = (32, 64, 128, 256),  # possible lengths T of a window
    p: Sequence[float] = (0.25, 0.4, 0.25, 0.1),  # probability of each length
) -> np.ndarray:
    """Return the positions of `tokens // T` random windows of one random length T `[B,T]`."""
    T = min(int(rng.choice(lengths, p=p)), n)
    return rng.integers(0, n - T + 1, max(1, tokens // T))[:, None] + np.arange(T)


def gather_windows(
    stream: np.ndarray,  # token ids `[N]`
    positions: np.ndarray,  # positions of windows in the stream `[B,T]`
) -> torch.Tensor:
    """Return the token ids of windows `[B,T]`, the first of each replaced by `<s>`."""
    ids = torch.from_numpy(stream[positions].astype(np.int64))
    ids[:, 0] = SPECIAL_TOKENS.index("<s>")
    return ids


EncodeFunction = Callable[[list[str], Any], dict[str, np.ndarray]]


def _write_tokenizer_and_streams(
    lines: list[str], out: Path, vocab_size: int, seed: int, encode: EncodeFunction | None
) -> None:
    """Shuffle the documents, and write tokenizer and arrays."""
    lines = [lines[i] for i in np.random.default_rng(seed).permutation(len(lines))]
    tokenizer = train_tokenizer(lines[:60_000], vocab_size)
    tokenizer.save_pretrained(out / "tokenizer")
    counts = Counter(lines)
    lines.sort(key=lambda line: counts[line] == 1)
    if encode is None:
        arrays = dict(stream=encode_stream(lines, tokenizer))
    else:
        arrays = encode(lines, tokenizer)
    for name, array in arrays.items():
        np.save(out / f"{name}.npy", array)


def prepare_text(
    lines: list[str],
    out: Path | str,  # folder; its files are reused if they are from the same lines and settings
    vocab_size: int = 8192,
    seed: int = 0,  # of the order of the documents
    # function (lines, tokenizer) -> arrays by name, one of them `stream`; None: only the stream
    encode: EncodeFunction | None = None,
) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a tokenizer, trained on 60,000 shuffled documents, and the arrays of all documents.

    Raises: `UserError` if the folder holds other text.
    """
    from transformers import PreTrainedTokenizerFast

    out = Path(out)
    description = dict(
        documents=len(lines),
        characters=sum(map(len, lines)),
        vocab=vocab_size,
        seed=seed,
        encode=encode is not None,
        digest=compute_digest(line.encode(errors="surrogatepass") + b"\n" for line in lines),
    )
    description_file = out / "text.json"
    with folder_lock(out, "text", wait=True):
        if description_file.exists():
            _check_description(description_file, description)
            has_manifest = (out / MANIFEST_NAME).is_file()
            damaged = find_damaged_file(out) if has_manifest else MANIFEST_NAME
            if damaged:
                message = f"{out / damaged} is damaged or missing: the text is prepared again."
                warnings.warn(message, stacklevel=2)
                description_file.unlink()
        if not description_file.exists():
            _write_tokenizer_and_streams(lines, out, vocab_size, seed, encode)
            write_manifest(out, "*.npy", "tokenizer/*")
            write_atomically(description_file, json.dumps(description).encode())
    try:
        arrays = {file.stem: np.load(file, mmap_mode="r") for file in sorted(out.glob("*.npy"))}
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "tokenizer")
    except Exception as e:  # tokenizers and NumPy raise many kinds; the files have been compared
        raise UserError(
            f"the prepared text in {out} cannot be read ({type(e).__name__}): delete the folder to "
            "prepare it again."
        ) from e
    _check_arrays(arrays, len(tokenizer), encode is not None, out)
    return tokenizer, arrays


def _check_arrays(
    arrays: dict[str, np.ndarray], vocab_size: int, is_aligned: bool, out: Path
) -> None:
    """Check that the arrays of a folder are streams of token ids that the tokenizer has."""
    stream = arrays.get("stream")
    names = {"stream", "teacher", "start", "stop"} if is_aligned else {"stream"}
    fits = names <= arrays.keys() and all(
        array.ndim == 1 and array.dtype.kind in "iu" for array in arrays.values()
    )
    if fits and stream is not None and len(stream):
        fits = stream.min() >= 0 and stream.max() < vocab_size
    if fits and is_aligned and stream is not None:
        start, stop, n = arrays["start"], arrays["stop"], len(arrays["teacher"])
        fits = len(start) == len(stop) == len(stream)
        fits = fits and bool((start >= 0).all() and (start < stop).all() and (stop <= n).all())
    if not fits:
        raise UserError(
            f"the arrays in {out} are not streams of token ids of its tokenizer: delete the folder "
            "to prepare the text again."
        )


def _check_description(file: Path, description: dict) -> None:
    """Raise `UserError` if a folder was prepared from other text or with other settings."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UserError(f"{file} is damaged: delete it to prepare the text again.") from None
    if saved != description:
        raise UserError(
            f"{file.parent} holds other text ({saved!s:.300}; this run has {description}). Use "
            "another folder, or delete it."
        )
