"""Diagrams of methods, as SVG.

Modules:

- `drawing`: Texts, boxes and lines, and SVG pictures of them with an alternative text.
- `method_diagrams`: Diagrams of where a prompt enters a frozen model and what it is generated from.
"""
