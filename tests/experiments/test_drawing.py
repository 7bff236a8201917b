"""Figures: a legend shows what is drawn."""

from __future__ import annotations

from experiments.harness.drawing import COLOURS, Line, figure


def test_the_legend_of_single_dots_has_dots_and_that_of_lines_has_lines() -> None:
    words = {"title": "t", "x_label": "x", "y_label": "y"}
    dots = {f"method {i}": Line([i], [i], dots=True) for i in range(COLOURS + 1)}
    drawn = figure(dots, **words)
    assert drawn.count("<circle") == 2 * len(dots)  # in the plot, and in the legend
    assert drawn.count("hollow") - drawn.count(".hollow") == 2  # the ninth, in both places
    lines = figure({"a": Line([0, 1], [0, 1], dots=True)}, **words)
    assert lines.count("<circle") == 2 and '<line x1="298"' in lines  # in the margin
