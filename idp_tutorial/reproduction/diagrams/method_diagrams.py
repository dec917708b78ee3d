"""Diagrams of where a prompt enters a frozen model and what it is generated from.

The words are at the bottom, below the layers. Each layer shows the positions that it processes,
so a prompt that enters at `layer` 2, after two layers, is drawn in the layer with two layers
below it. What a prompt is generated from, `generator_input`, is one of these:
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from idp_tutorial.reproduction.diagrams.drawing import Box, Line, Picture, Shape, Text, wrap_text
from idp_tutorial.utils.checks import check_choice

__all__ = [
    "Layer",
    "draw_prompted_model",
    "draw_plan",
    "draw_methods_map",
]


GENERATOR_INPUTS = {
    "none": "the same for every text",
    "first_state": "generated from the hidden state of the first position",
    "all_states": "generated from the hidden states of all positions",
    "words": "generated from the word vectors",
    "first_pass": "generated from a first pass without a prompt",
}
OPERATION_LABELS = {
    "insert": "new positions",
    "add": "added to the prompt positions",
    "replace": "replaces the prompt positions",
    "kv": "keys and values",
}
EXAMPLE_WORDS = ("<s>", "soup", "was", "cold")
DIAGRAM_WIDTH = 204
SQUARE_SIZE = 18  # width of a position
FIRST_WORD_X = 68  # left edge of the first word's column
WORD_SPACING = 31  # distance between two words
Layer = int | str  # a layer, or 'words'


def _compute_heights(
    layers: int, operations: dict, generator_inputs: dict, head_y: float
) -> tuple[dict, float]:
    """Return the y coordinates of the parts from the head down, and the height of the diagram.

    The keys are the layers, `('below', layer)` for a generator, 'head', 'embeddings' and
    'word_generator'; 'layer_height' is a height.
    """
    layer_height = 24 if layers <= 8 else max(8, 190 / layers)
    heights: dict = dict(layer_height=layer_height, head=head_y)
    y = head_y + 36
    reads_words_below = any(generator_inputs[k] == "words" != k for k in operations)
    for k in reversed(range(layers)):
        heights[k] = y
        y += layer_height + 4
        has_generator = generator_inputs.get(k) in ("first_state", "all_states", "first_pass")
        if has_generator or (k == 0 and reads_words_below):
            heights["below", k] = y
            y += 30
    heights["embeddings"] = y + 2
    is_words_generated = generator_inputs.get("words", "none") != "none"
    heights["word_generator"] = y + 44 if is_words_generated else None
    return heights, y + 46 + 26 * is_words_generated


def _column_centre(i: int) -> float:
    """Return the x coordinate of a column: 0, 1, … are the words, -2 and -1 the prompt."""
    if i >= 0:
        return FIRST_WORD_X + i * WORD_SPACING + WORD_SPACING / 2
    return FIRST_WORD_X - 5 + (i + 0.5) * 22


def _draw_prompt(
    y: float, operation: str | None, kind: str, size: float = SQUARE_SIZE
) -> Iterator[Shape]:
    """Draw two prompt vectors: squares, or two halves each for keys and values."""
    halves = [(y, 0.42 * size), (y + 0.58 * size, 0.42 * size)]
    parts = halves if operation == "kv" else [(y, size)]
    for i in (-2, -1):
        for top, height in parts:
            yield Box(_column_centre(i) - SQUARE_SIZE / 2, top, SQUARE_SIZE, height, kind)
        if operation == "add" and size == SQUARE_SIZE:
            text_kind = "label" if kind.startswith("generated") else "on"
            yield Text(_column_centre(i), y + SQUARE_SIZE - 4.5, "+", text_kind)


def _draw_layers(
    layers: int,
    words: Sequence[str],
    operations: dict,
    heights: dict,
    generator_inputs: dict,
    colour_suffix: str,
) -> Iterator[Shape]:
    """Draw the layers with their positions, and the words below them."""
    has_prompt = "words" in operations
    layer_height = heights["layer_height"]
    size = min(SQUARE_SIZE, layer_height - 4)
    kinds = {
        k: "trained" if generator_inputs[k] == "none" else "generated" + colour_suffix
        for k in operations
    }
    for k in range(layers):
        y = heights[k] + (layer_height - size) / 2
        operation = operations.get(k)
        left_x = FIRST_WORD_X if "kv" in operations.values() else 14
        yield Box(left_x, heights[k], DIAGRAM_WIDTH - 16 - left_x, layer_height, "layer")
        for i in range(len(words)):
            yield Box(_column_centre(i) - SQUARE_SIZE / 2, y, SQUARE_SIZE, size, "position")
        if operation or has_prompt:
            yield from _draw_prompt(y, operation, kinds.get(k, "propagated" + colour_suffix), size)
        has_prompt = has_prompt or operation == "insert"
    y = heights["embeddings"]
    for i, word in enumerate(words):
        yield Box(_column_centre(i) - SQUARE_SIZE / 2, y, SQUARE_SIZE, SQUARE_SIZE, "position")
        yield Text(_column_centre(i), y + SQUARE_SIZE + 14, word)
    if "words" in operations:
        yield from _draw_prompt(y, operations["words"], kinds["words"])


def _draw_generator_output(
    layer: Layer, generator_input: str, heights: dict, left_x: float, y: float
) -> Line:
    """Draw the arrow from a generator to its prompt."""
    if generator_input == "words" and layer not in ("words", 0):
        side = heights[layer] + heights["layer_height"] / 2
        end = (_column_centre(-2) - SQUARE_SIZE / 2, side)
        return Line(((left_x, y + 9.5), (4, y + 9.5), (4, side), end))
    middle = (_column_centre(-2) + _column_centre(-1)) / 2
    if layer == "words":
        return Line(((middle, y), (middle, heights["embeddings"] + SQUARE_SIZE)))
    return Line(((middle, y), (middle, heights[layer] + heights["layer_height"] - 3)))


def _draw_generator(
    layer: Layer,
    label: str,
    generator_input: str,
    words: Sequence[str],
    heights: dict,
    word_weights: Sequence[float] | None,
) -> Iterator[Shape]:
    """Draw the network that generates the prompt of one layer, and its arrows."""
    left_x = 14
    if layer == "words":
        y = heights["word_generator"]
    else:
        y = heights["below", 0 if generator_input == "words" else layer] + 5
    yield Box(left_x, y, 42, 19, "trained")
    yield Text(left_x + 21, y + 14, label, "on")
    yield _draw_generator_output(layer, generator_input, heights, left_x, y)
    right = left_x + 43
    if generator_input == "first_pass" or layer == "words":
        input_label = "M(x)" if generator_input == "first_pass" else "words"
        yield Box(FIRST_WORD_X + 8, y, 50, 19, "chip")
        yield Text(FIRST_WORD_X + 33, y + 14, input_label)
        yield Line(((FIRST_WORD_X + 8, y + 9.5), (right, y + 9.5)))
        return
    reads_embeddings = layer == 0 or generator_input == "words"
    source_y = heights["embeddings"] if reads_embeddings else heights[int(layer) - 1]
    for i in range(len(words) if generator_input in ("all_states", "words") else 1):
        width = 1.8 if word_weights is None else 0.6 + 6 * word_weights[i]
        x = _column_centre(i)
        yield Line(((x, source_y), (x, y + 9.5), (right + 8, y + 9.5)), "read", False, width)
    yield Line(((right + 14, y + 9.5), (right, y + 9.5)))


def _draw_head(
    label: str, prediction: str, position: int, top: float, y: float, is_frozen: bool
) -> Iterator[Shape]:
    """Draw the head above the position that it reads, and its prediction."""
    centre = _column_centre(position)
    is_left = position < 2
    x = max(centre - 29, 14) if is_left else centre - 42
    yield Line(((centre, top), (centre, y + 21)), "state")
    yield Box(x, y, 58, 20, "chip" if is_frozen else "trained")
    yield Text(x + 29, y + 14.5, label, "label" if is_frozen else "on")
    if prediction and is_left:
        yield Text(x + 66, y + 14.5, prediction, "label", "start")
    elif prediction:
        yield Text(x - 8, y + 14.5, prediction, "label", "end")


def _draw_shared_generator(generated: list, heights: dict) -> Iterator[Shape]:
    """Draw brackets that connect generators which are one network."""
    ys = []
    for k in generated:
        y = heights["word_generator"] if k == "words" else heights["below", k] + 5
        ys.append(y + 9.5)
    lowest = max(ys)
    for y in ys:
        if y < lowest:
            yield Line(((15, lowest), (9, lowest), (9, y), (15, y)), "read", False, 3)


def _draw_gradient(operations: dict, heights: dict) -> Line:
    """Draw the line from the head down to the lowest trained part."""
    if "words" in operations:
        low = heights["embeddings"] + SQUARE_SIZE
    elif operations:
        low = heights[min(operations)] + heights["layer_height"]
    else:
        low = heights["head"] + 20
    x = DIAGRAM_WIDTH - 7
    return Line(((x, heights["head"] + 2), (x, low - 2)), "grad", False, 4)


def draw_prompted_model(
    layers: int,  # number of layers of the frozen model
    operations: dict | None = None,  # {layer or 'words': 'insert', 'add', 'replace' or 'kv'}
    generator_input: str | Mapping = "none",  # key of `GENERATOR_INPUTS`, or {layer: such a key}
    title: str = "",  # title of the diagram
    note: str = "",  # one or two lines below the title
    words: Sequence[str] = EXAMPLE_WORDS,  # the tokens of the text
    head_label: str | None = "head",  # name of the head; None: no head is drawn
    prediction: str = "",  # text beside the head
    head_position: int = 0,  # position of the word that the head reads; -1: the last
    is_head_frozen: bool = False,  # the head is frozen, too, as the words of a vocabulary
    generator_labels: Mapping | None = None,  # {layer: name of its generator}; None: 'G'
    is_generator_shared: bool = False,  # all layers share one generator
    word_weights: Sequence[float] | None = None,  # weight of each word, drawn as width of its arrow
    colour_suffix: str = "",  # '-q': generated prompts in a second colour, for a second text
) -> Picture:
    """Draw a frozen model with its prompts, their generators and the reach of the gradient."""
    operations = operations or {}
    inputs: dict[Layer, str] = {}
    for k in operations:
        if isinstance(generator_input, str):
            inputs[k] = generator_input
        else:
            inputs[k] = generator_input.get(k, "none")
        check_choice(inputs[k], GENERATOR_INPUTS, "generator_input")
    note_lines = wrap_text(note, DIAGRAM_WIDTH - 10, "note")
    heights, total = _compute_heights(layers, operations, inputs, 31 + 15 * len(note_lines))
    shapes: list[Shape] = [Text(10, 17, title, "title", "start")]
    for i, line in enumerate(note_lines):
        shapes.append(Text(10, 34 + 15 * i, line, "note", "start"))
    shapes += _draw_layers(layers, words, operations, heights, inputs, colour_suffix)
    generated = [k for k in operations if inputs[k] != "none"]
    if is_generator_shared:
        shapes += _draw_shared_generator(generated, heights)
    for k in generated:
        label = (generator_labels or {}).get(k, "G")
        shapes += _draw_generator(k, label, inputs[k], words, heights, word_weights)
    if head_label:
        position = head_position % len(words)
        top = heights[layers - 1]
        shapes += _draw_head(head_label, prediction, position, top, heights["head"], is_head_frozen)
    is_head_trained = bool(head_label) and not is_head_frozen
    if operations or is_head_trained:
        shapes.append(_draw_gradient(operations, heights))
    alt = _describe_diagram(layers, operations, inputs, title, is_head_trained)
    anchors = {name: (14, y) for name, y in heights.items() if y}
    return Picture(shapes, DIAGRAM_WIDTH, total, title, alt, anchors)


def _describe_diagram(
    layers: int, operations: dict, generator_inputs: dict, title: str, is_head_trained: bool
) -> str:
    """Return the alternative text of a diagram."""
    if not operations:
        head = "a trained head" if is_head_trained else "no trained head"
        return f"{title}: a frozen model of {layers} layers without a prompt, {head}."
    places = ["among the words"] if "words" in operations else []
    upper = [k for k in operations if k != "words"]
    if len(upper) == layers:
        places.append("before every layer")
    elif upper:
        places.append(f"before layer {', '.join(map(str, upper))}")
    labels = ", then ".join(dict.fromkeys(OPERATION_LABELS[op] for op in operations.values()))
    sources = ", then ".join(dict.fromkeys(GENERATOR_INPUTS[i] for i in generator_inputs.values()))
    first = 0 if "words" in operations else min(upper)
    return (
        f"{title}: a prompt {' and '.join(places)} ({labels}), {sources}; "
        f"gradient through {layers - first} of {layers} layers."
    )


def draw_plan(
    plan: Mapping,  # {layer: `Step`}, as a method builds it
    backbone: Any,  # its number of layers is drawn
    generator_input: str | Mapping = "none",  # key of `GENERATOR_INPUTS`, or {layer: such a key}
    title: str = "a plan",  # title of the diagram
    note: str = "",  # one or two lines below the title
    **kwargs: Any,  # further arguments of `draw_prompted_model`
) -> Picture:
    """Draw a frozen model with the prompts of a plan."""
    operations = {k: step.op for k, step in plan.items()}
    return draw_prompted_model(
        backbone.n_layers, operations, generator_input, title, note, **kwargs
    )


INSERTION_LABELS = {
    "input": "at the input",
    "layers": "every layer",
    "keys": "every layer",
    "middle": "half-way",
}
SOURCE_LABELS = {
    "static": "the same vectors for every text",
    "generated": "generated for each text, in the same pass",
    "second pass": "generated for each text, after a first pass",
}
_PROMPTED_LAYERS = {"at the input": [0], "every layer": [1, 2, 3], "half-way": [2]}


def _draw_small_model(x: float, prompted_layers: Sequence[int]) -> list[Shape]:
    """Draw three layers above the words (layer 0), with squares where a prompt enters."""
    shapes: list[Shape] = [Box(x, 46 - 12 * k, 76, 10, "layer") for k in (1, 2, 3)]
    shapes += [Box(x + 30 + 12 * i, 47, 8, 8, "position") for i in range(3)]
    for k in prompted_layers:
        shapes += [Box(x + 4 + 12 * i, 47 - 12 * k, 8, 8, "trained") for i in (0, 1)]
    return shapes


def _draw_map_row(
    methods: Mapping, kind: str, columns: Mapping[str, float], y: float, width: float
) -> tuple[list[Shape], float]:
    """Draw the methods with one kind of source; return the shapes and the height of the row."""
    cells: dict[str, list[str]] = {column: [] for column in columns}
    for name, method in methods.items():
        column = INSERTION_LABELS.get(method.insertion_point)
        if method.kind == kind and column:
            cells[column].append(name)
    height = 34 + 17 * max(map(len, cells.values()))
    shapes: list[Shape] = [
        Box(6, y, width - 12, height - 6, "layer"),
        Text(14, y + 17, SOURCE_LABELS[kind], "note", "start"),
    ]
    for column, names in cells.items():
        for j, name in enumerate(names):
            shapes.append(Text(columns[column], y + 35 + 17 * j, name, "label", "start"))
    return shapes, height


def draw_methods_map(
    methods: Mapping,  # {name: a row with `insertion_point` and `kind`}, such as `METHODS`
    title: str = "All methods on two axes",  # title of the picture
) -> Picture:
    """Draw a table of methods: their sources (rows) and where their prompts enter (columns)."""
    w = 424
    columns = {c: 14 + i * 136 for i, c in enumerate(dict.fromkeys(INSERTION_LABELS.values()))}
    shapes: list[Shape] = []
    for column, x in columns.items():
        shapes += _draw_small_model(x, _PROMPTED_LAYERS[column])
        shapes.append(Text(x, 78, column, "title", "start"))
    y = 90.0
    for kind in SOURCE_LABELS:
        row, height = _draw_map_row(methods, kind, columns, y, w)
        shapes += row
        y += height
    promptless = [name for name, method in methods.items() if method.kind not in SOURCE_LABELS]
    lines = wrap_text("no prompt: " + ", ".join(promptless), w - 28, "note")
    for i, line in enumerate(lines):
        shapes.append(Text(14, y + 14 + 17 * i, line, "note", "start"))
    described = []
    for name, method in methods.items():
        if method.kind in SOURCE_LABELS:
            insertion = INSERTION_LABELS[method.insertion_point]
            described.append(f"{name}: {SOURCE_LABELS[method.kind]}, {insertion}")
    alt = f"{title}. {'; '.join(described)}. Without a prompt: {', '.join(promptless)}."
    return Picture(shapes, w, y + 20 + 17 * len(lines), title, alt)
