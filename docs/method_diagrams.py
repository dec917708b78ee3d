"""Diagrams of where a prompt enters a frozen model and what it is generated from.

The words are at the bottom, below the layers. Each layer shows the positions that it processes,
so a prompt that enters at `layer` 2, after two layers, is drawn in the layer with two layers
below it. The prompt is in front of the first token or after it, as in the plan. What a prompt is
generated from, `generator_input`, is one of these:
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drawing import Box, Line, Picture, Shape, Text, wrap_text

from idp_tutorial.core.context import INPUT
from idp_tutorial.core.steps import Insert
from idp_tutorial.utils.checks import check_choice

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
    reads_words_below = any(k != INPUT and generator_inputs[k] == "words" for k in operations)
    for k in reversed(range(layers)):
        heights[k] = y
        y += layer_height + 4
        has_generator = generator_inputs.get(k) in ("first_state", "all_states", "first_pass")
        if has_generator or (k == 0 and reads_words_below):
            heights["below", k] = y
            y += 30
    heights["embeddings"] = y + 2
    is_words_generated = generator_inputs.get(INPUT, "none") != "none"
    heights["word_generator"] = y + 44 if is_words_generated else None
    return heights, y + 46 + 26 * is_words_generated


@dataclass(frozen=True)
class _Layout:
    """The parts of a diagram, and the coordinates of tokens, prompt vectors and generators."""

    layers: int
    words: Sequence[str]
    operations: dict[int, str]
    generator_inputs: dict[int, str]
    heights: dict  # from `_compute_heights`
    n_before: int  # number of tokens in front of the prompt: 0 or 1

    def token(self, i: int) -> float:
        """Return the centre of a token."""
        if i < self.n_before:
            return 27
        return FIRST_WORD_X + i * WORD_SPACING + WORD_SPACING / 2

    def prompt(self, i: int) -> float:
        """Return the centre of the first (0) or second (1) prompt vector."""
        return (57 if self.n_before else 30) + 22 * i

    @property
    def generator(self) -> float:
        """Return the centre of a generator, which is below the prompt."""
        return (self.prompt(0) + self.prompt(1)) / 2 if self.n_before else 35


GENERATOR_WIDTH = 42


def _draw_prompt(
    layout: _Layout, y: float, operation: str | None, kind: str, size: float = SQUARE_SIZE
) -> Iterator[Shape]:
    """Draw two prompt vectors: squares, or two halves each for keys and values."""
    halves = [(y, 0.42 * size), (y + 0.58 * size, 0.42 * size)]
    parts = halves if operation == "kv" else [(y, size)]
    for i in (0, 1):
        x = layout.prompt(i)
        for top, height in parts:
            yield Box(x - SQUARE_SIZE / 2, top, SQUARE_SIZE, height, kind)
        if operation == "add" and size == SQUARE_SIZE:
            text_kind = "label" if kind == "generated" else "on"
            yield Text(x, y + SQUARE_SIZE - 4.5, "+", text_kind)


def _draw_layers(layout: _Layout) -> Iterator[Shape]:
    """Draw the layers with their positions, and the words below them."""
    operations = layout.operations
    heights = layout.heights
    has_prompt = INPUT in operations
    layer_height = heights["layer_height"]
    size = min(SQUARE_SIZE, layer_height - 4)
    kinds = {}
    for k, generator_input in layout.generator_inputs.items():
        kinds[k] = "trained" if generator_input == "none" else "generated"
    for k in range(layout.layers):
        y = heights[k] + (layer_height - size) / 2
        operation = operations.get(k)
        left_x = FIRST_WORD_X if "kv" in operations.values() else 14
        yield Box(left_x, heights[k], DIAGRAM_WIDTH - 16 - left_x, layer_height, "layer")
        for i in range(len(layout.words)):
            yield Box(layout.token(i) - SQUARE_SIZE / 2, y, SQUARE_SIZE, size, "position")
        if operation or has_prompt:
            kind = kinds.get(k, "propagated")
            yield from _draw_prompt(layout, y, operation, kind, size)
        has_prompt = has_prompt or operation == "insert"
    y = heights["embeddings"]
    for i, word in enumerate(layout.words):
        x = layout.token(i)
        yield Box(x - SQUARE_SIZE / 2, y, SQUARE_SIZE, SQUARE_SIZE, "position")
        yield Text(x, y + SQUARE_SIZE + 14, word)
    if INPUT in operations:
        yield from _draw_prompt(layout, y, operations[INPUT], kinds[INPUT])


def _draw_generator_output(layout: _Layout, layer: int, y: float) -> Line:
    """Draw the arrow from a generator to its prompt."""
    heights = layout.heights
    generator_input = layout.generator_inputs[layer]
    if generator_input == "words" and layer not in (INPUT, 0):
        left_x = layout.generator - GENERATOR_WIDTH / 2
        side = heights[layer] + heights["layer_height"] / 2
        end = (layout.prompt(0) - SQUARE_SIZE / 2, side)
        return Line(((left_x, y + 9.5), (4, y + 9.5), (4, side), end))
    middle = (layout.prompt(0) + layout.prompt(1)) / 2
    if layer == INPUT:
        return Line(((middle, y), (middle, heights["embeddings"] + SQUARE_SIZE)))
    return Line(((middle, y), (middle, heights[layer] + heights["layer_height"] - 3)))


def _draw_generator(
    layout: _Layout, layer: int, label: str, word_weights: Sequence[float] | None
) -> Iterator[Shape]:
    """Draw the network that generates the prompt of one layer, and its arrows."""
    heights = layout.heights
    generator_input = layout.generator_inputs[layer]
    left_edge = layout.generator - GENERATOR_WIDTH / 2
    right_edge = left_edge + GENERATOR_WIDTH + 1
    if layer == INPUT:
        y = heights["word_generator"]
    else:
        y = heights["below", 0 if generator_input == "words" else layer] + 5
    middle = y + 9.5
    yield Box(left_edge, y, GENERATOR_WIDTH, 19, "trained")
    yield Text(layout.generator, y + 14, label, "on")
    yield _draw_generator_output(layout, layer, y)
    if generator_input == "first_pass" or layer == INPUT:
        input_label = "M(x)" if generator_input == "first_pass" else "words"
        yield Box(right_edge + 20, y, 50, 19, "chip")
        yield Text(right_edge + 45, y + 14, input_label)
        yield Line(((right_edge + 20, middle), (right_edge, middle)))
        return
    reads_embeddings = layer == 0 or generator_input == "words"
    source_y = heights["embeddings"] if reads_embeddings else heights[layer - 1]
    for i in range(len(layout.words) if generator_input in ("all_states", "words") else 1):
        width = 1.8 if word_weights is None else 0.6 + 6 * word_weights[i]
        x = layout.token(i)
        if x < left_edge:  # from the left
            yield Line(((x, source_y), (x, middle), (left_edge, middle)), "read", True, width)
        else:
            yield Line(((x, source_y), (x, middle), (right_edge + 8, middle)), "read", False, width)
    if generator_input in ("all_states", "words") or layout.token(0) > left_edge:
        yield Line(((right_edge + 14, middle), (right_edge, middle)))


def _draw_head(
    layout: _Layout,
    label: str,
    prediction: str,
    position: int | None,  # of the token that the head reads; None: the mean of all
    is_frozen: bool,
) -> Iterator[Shape]:
    """Draw the head above what it reads, and its prediction."""
    heights = layout.heights
    y = heights["head"]
    top = heights[layout.layers - 1] + (heights["layer_height"] - SQUARE_SIZE) / 2
    if position is None:  # the lines from all tokens meet, where their mean is taken
        xs = [layout.token(i) for i in range(len(layout.words))]
        for x in xs:
            yield Line(((x, top), (x, y + 29)), "state", False)
        yield Line(((xs[0] - 0.9, y + 29), (xs[-1] + 0.9, y + 29)), "state", False)
        centre = (xs[0] + xs[-1]) / 2
        yield Line(((centre, y + 29), (centre, y + 21)), "state")
        is_left = bool(layout.n_before)
    else:
        centre = layout.token(position % len(layout.words))
        yield Line(((centre, top), (centre, y + 21)), "state")
        is_left = position % len(layout.words) < 2
    x = max(centre - 29, 14) if is_left or position is None else centre - 42
    yield Box(x, y, 58, 20, "chip" if is_frozen else "trained")
    yield Text(x + 29, y + 14.5, label, "label" if is_frozen else "on")
    if prediction and is_left:
        yield Text(x + 66, y + 14.5, prediction, "label", "start")
    elif prediction:
        yield Text(x - 8, y + 14.5, prediction, "label", "end")


def _draw_shared_generator(layout: _Layout, generated: list) -> Iterator[Shape]:
    """Draw brackets that connect generators which are one network."""
    heights = layout.heights
    ys = []
    for k in generated:
        y = heights["word_generator"] if k == INPUT else heights["below", k] + 5
        ys.append(y + 4)
    side = 1 if layout.n_before else -1  # the other side has the arrows of the first token
    edge = layout.generator + side * (GENERATOR_WIDTH / 2 - 1)
    lowest = max(ys)
    for y in ys:
        if y < lowest:
            outside = edge + 7 * side
            points = ((edge, lowest), (outside, lowest), (outside, y), (edge, y))
            yield Line(points, "read", False, 3)


def _draw_gradient(layout: _Layout) -> Line:
    """Draw the line from the head down to the lowest trained part."""
    heights = layout.heights
    operations = layout.operations
    if INPUT in operations:
        low = heights["embeddings"] + SQUARE_SIZE
    elif operations:
        low = heights[min(operations)] + heights["layer_height"]
    else:
        low = heights["head"] + 20
    x = DIAGRAM_WIDTH - 7
    return Line(((x, heights["head"] + 2), (x, low - 2)), "grad", False, 4)


def draw_prompted_model(
    layers: int,  # number of layers of the frozen model
    operations: dict | None = None,  # layer or `INPUT` → 'insert', 'add', 'replace' or 'kv'
    generator_input: str | Mapping = "none",  # key of `GENERATOR_INPUTS`, or {layer: such a key}
    title: str = "",  # title of the diagram
    note: str = "",  # one or two lines below the title
    words: Sequence[str] = EXAMPLE_WORDS,  # the tokens of the text
    head_label: str | None = "head",  # name of the head; None: no head is drawn
    prediction: str = "",  # text beside the head
    # position of the token that the head reads; -1: the last; None: the mean of all tokens
    head_position: int | None = None,
    is_head_frozen: bool = False,  # the head is frozen, too, as the words of a vocabulary
    generator_labels: Mapping | None = None,  # {layer: name of its generator}; None: 'G'
    is_generator_shared: bool = False,  # all layers share one generator
    word_weights: Sequence[float] | None = None,  # weight of each word, drawn as width of its arrow
    n_before: int | None = None,  # number of tokens in front of the prompt: 0 or 1; None: 1
) -> Picture:
    """Draw a frozen model with its prompts, their generators and the reach of the gradient."""
    operations = operations or {}
    if n_before is None:
        n_before = 1 if operations else 0
    inputs: dict[int, str] = {}
    for k in operations:
        if isinstance(generator_input, str):
            inputs[k] = generator_input
        else:
            inputs[k] = generator_input.get(k, "none")
        check_choice(inputs[k], GENERATOR_INPUTS, "generator_input")
    note_lines = wrap_text(note, DIAGRAM_WIDTH - 10)
    heights, total = _compute_heights(layers, operations, inputs, 31 + 15 * len(note_lines))
    layout = _Layout(layers, words, operations, inputs, heights, n_before)
    shapes: list[Shape] = [Text(10, 17, title, "title", "start")]
    for i, line in enumerate(note_lines):
        shapes.append(Text(10, 34 + 15 * i, line, "note", "start"))
    shapes += _draw_layers(layout)
    generated = [k for k in operations if inputs[k] != "none"]
    if is_generator_shared:
        shapes += _draw_shared_generator(layout, generated)
    for k in generated:
        label = (generator_labels or {}).get(k, "G")
        shapes += _draw_generator(layout, k, label, word_weights)
    if head_label:
        shapes += _draw_head(layout, head_label, prediction, head_position, is_head_frozen)
    is_head_trained = bool(head_label) and not is_head_frozen
    if operations or is_head_trained:
        shapes.append(_draw_gradient(layout))
    alt = _describe_diagram(layout, title, is_head_trained)
    anchors = {name: (14, y) for name, y in heights.items() if y}
    return Picture(shapes, DIAGRAM_WIDTH, total, title, alt, anchors)


def _describe_diagram(layout: _Layout, title: str, is_head_trained: bool) -> str:
    """Return the description of a diagram."""
    layers = layout.layers
    operations = layout.operations
    if not operations:
        head = "a trained head" if is_head_trained else "no trained head"
        return f"{title}: a frozen model of {layers} layers without a prompt, {head}."
    side = "after the first token" if layout.n_before else "in front of the text"
    places = [f"among the words, {side}"] if INPUT in operations else []
    upper = [k for k in operations if k != INPUT]
    if len(upper) == layers:
        places.append("before every layer")
    elif upper:
        places.append(f"before layer {', '.join(map(str, upper))}")
    labels = ", then ".join(dict.fromkeys(OPERATION_LABELS[op] for op in operations.values()))
    inputs = layout.generator_inputs.values()
    sources = ", then ".join(dict.fromkeys(GENERATOR_INPUTS[i] for i in inputs))
    first = 0 if INPUT in operations else min(upper)
    return (
        f"{title}: a prompt {' and '.join(places)} ({labels}), {sources}; "
        f"gradient through {layers - first} of {layers} layers."
    )


def draw_plan(
    plan: Mapping,  # layer → step, as a method builds it
    backbone: Any,  # its number of layers is drawn
    generator_input: str | Mapping = "none",  # key of `GENERATOR_INPUTS`, or {layer: such a key}
    title: str = "a plan",  # title of the diagram
    note: str = "",  # one or two lines below the title
    **kwargs: Any,  # further arguments of `draw_prompted_model`
) -> Picture:
    """Draw a frozen model with the prompts of a plan."""
    operations = {k: step.name for k, step in plan.items()}
    return draw_prompted_model(
        backbone.n_layers,
        operations,
        generator_input,
        title,
        note,
        n_before=count_tokens_before(plan),
        **kwargs,
    )


def count_tokens_before(plan: Mapping) -> int:
    """Return the number of tokens in front of the prompt that a plan inserts first."""
    inserts = [plan[k] for k in sorted(plan) if isinstance(plan[k], Insert)]
    return inserts[0].position if inserts else 0


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
) -> Picture:
    """Draw a table of methods: their sources (rows) and where their prompts enter (columns)."""
    title = "The map of all methods"
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
    lines = wrap_text("no prompt: " + ", ".join(promptless), w - 28)
    for i, line in enumerate(lines):
        shapes.append(Text(14, y + 14 + 17 * i, line, "note", "start"))
    described = []
    for name, method in methods.items():
        if method.kind in SOURCE_LABELS:
            insertion = INSERTION_LABELS[method.insertion_point]
            described.append(f"{name}: {SOURCE_LABELS[method.kind]}, {insertion}")
    description = f"{title}. {'; '.join(described)}. Without a prompt: {', '.join(promptless)}."
    alt = f"{title}, in rows by what a prompt is computed from, and in columns by where it enters."
    return Picture(shapes, w, y + 20 + 17 * len(lines), title, alt, description=description)
