"""Sentence patterns and word lists that generate the rows of four small text tasks.

A task that is bundled with the package needs sentences without a download, and labels that are
correct by construction. Grammars give both: the label is chosen first, then a sentence that has
it.

The vocabulary is a file that you can read and edit, `assets/lexicons.json`. In it, a string is
a list of words separated by commas, and a list contains sentence patterns with `{slots}`.
"""

import json
import re
from functools import cache
from random import Random
from typing import Any

from idp_tutorial.utils.digests import asset_path


def _split_word_lists(entry: Any) -> Any:
    """Split strings of the lexicon into lists of words, and keep lists of patterns."""
    if isinstance(entry, dict):
        return {name: _split_word_lists(value) for name, value in entry.items()}
    if isinstance(entry, list):
        return [_split_word_lists(item) if isinstance(item, dict) else item for item in entry]
    return entry.split(", ")


@cache
def load_lexicon(
    name: str,  # name of a task, a key of `assets/lexicons.json`
) -> dict[str, Any]:  # word lists and patterns by slot name
    """Load the words and sentence patterns of one task from `assets/lexicons.json`."""
    lexicons = json.loads(asset_path("lexicons.json").read_text(encoding="utf-8"))
    return _split_word_lists(lexicons[name])


def expand_pattern(
    pattern: str,  # text with `{slots}`
    words: dict,  # slot → list of words or patterns
    rng: Random,  # source of the choices
) -> str:
    """Replace every `{slot}` by a random option, until no slot is left."""
    while "{" in pattern:
        pattern = re.sub(r"{(\w+)}", lambda m: rng.choice(words[m[1]]), pattern)
    return pattern


def fix_articles_and_capitals(sentence: str) -> str:  # 'a owl. i saw it' → 'An owl. I saw it'
    """Write *an* before vowels, and capitals at the start of sentences."""
    sentence = re.sub(r"\b(a) (?=[aeiou])", r"\1n ", sentence)
    return re.sub(r"(?:^|[.?!] )[a-z]|\bi\b", lambda m: m[0].upper(), sentence)


def _make_sentiment_clause(rng: Random, label: int) -> str:
    """Generate one statement with the given sentiment, possibly by negating the opposite."""
    lexicon = load_lexicon("sentiment")
    same, other = ("good", "bad") if label else ("bad", "good")
    words = dict(lexicon)
    for kind in ("adj", "verb", "noun"):
        words[f"same_{kind}"] = lexicon[f"{same}_{kind}"]
        words[f"other_{kind}"] = lexicon[f"{other}_{kind}"]
    return expand_pattern(rng.choice(lexicon["clause"]), words, rng)


def make_sentiment_row(
    rng: Random,  # source of the choices
    label: int,  # 0 negative, 1 positive
    split: str,  # unused
) -> dict:  # `sentence1`, `label`
    """Generate a row of `sentiment`: one or two clauses; after a contrast the last one decides."""
    clauses = dict(
        clause=[_make_sentiment_clause(rng, label)],
        also=[_make_sentiment_clause(rng, label)],
        counter=[_make_sentiment_clause(rng, 1 - label)],
    )
    sentence = expand_pattern(rng.choice(load_lexicon("sentiment")["sentence"]), clauses, rng)
    return dict(sentence1=fix_articles_and_capitals(sentence), label=label)


def make_question_row(
    rng: Random,  # source of the choices
    label: int,  # index of the answer type
    split: str,  # unused
) -> dict:  # `sentence1`, `label`
    """Generate a row of `questions`, with one of TREC's six answer types (Li and Roth 2002)."""
    lexicon = load_lexicon("questions")
    kind = list(lexicon["patterns"])[label]
    distractor = rng.choice([k for k in lexicon["patterns"] if k != kind])
    pattern = rng.choice(lexicon["frames"] if rng.random() < 0.4 else lexicon["patterns"][kind])
    words = lexicon | dict(head=lexicon["heads"][kind], foil=lexicon["heads"][distractor])
    sentence = expand_pattern(pattern, words, rng)
    return dict(sentence1=fix_articles_and_capitals(sentence), label=label)


def _sample_entailment_words(rng: Random) -> dict[str, str]:  # slot → one word
    """Sample the words of an entailment pair: a kind and its members, places, numbers, people."""
    lexicon = load_lexicon("entailment")
    kind, other_kind = rng.sample(sorted(lexicon["kinds"]), 2)
    region, other_region = rng.sample(sorted(lexicon["regions"]), 2)
    member, other = rng.sample(lexicon["kinds"][kind], 2)
    a, b = rng.sample(lexicon["role"], 2)
    numbers = lexicon["numbers"]
    low, mid, high = (numbers[i] for i in sorted(rng.sample(range(len(numbers)), 3)))
    base, past = rng.choice(lexicon["deeds"]).split(":")
    more = rng.choice(lexicon["more"])
    words = dict(
        kind=kind,
        member=member,
        other=other,
        stranger=rng.choice(lexicon["kinds"][other_kind]),
        region=region,
        town=rng.choice(lexicon["regions"][region]),
        far=rng.choice(lexicon["regions"][other_region]),
        a=a,
        b=b,
        low=low,
        mid=mid,
        high=high,
        base=base,
        past=past,
        more=more,
        less=lexicon["opposite"][more][0],
    )
    for slot in ("people", "state", "done", "saw", "look", "where", "stay"):
        words[slot] = rng.choice(lexicon[slot])
    return words


def make_entailment_row(
    rng: Random,  # source of the choices
    label: int,  # 0 entailment, 1 not entailment
    split: str,  # unused
) -> dict:  # `sentence1` (premise), `sentence2` (hypothesis), `label`
    """Generate a row of `entailment`: only the premise depends on the label."""
    hypothesis, *premises = rng.choice(load_lexicon("entailment")["patterns"])
    words = _sample_entailment_words(rng)
    premise = rng.choice(premises[label])
    return dict(
        sentence1=fix_articles_and_capitals(premise.format(**words)),
        sentence2=fix_articles_and_capitals(hypothesis.format(**words)),
        label=label,
    )


def _write_similarity_sentence(
    rng: Random, subject: str, action: str, target: str, place: str
) -> str:
    """Write the four slots as one sentence, in the active or passive voice."""
    doing, done = action.split(":")
    pattern = rng.choice(load_lexicon("similarity")["patterns"])
    return fix_articles_and_capitals(
        pattern.format(who=subject, doing=doing, done=done, what=target, where=place)
    )


def make_similarity_row(
    rng: Random,  # source of the choices
    label: int,  # unused: the label is computed from the sentences
    split: str,  # unused
) -> dict:  # `sentence1`, `sentence2`, `label` 0–5 (float)
    """Generate a row of `similarity`: two sentences with some equal or synonymous slots."""
    lexicon = load_lexicon("similarity")
    scene = rng.choice(lexicon["scenes"])
    slots = [lexicon["subjects"], scene["actions"], scene["objects"], lexicon["places"]]
    differing = rng.sample(range(4), rng.randrange(5))
    first = []
    second = []
    score = 0.0
    for i, options in enumerate(slots):
        a, b = (synonyms.split(" | ") for synonyms in rng.sample(options, 2))
        x = rng.choice(a)
        y = rng.choice(b if i in differing else a)
        first.append(x)
        second.append(y)
        if i not in differing:
            score += 1 if x == y else 0.8
    return dict(
        sentence1=_write_similarity_sentence(rng, *first),
        sentence2=_write_similarity_sentence(rng, *second),
        label=round(5 * score / 4, 2),
    )
