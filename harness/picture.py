"""The chart as a PNG file, painted with matplotlib from the shapes of chart.py.

Imports matplotlib, which takes a second: import this module only where a picture is drawn.
"""

import warnings
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from harness.chart import COLORS, FONT, Scene, Shape
from harness.common import atomic_file

INCH = 100  # pixels of the layout
SHARPNESS = 2  # pixels of the file for each pixel of the layout


def draw_picture(scene: Scene, file) -> None:
    """Paint a scene with matplotlib and write it to a binary file as PNG."""
    figure = Figure(figsize=(scene.width / INCH, scene.height / INCH), dpi=INCH * SHARPNESS)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, scene.width), ylim=(scene.height, 0))
    axes.axis("off")
    for order, shape in enumerate(scene.shapes):
        paint(axes, shape, order + 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a character that the font lacks
        figure.savefig(file, format="png")


def paint(axes, shape: Shape, order: int) -> None:
    """Add one shape to matplotlib's axes, whose coordinates are the layout's pixels."""
    color = COLORS[shape.color]
    size = shape.size * 72 / INCH  # points, matplotlib's unit
    style = {"color": color, "zorder": order, "alpha": 0.55 if shape.faint else 1}
    if shape.kind == "text":
        x, y = shape.points
        align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        style |= {"ha": align, "va": "baseline", "fontsize": size, "parse_math": False}
        axes.text(x, y, shape.text, **style)
    elif shape.kind == "line":
        axes.plot(shape.points[::2], shape.points[1::2], lw=size, **style)
    elif shape.kind == "rect":
        x1, y1, x2, y2 = shape.points
        axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, lw=0, **style))
    else:
        marker = {"dot": "o", "ring": "o", "cross": "x", "up": "^", "down": "v"}[shape.kind]
        fill = "none" if shape.kind == "ring" else color
        axes.plot(
            *shape.points, marker=marker, ms=2 * size, mfc=fill, mec=color, mew=0.9, ls="", **style
        )


def write_picture(scene: Scene | None, path: Path) -> None:
    """Write progress.png; without a scene, a picture that says why it is empty."""
    empty = Shape("text", "dim", (20, 60), FONT, "no scored run yet")
    with atomic_file(path) as file:
        draw_picture(scene or Scene(760, 120, "", [empty]), file)
