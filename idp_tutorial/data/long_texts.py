"""Cut long texts before they are tokenized, since a model reads their first tokens only.

A tokenizer reads all of a text before it truncates its tokens: of a word of 20 MB for minutes, in
gigabytes of memory.
"""

import re
from collections.abc import Sequence
from typing import Any

_MARGIN = 8  # tokens before the cut that may differ from those of the whole text
_CHARACTERS_PER_TOKEN = 16  # of the first part that is tried; most tokens have fewer
_LONGEST_WORD = 1000  # characters in which a space is looked for


def _shorten(text: str, n_characters: int, is_beginning: bool) -> str:
    """Return the beginning or the end of a text, up to a space if there is one near."""
    if is_beginning:
        space = re.compile(r"\s").search(text, n_characters, n_characters + _LONGEST_WORD)
        return text[: space.start() if space else n_characters + _LONGEST_WORD]
    first = max(0, len(text) - n_characters - _LONGEST_WORD)
    spaces = [*re.compile(r"\s").finditer(text, first, len(text) - n_characters)]
    return text[spaces[-1].end() if spaces else first :]


def cut_text(
    text: str,
    tokenizer: Any,  # a tokenizer of transformers
    max_tokens: int,  # number of tokens that the model reads
    side: str | None = None,  # side that is cut, 'right' or 'left'; None: the tokenizer's
) -> str:  # the text, or its beginning; its end if the left side is cut
    """Cut a text so that the `max_tokens` tokens that are read stay the same.

    It is cut at a space after these tokens, so that the tokenizer need not read all of it. (Of two
    texts of a pair that are both too long, one may lose a token more than the other, since the
    tokenizer gives the odd token to the longer one.)
    """
    is_beginning = (side or getattr(tokenizer, "truncation_side", "right")) == "right"
    needed = max_tokens + _MARGIN
    n_characters = _CHARACTERS_PER_TOKEN * needed
    while n_characters < len(text):
        part = _shorten(text, n_characters, is_beginning)
        encoding = tokenizer(part, add_special_tokens=False, truncation=True, max_length=needed)
        if len(encoding["input_ids"]) == needed:
            return part
        n_characters *= 4
    return text


def cut_rows(
    rows: Sequence[dict],  # rows with `sentence1`, perhaps `sentence2`
    tokenizer: Any,  # a tokenizer of transformers
    max_tokens: int,  # number of tokens that the model reads
) -> list[dict]:
    """Return the rows with their texts cut by `cut_text`."""
    longest = _CHARACTERS_PER_TOKEN * (max_tokens + _MARGIN)
    cut = []
    for row in rows:
        columns = [c for c in ("sentence1", "sentence2") if len(row.get(c) or "") > longest]
        cut.append({**row, **{c: cut_text(row[c], tokenizer, max_tokens) for c in columns}})
    return cut
