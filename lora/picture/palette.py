"""The colours of the map: one ramp for a light page, one for a dark one, even in lightness.

A small change is close to the page, a large one far from it. Lightness alone, which all kinds of colour
vision share, tells the order; the hue (yellow-green, teal, blue) helps to tell steps apart. Steps are
interpolated in OKLab, where equal distances look equal (B. Ottosson, "A perceptual color space for image processing").
"""

from __future__ import annotations

THEMES = ("light", "dark")

_ANCHORS = {
    "light": ("#e3f0d0", "#9fd6b8", "#3fa9bd", "#2b6cb0", "#0b2a66"),
    "dark": ("#223256", "#2b6cb0", "#3fa9bd", "#9fd6a8", "#f6f3b4"),
}

#: Page, text, faint text, lines, and the hatch of cells that the file leaves as they are.
INK = {
    "light": {"page": "#ffffff", "text": "#1b1f24", "faint": "#5b6470", "line": "#d4d9e0", "hatch": "#c3c9d1"},
    "dark": {"page": "#14171c", "text": "#e8eaed", "faint": "#9aa3af", "line": "#323842", "hatch": "#4a5260"},
}


def ramp(theme: str, steps: int) -> list[str]:
    """``steps`` colours as #rrggbb, from the smallest change to the largest."""
    anchors = [_to_oklab(colour) for colour in _ANCHORS[theme]]
    found = []
    for step in range(steps):
        position = step / max(1, steps - 1) * (len(anchors) - 1)
        first = min(int(position), len(anchors) - 2)
        share = position - first
        found.append(_to_hex([a + (b - a) * share for a, b in zip(anchors[first], anchors[first + 1])]))
    return found


def step_of(relative: float, steps: int) -> int:
    """The step of the ramp for a value from 0 to 1."""
    return max(0, min(steps - 1, round(relative * (steps - 1))))


def _to_oklab(colour: str) -> tuple[float, float, float]:
    red, green, blue = (_linear(int(colour[i:i + 2], 16) / 255) for i in (1, 3, 5))
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    medium = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
            1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
            0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short)


def _to_hex(lab) -> str:
    lightness, a, b = lab
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    channels = (4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
                -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
                -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short)
    return "#" + "".join(f"{round(255 * _gamma(min(1.0, max(0.0, value)))):02x}" for value in channels)


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def _gamma(value: float) -> float:
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
