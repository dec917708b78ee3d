"""Texts, boxes and lines, and SVG pictures of them with an alternative text.

Every shape is a text, a box or a line with absolute coordinates, so a picture is a list that
can be moved, joined and checked. The reader's font is not known: the width of a text is
estimated for a wide font.
"""

import html
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

# kind of text: font size, in units of which a picture is 424 wide
FONT_SIZES = {
    "title": 15,
    "note": 12.5,
    "label": 12,
    "on": 12.5,
    "static-name": 13,
    "generated-name": 13,
}


class Text(NamedTuple):
    """A line of text with its baseline at `y`."""

    x: float
    y: float
    content: str
    kind: str = "label"
    anchor: str = "middle"

    def bounding_box(self) -> tuple[float, float, float, float]:  # x, y, width, height
        """Return the estimated bounding box."""
        size = FONT_SIZES[self.kind]
        width = 0.58 * size * len(self.content)
        left_x = dict(start=0.0, middle=width / 2, end=width)[self.anchor]
        return self.x - left_x, self.y - 0.8 * size, width, size

    def to_svg(self) -> str:
        """Return the SVG element."""
        attributes = f'x="{self.x:g}" y="{self.y:g}" text-anchor="{self.anchor}"'
        style = f'{_attributes("text", self.kind)} font-size="{FONT_SIZES[self.kind]}"'
        content = html.escape(self.content, quote=False)
        return f'<text class="{self.kind}" {attributes}{style}>{content}</text>'


class Box(NamedTuple):
    """A rectangle: a layer, a position or a network."""

    x: float
    y: float
    w: float
    h: float
    kind: str

    def to_svg(self) -> str:
        """Return the SVG element."""
        radius = min(4, self.h / 3)
        size = f'width="{self.w:g}" height="{self.h:g}"'
        place = f'x="{self.x:g}" y="{self.y:g}" {size} rx="{radius:g}"'
        return f'<rect class="{self.kind}" {place}{_attributes("rect", self.kind)}/>'


Point = tuple[float, float]


def point_towards(
    start: Point,  # (x, y)
    end: Point,  # (x, y)
    distance: float,  # distance from `start`
) -> Point:
    """Return the point at a distance from `start` on the way to `end`, at most half-way."""
    length = ((end[0] - start[0]) ** 2 + (end[1] - start[1]) ** 2) ** 0.5
    fraction = min(distance / length, 0.5) if length else 0
    return (
        start[0] + fraction * (end[0] - start[0]),
        start[1] + fraction * (end[1] - start[1]),
    )


class Line(NamedTuple):
    """A line of straight segments with rounded corners."""

    points: tuple[Point, ...]
    kind: str = "read"
    arrow: bool = True
    width: float = 1.8

    def to_svg(self) -> str:
        """Return the SVG element, or two with an arrowhead."""
        points = list(self.points)
        head = ""
        if self.arrow:
            (x, y), (a, b) = points[-1], point_towards(points[-1], points[-2], 7)
            u = (y - b) / 2
            v = (x - a) / 2
            tip = f"M{a + u:.1f},{b - v:.1f} {x:g},{y:g} {a - u:.1f},{b + v:.1f}z"
            style = _attributes("path", self.kind, "tip")
            head = f'<path class="{self.kind} tip" d="{tip}"{style}/>'
            points[-1] = (a, b)
        d = f"M{points[0][0]:g},{points[0][1]:g}"
        for before, corner, after in zip(points, points[1:], points[2:]):
            (s, t), (u, v) = point_towards(corner, before, 6), point_towards(corner, after, 6)
            d += f" L{s:g},{t:g} Q{corner[0]:g},{corner[1]:g} {u:g},{v:g}"
        d += f" L{points[-1][0]:g},{points[-1][1]:g}"
        style = _attributes("path", self.kind)
        return f'<path class="{self.kind}" stroke-width="{self.width:g}" d="{d}"{style}/>{head}'


Shape = Text | Box | Line


def translate_shape(shape: Shape, dx: float, dy: float) -> Shape:
    """Return a shape moved by `dx` and `dy`."""
    if isinstance(shape, Line):
        return shape._replace(points=tuple((x + dx, y + dy) for x, y in shape.points))
    return shape._replace(x=shape.x + dx, y=shape.y + dy)


LIGHT_COLOURS = {
    "ink": "#1f2933",
    "soft": "#52606d",
    "paper": "#ffffff",
    "frozen": "#e3e8ee",
    "edge": "#9aa8b7",
    "trained": "#1f6fb2",
    "generated": "#c3ddf3",
    "other": "#a3479b",
    "generated-other": "#f0d0ec",
    "grad": "#d1495b",
}
DARK_COLOURS = {
    "ink": "#e6eaef",
    "soft": "#a9b4c0",
    "paper": "#15191f",
    "frozen": "#2d3742",
    "edge": "#8091a3",
    "trained": "#66b2ee",
    "generated": "#1d4a70",
    "other": "#dd92d5",
    "generated-other": "#5c2f58",
    "grad": "#ff8090",
}
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif"


