"""A sequence that stores tokenized examples in flat arrays, in less memory than a list.

The token ids of all examples are concatenated in one array, and the token type ids in another.
A value that an example has once, such as its label, is stored in a list. Indexing returns a
dictionary with the same values as before, so code that reads examples does not change.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["TOKEN_DTYPES", "PackedExamples", "pack_examples"]


TOKEN_DTYPES = {"input_ids": np.int32, "token_type_ids": np.int16}  # columns with a value a token


class PackedExamples(Sequence):
    """Sequence of examples that are stored in flat arrays; `packed[i]` is a dictionary."""

    def __init__(
        self,
        names: list[str],  # column names of an example, in their order
        flat: dict[str, np.ndarray],  # column name → values of all tokens of all examples
        columns: dict[str, list],  # column name → one value an example
        ends: np.ndarray,  # index after the last token of each example
    ):
        self.column_names = names
        self.token_arrays = flat
        self.columns = columns
        self.ends = ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        start = self.ends[i - 1] if i else 0
        end = self.ends[i]
        example = {}
        for name in self.column_names:
            if name in self.token_arrays:
                example[name] = self.token_arrays[name][start:end].tolist()
            else:
                example[name] = self.columns[name][i]
        return example

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(a == b for a, b in zip(self, other))
        )


def _can_be_packed(example: dict, names: list[str]) -> bool:
    """Return whether an example has the given columns and only values that arrays can store."""
    is_plain = all(
        name in TOKEN_DTYPES or value is None or isinstance(value, (int, float, str))
        for name, value in example.items()
    )
    same_length = len(example["input_ids"]) == len(example["token_type_ids"])
    return [*example] == names and is_plain and same_length


def pack_examples(
    encode_fn: Callable,  # converts rows to examples with `input_ids` and `token_type_ids`
    rows: Sequence,  # rows of a split
    chunk_size: int = 2000,  # number of rows encoded at once; up to this number a list is returned
) -> Sequence:  # `PackedExamples`, or a list
    """Encode rows chunk by chunk into flat arrays, or into a list if arrays cannot store them."""
    if len(rows) <= chunk_size:
        return encode_fn(rows)
    flat: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_DTYPES}
    columns: dict[str, list] = {}
    lengths: list[int] = []
    names: list[str] = []
    for i in range(0, len(rows), chunk_size):
        examples = encode_fn(rows[i : i + chunk_size])
        names = names or [*examples[0]]
        if not all(_can_be_packed(e, names) for e in examples):
            return encode_fn(rows)
        for name, dtype in TOKEN_DTYPES.items():
            flat[name].append(np.array([v for e in examples for v in e[name]], dtype))
        for name in names:
            if name not in TOKEN_DTYPES:
                columns.setdefault(name, []).extend(e[name] for e in examples)
        lengths += [len(e["input_ids"]) for e in examples]
    token_arrays = {name: np.concatenate(chunks) for name, chunks in flat.items()}
    return PackedExamples(names, token_arrays, columns, np.cumsum(lengths))
