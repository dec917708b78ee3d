"""Generated records of the five SuperGLUE tasks, as the archive and as the hub have them."""

import json
import random

BENCHMARKS = ("cb", "copa", "multirc", "boolq", "wic")
FOLDERS = dict(cb="CB", copa="COPA", multirc="MultiRC", boolq="BoolQ", wic="WiC")
NLI = ("entailment", "contradiction", "neutral")
THINGS = ("cup", "stone", "boat", "letter", "lamp", "bell", "coin", "kite")


def generate_lines(name, n=24, seed=0, hub=False):
    """Generate `n` lines as the benchmark distributes them, or as the hub has them."""
    rng = random.Random(f"{name} {seed}")
    out = [globals()[f"_{name}"](rng, i + 100 * seed, hub) for i in range(n)]
    return [a for line in out for a in line] if name == "multirc" and hub else out


def _cb(rng, i, hub):
    y = i % 3
    thing = rng.choice(THINGS)
    hypothesis = (f"The {thing} fell.", f"The {thing} never moved.", f"The {thing} was a gift.")[y]
    name = rng.choice(["Ann", "Ben", "Eve"])
    return dict(
        premise=f'"Did you see it?" said {name}. The {thing} fell off shelf {i}.',
        hypothesis=hypothesis,
        label=y if hub else NLI[y],
        idx=i,
    )


def _copa(rng, i, hub):
    y = i % 2
    thing = rng.choice(THINGS)
    two = [f"Nobody saw the {thing} that day.", f"The wind pushed the {thing} hard."]
    return dict(
        premise=f"The {thing} fell off shelf {i}.",
        choice1=two[1 - y],
        choice2=two[y],
        question=("cause", "effect")[i % 2],
        idx=i,
        label=y,
    )


def _multirc(rng, i, hub):
    def question(j):
        a = rng.sample(THINGS, 4)
        right = rng.choice([(0,), (0, 1), (0, 1, 2), ()])
        return dict(
            question=f"What fell at {j} o'clock?",
            idx=3 * i + j,
            answers=[
                dict(text=f"The {x}.", idx=9 * i + k, label=int(k in right))
                for k, x in enumerate(a[: rng.choice([2, 4])])
            ],
        )

    text = f"On day {i} several things fell. " * 3
    qs = [question(j) for j in range(rng.choice([1, 2]))]
    if not hub:
        return dict(idx=i, version=1.1, passage=dict(text=text, questions=qs))
    return [
        dict(
            paragraph=text,
            question=q["question"],
            answer=a["text"],
            label=a["label"],
            idx=dict(paragraph=i, question=q["idx"], answer=a["idx"]),
        )
        for q in qs
        for a in q["answers"]
    ]


def _boolq(rng, i, hub):
    y = i % 2
    thing = rng.choice(THINGS)
    return dict(
        question=f"did the {thing} fall",
        passage=f"{thing.title()} -- On day {i} the {thing} {'fell down' if y else 'stood still'}.",
        idx=i,
        label=y if hub else bool(y),
    )


def _wic(rng, i, hub):
    y = i % 2
    word = rng.choice(("bank", "bell", "spring"))
    a = f"I saw the {word} number {i}."
    b = f"This {word} is {'also one' if y else 'something else'}, not that {word}."
    return dict(
        word=word,
        sentence1=a,
        sentence2=b,
        start1=a.index(word),
        end1=a.index(word) + len(word),
        start2=b.rindex(word),
        end2=b.rindex(word) + len(word),
        idx=i,
        label=y if hub else bool(y),
    )


def unlabelled(line):
    """Return a record without its labels, at any depth."""
    return json.loads(
        json.dumps(line), object_hook=lambda d: {k: v for k, v in d.items() if k != "label"}
    )


def hidden(rows):
    """Return records with the label -1, which the hub gives to test splits."""
    return [{**r, "label": -1} for r in rows]


def groups_of(rows):
    """Return the question of each row."""
    return [row.get("group") for row in rows]