def _filled(fill: str, stroke: str = "") -> dict[str, str]:
    """Return the properties of a shape with a fill colour and, if given, a line colour."""
    line = {"stroke": f"--{stroke}", "stroke-width": "1.5"} if stroke else {}
    return {"fill": f"--{fill}", **line}


# selector: properties; a value that begins with `--` is the name of a colour
STYLES = {
    "path": {"fill": "none"},
    "text": _filled("ink"),
    ".title": {"font-weight": "600"},
    ".note": _filled("soft"),
    "text.on": _filled("paper") | {"font-weight": "600"},
    ".paper": _filled("paper"),
    ".layer": _filled("frozen"),
    ".position": _filled("paper", "edge"),
    ".chip": _filled("frozen", "edge"),
    ".trained": _filled("trained", "trained"),
    ".generated": _filled("generated", "trained"),
    ".propagated": _filled("paper", "trained"),
    ".generated-q": _filled("generated-other", "other"),
    ".trainable": {
        "fill": "none",
        "stroke": "--trained",
        "stroke-width": "1.6",
        "stroke-dasharray": "4 3",
    },
    ".read": {"stroke": "--trained"},
    ".state": {"stroke": "--edge"},
    ".pointer": {"stroke": "--edge"},
    ".control": {"stroke": "--ink", "stroke-dasharray": "6 4"},
    ".grad": {"stroke": "--grad", "stroke-linecap": "round"},
    ".static": {"stroke": "--other"},
    ".static-name": _filled("other"),
    ".generated-name": _filled("trained"),
    ".backward": _filled("grad"),
    ".forward": _filled("edge"),
    ".read.tip": _filled("trained"),
    ".state.tip": _filled("edge"),
    ".pointer.tip": _filled("edge"),
}


def _attributes(tag: str, *classes: str) -> str:
    """Return the SVG attributes of an element in light colours, for renderers without CSS."""
    element = {tag, *(f".{name}" for name in classes)}
    properties: dict[str, str] = {}
    for selector, values in STYLES.items():
        if set(re.findall(r"\.?[\w-]+", selector)) <= element:
            properties |= values
    if tag == "path":  # a line has its own width
        properties.pop("stroke-width", None)
    return "".join(
        f' {name}="{LIGHT_COLOURS[value[2:]] if value.startswith("--") else value}"'
        for name, value in properties.items()
    )


def _dark_css() -> str:
    """Return the CSS of the dark colours, without variables."""
    rules = ""
    for selector, properties in STYLES.items():
        colours = {n: v for n, v in properties.items() if v.startswith("--")}
        css = ";".join(f"{name}:{DARK_COLOURS[value[2:]]}" for name, value in colours.items())
        rules += f".idp {selector}{{{css}}}" if css else ""
    return f"@media (prefers-color-scheme:dark){{{rules}}}"


class Picture:
    """Shapes, an alternative text, and anchors that other shapes can be connected to."""

    def __init__(
        self,
        shapes: Iterable[Shape],  # in the order in which they are drawn
        w: float,  # width in units
        h: float,  # height in units
        title: str = "",  # a few words
        alt: str = "",  # alternative text: what the picture shows, in one sentence
        anchors: dict | None = None,  # name: (x, y)
        description: str = "",  # every part of the picture; '': the alternative text
    ) -> None:
        self.shapes = list(shapes)
        self.w = w
        self.h = h
        self.title = title
        self.alt = alt
        self.anchors = anchors or {}
        self.description = description or alt

    def __repr__(self) -> str:
        return self.description or self.title

    def _repr_svg_(self) -> str:
        view = f'viewBox="0 0 {self.w:g} {self.h:g}"'
        size = f'width="{1.25 * self.w:g}" height="{1.25 * self.h:g}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="idp" role="img" {view} {size} '
                f'font-family="{FONT}">',
                f"<title>{html.escape(self.title)}</title>",
                f"<desc>{html.escape(self.description)}</desc>",
                f"<style>{_dark_css()}{self._motion_css()}</style>",
                Box(0, 0, self.w, self.h, "paper").to_svg(),
                *self._drawn_shapes(),
                "</svg>",
                "",
            ]
        )

    def _motion_css(self) -> str:
        """Return the CSS of an animation, if there is one."""
        return ""

    def _drawn_shapes(self) -> list[str]:
        """Return the SVG elements of all shapes."""
        return [s.to_svg() for s in self.shapes]

    def translate(self, dx: float, dy: float) -> "Picture":
        """Return the picture with all shapes and anchors moved by `dx` and `dy`."""
        shapes = [translate_shape(s, dx, dy) for s in self.shapes]
        anchors = {name: (x + dx, y + dy) for name, (x, y) in self.anchors.items()}
        return Picture(shapes, self.w, self.h, self.title, self.alt, anchors, self.description)

    def save(self, path: Path | str) -> None:
        """Write the picture to an SVG file."""
        Path(path).write_text(self._repr_svg_(), encoding="utf-8")


