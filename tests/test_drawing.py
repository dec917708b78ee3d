"""Pictures are arranged, moved and saved."""

import re
import xml.etree.ElementTree as ET

import small
from drawing import (
    AnimatedPicture,
    Box,
    Line,
    Picture,
    Text,
    arrange_pictures,
    draw_legend,
    wrap_text,
)
from method_diagrams import (
    draw_plan,
)


def test_pictures_are_arranged_and_moved():
    shapes = [Box(0, 0, 10, 10, "trained"), Line(((0, 0), (5, 5))), Text(5, 5, "<s> & co")]
    p = Picture(shapes, 40, 20, "one", "One.", dict(a=(1, 2)))
    both = arrange_pictures([p, p], "two", note="a line below")
    assert both.anchors[1, "a"][0] - both.anchors[0, "a"][0] == 40
    assert both.alt == "two: one, one." and both.description == "two. One. One."
    assert ET.fromstring(both._repr_svg_()).findall("{*}text")[0].text == "<s> & co"
    assert {
        s.content for s in draw_legend({"trained", "grad"}, 100).shapes if isinstance(s, Text)
    } == {
        "trained",
        "reach of the gradient",
    }
    assert wrap_text("", 100) == [] and len(wrap_text("a word or two more", 60)) > 1


def test_a_picture_can_be_saved(tmp_path):
    draw_plan({}, small.backbone(), title="nothing").save(tmp_path / "a.svg")
    assert ET.parse(tmp_path / "a.svg").getroot().get("role") == "img"


def test_an_animated_picture_is_complete_and_still_unless_motion_is_wanted():
    frames = [[Box(1, 1, 5, 5, "layer")], [Box(9, 1, 5, 5, "trained")], [Text(9, 9, "end")]]
    svg = AnimatedPicture(frames, 20, 12, "title", "alt")._repr_svg_()
    style = re.search(r"<style>(.*?)</style>", svg)[1]
    still, _, moving = style.partition("@media (prefers-reduced-motion:no-preference)")
    assert "animation" not in still and "opacity" not in still
    assert [f".frame-{i}{{animation" in moving for i in range(3)] == [False, True, True]
    groups = ET.fromstring(svg).findall("{*}g")
    assert [len(group) for group in groups] == [1, 1, 1]
    assert "opacity" not in svg.replace(style, "")
