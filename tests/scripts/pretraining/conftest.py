"""A small text, its tokenizer and its stream of token ids."""

import pytest

from idp_tutorial.data.synthetic import make_rows
from results.pretraining.corpus import (
    encode_stream,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def lines():
    return [
        r["sentence1"] for t in ("sentiment", "questions") for r in make_rows(t, "train", n=400)
    ]


@pytest.fixture(scope="module")
def tok(lines):
    return train_tokenizer(lines, 700)


@pytest.fixture(scope="module")
def stream(lines, tok):
    return encode_stream(lines, tok)