class AnimatedPicture(Picture):
    """Picture whose frames appear one after the other, three times, and then stay.

    Without CSS, or where the reader wants no motion, all frames are there from the start.
    """

    SECONDS = 9  # of a round

    def __init__(
        self,
        frames: Iterable[Iterable[Shape]],  # the first one is always visible
        w: float,  # width in units
        h: float,  # height in units
        title: str = "",  # as for `Picture`
        alt: str = "",  # as for `Picture`
    ) -> None:
        self.frames = [list(frame) for frame in frames]
        super().__init__([s for frame in self.frames for s in frame], w, h, title, alt)

    def _motion_css(self) -> str:
        rules = ""
        for i in range(1, len(self.frames)):
            start = 90 * i / len(self.frames)
            keyframes = f"0%,{start:.0f}%{{opacity:.12}}{start + 5:.0f}%,100%{{opacity:1}}"
            rules += f"@keyframes idp-{i}{{{keyframes}}}"
            rules += f".idp .frame-{i}{{animation:idp-{i} {self.SECONDS}s 3}}"
        return f"@media (prefers-reduced-motion:no-preference){{{rules}}}"

    def _drawn_shapes(self) -> list[str]:
        drawn = []
        for i, frame in enumerate(self.frames):
            drawn += [f'<g class="frame-{i}">', *(s.to_svg() for s in frame), "</g>"]
        return drawn


LEGEND_LABELS = {
    "layer": "a frozen layer",
    "position": "a position",
    "trained": "trained",
    "trainable": "can be trained",
    "generated": "generated for this text",
    "propagated": "a prompt position",
    "read": "input of the generator",
    "state": "input of the head",
    "grad": "reach of the gradient",
}


def _draw_legend_mark(kind: str, x: float, y: float) -> Shape:
    """Return the small shape in front of a label of the legend."""
    if kind in ("read", "state"):
        return Line(((x, y - 4), (x + 17, y - 4)), kind)
    if kind == "grad":
        return Line(((x + 8, y - 10), (x + 8, y + 1)), "grad", False, 4)
    return Box(x + 1, y - 11, 14, 14, kind)


def draw_legend(
    kinds: Collection[str],  # kinds of shapes that occur; those without a label are skipped
    w: float,  # width in units
) -> Picture:
    """Draw a legend of the kinds of shapes, in two columns."""
    shapes: list[Shape] = []
    labelled = [kind for kind in LEGEND_LABELS if kind in kinds]
    for i, kind in enumerate(labelled):
        x = 10 + i % 2 * (w / 2 - 4)
        y = 14 + i // 2 * 20
        shapes += [
            _draw_legend_mark(kind, x, y),
            Text(x + 23, y, LEGEND_LABELS[kind], "note", "start"),
        ]
    return Picture(shapes, w, 4 + 20 * ((len(labelled) + 1) // 2))


def arrange_pictures(
    pictures: Iterable[Picture],  # of similar width
    title: str,  # title of the whole picture, also the start of its description
    alt: str = "",  # alternative text in one sentence; '': the titles of the pictures
    note: str = "",  # a text below the legend
) -> Picture:  # its anchors are (number of the picture, name)
    """Arrange pictures in rows of two, aligned at the bottom, above a legend."""
    pictures = list(pictures)
    shapes: list[Shape] = []
    anchors = {}
    y: float = 6
    column_width = max(p.w for p in pictures)
    w = 2 * column_width + 16
    for first in range(0, len(pictures), 2):
        row = pictures[first : first + 2]
        height = max(p.h for p in row)
        for i, picture in enumerate(row):
            moved = picture.translate(8 + i * column_width, y + height - picture.h)
            shapes += moved.shapes
            for name, point in moved.anchors.items():
                anchors[first + i, name] = point
        y += height + 10
    footer = [draw_legend({s.kind for s in shapes}, w)]
    for line in wrap_text(note, w - 20):
        footer.append(Picture([Text(10, 14, line, "note", "start")], w, 20))
    for picture in footer:
        shapes += picture.translate(0, y).shapes
        y += picture.h
    description = " ".join([f"{title}.", *(p.description for p in pictures if p.description)])
    alt = alt or f"{title}: {', '.join(p.title for p in pictures)}."
    return Picture(shapes, w, y + 4, title, alt, anchors, description)


def wrap_text(
    text: str,  # the text to wrap
    w: float,  # width in units
) -> list[str]:
    """Return the lines of a text that is wrapped to a width, in the font of a note."""
    lines: list[str] = []
    for word in text.split():
        if lines and Text(0, 0, f"{lines[-1]} {word}", "note").bounding_box()[2] <= w:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
