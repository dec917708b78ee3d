"""Long texts are cut before they are tokenized, and the tokens that are read stay the same."""

import pytest

from idp_tutorial.data.encoding import append_targets, tokenize_rows
from idp_tutorial.data.long_texts import cut_text

LONG_TEXTS = [
    "the tea was cold and the rain was loud , " * 2000,
    " " * 30_000 + "tea and rain " * 2000,
    "x" * 50_000,
    "naïve – “quoted” …\n\n\t" * 3000,
    "雨と茶" * 9000,
    "tea   " * 9000,
    "short",
]


def wordpiece():
    """Return a tokenizer that knows a few words, as BERT's: spaces and long words are dropped."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "tea", "rain", "the", "was", "and", *"abcdefx,–“”…", *"雨と茶"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["roberta", "gpt2", "wordpiece"])
@pytest.mark.parametrize("max_tokens", [1, 16, 128])
def test_a_long_text_is_cut_behind_the_tokens_that_are_read(name, max_tokens, side, bbs):
    tokenizer = wordpiece() if name == "wordpiece" else bbs(name).tokenizer

    def ids(text):
        options = dict(add_special_tokens=False, truncation=True, max_length=max_tokens)
        return tokenizer(text, **options)["input_ids"]

    before = tokenizer.truncation_side
    tokenizer.truncation_side = side
    try:
        shorter = 0
        for text in LONG_TEXTS:
            part = cut_text(text, tokenizer, max_tokens)
            assert text.startswith(part) if side == "right" else text.endswith(part)
            assert ids(part) == ids(text)
            shorter += len(part) < len(text) / 2
        assert shorter >= 3 and cut_text("short", tokenizer, max_tokens) == "short"
    finally:
        tokenizer.truncation_side = before


class Spy:
    """A tokenizer that remembers the longest text that it was given."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.longest = 0

    def __call__(self, *texts, **options):
        for given in texts:
            for text in [given] if isinstance(given, str) else given or []:
                self.longest = max(self.longest, len(text))
        return self.tokenizer(*texts, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


FORMATS = [  # tokenizer, template
    ("roberta", None),
    ("roberta", "{s1} It was {mask}"),
    ("gpt2", None),
    ("gpt2", "{s1} It was {mask}"),
]


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name,template", FORMATS)
def test_no_text_is_tokenized_whole(name, template, pair, bbs):
    """Training, prediction and the server encode with this function."""
    spy = Spy(bbs(name).tokenizer)
    word = "x" * 100_000
    row = dict(sentence1=word, sentence2=f"short {word}") if pair else dict(sentence1=word)
    if template and pair:
        template = "{s1} {s2} It was {mask}"
    (example,) = tokenize_rows([row], spy, 20, template)
    assert len(example["input_ids"]) <= 20 and 0 < spy.longest < 2000


def test_no_answer_is_tokenized_whole(bbs):
    spy = Spy(bbs("gpt2").tokenizer)
    rows = [dict(sentence1="tea", target="x" * 100_000)]
    examples = tokenize_rows(rows, spy, 20, "{s1} {mask}")
    (example,) = append_targets(examples, rows, spy, 8)
    assert len(example["input_ids"]) - example["answer_start"] == 8 and spy.longest < 2000
