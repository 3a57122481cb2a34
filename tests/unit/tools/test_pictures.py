"""The pictures: colours, what is in them, that they need nothing from outside and appear whole or not at all."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
import torch
from safetensors.torch import load_file, save_file

from qpatch.lora.inspection import measure, survey
from qpatch.lora.inspection.chart import chart
from qpatch.lora.picture import draw, palette
from qpatch.lora.picture.page import page


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(first, second):
    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", palette.THEMES)
def test_a_larger_change_is_always_further_from_the_page(theme):
    distances = [contrast(colour, palette.INK[theme]["page"]) for colour in palette.ramp(theme, 64)]
    assert distances == sorted(distances) and distances[-1] > 12 and distances[0] > 1.15


@pytest.mark.parametrize("theme", palette.THEMES)
def test_steps_of_the_ramp_are_even_in_lightness(theme):
    lightness = [(116 * luminance(colour) ** (1 / 3) - 16) for colour in palette.ramp(theme, 9)]
    steps = [abs(b - a) for a, b in zip(lightness, lightness[1:])]
    assert min(steps) > 0.4 * max(steps)


@pytest.mark.parametrize("theme", palette.THEMES)
def test_texts_are_legible_on_the_page(theme):
    ink = palette.INK[theme]
    assert contrast(ink["text"], ink["page"]) > 12 and contrast(ink["faint"], ink["page"]) > 4.5


@pytest.fixture
def drawn(written):
    """A surveyed file that misses all blocks but the first ones, with a nasty name in its metadata."""
    _, path = written("ai-toolkit", "z-image", blocks=2, name="a<b>&'.safetensors")
    tensors = load_file(path)
    save_file(tensors, path, {"name": "<script>alert(1)</script>", "modelspec.trigger_phrase": '"><img src=x>'})
    return measure(survey(path))


class Reading(HTMLParser):
    """Collects tags, attributes and cells, and complains of tags that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_from_outside_and_runs_nothing(drawn):
    text = page(drawn, chart(drawn))
    reading = Reading(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(reading.tags)
    assert not [name for name, _ in reading.attributes if name in ("src", "href") or name.startswith("on")]
    assert "default-src 'none'" in text and not re.search(r"https?://|@import|url\(", text)


def test_what_the_file_says_is_escaped_in_the_page(drawn):
    text = page(drawn, chart(drawn))
    assert "<script>" not in text and "<img" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<b>&'" not in text and "a&lt;b&gt;&amp;&#x27;.safetensors" in text


def test_each_cell_of_the_page_tells_its_values_and_missing_ones_say_so(drawn):
    map_of_file = chart(drawn)
    text = page(drawn, map_of_file)
    tips = dict(value.split("\n", 1) for name, value in Reading(text).attributes if name == "data-tip")
    assert set(tips) == {cell.name for cell in map_of_file.cells}
    strongest = map_of_file.end
    assert f"norm: {strongest.norm:.4g}" in tips[strongest.name] and "relative: 100.0 %" in tips[strongest.name]
    assert tips["layers.7.attention.to_q"] == "not in the file: unchanged"


def test_the_page_lists_every_layer_as_text(drawn):
    map_of_file = chart(drawn)
    text = page(drawn, map_of_file)
    rows = re.findall(r"<tr><td>([^<]+)</td>", text[text.index('class="all"'):])
    assert rows == [cell.name for cell in map_of_file.cells if cell.facts is not None]
    assert "layers.29.feed_forward.w2" in text[text.index("are not in the file</summary>"):]


def test_the_page_has_colours_for_both_themes(drawn):
    text = page(drawn, chart(drawn))
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    assert palette.INK["light"]["page"] in light and palette.INK["dark"]["page"] in dark
    assert palette.ramp("light", 64)[63] in light and palette.ramp("dark", 64)[63] in dark


@pytest.mark.parametrize("theme", palette.THEMES)
def test_a_png_and_an_svg_are_what_their_names_say(drawn, tmp_path, theme):
    pytest.importorskip("matplotlib")
    png, svg = draw(drawn, tmp_path / "map.png", theme=theme), draw(drawn, tmp_path / "map.SVG", theme=theme)
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    text = " ".join(ElementTree.parse(svg).getroot().itertext())
    for words in ("attention.to_q", "adaLN_modulation.0", "noise_refiner", "not in the file", drawn.name, "100 %"):
        assert words in text
    assert palette.INK[theme]["page"] in svg.read_text()


def test_the_same_file_gives_the_same_svg(drawn, tmp_path):
    pytest.importorskip("matplotlib")
    first, second = (draw(drawn, tmp_path / name) for name in ("one.svg", "two.svg"))
    assert first.read_bytes() == second.read_bytes()


def test_a_text_picture_is_the_table_of_the_report(drawn, tmp_path):
    text = draw(drawn, tmp_path / "map.txt").read_text()
    assert text.startswith(drawn.name) and re.search(r"^attention.to_q .* \d{2}\.{28} \d\d \d\d", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["map.pdf", "map", "map.safetensors"])
def test_a_picture_of_another_kind_is_refused(drawn, tmp_path, name):
    with pytest.raises(ValueError, match=".png, .svg, .html or .txt"):
        draw(drawn, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_without_matplotlib_the_remedy_is_named_and_nothing_is_left(drawn, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    before = set(tmp_path.iterdir())
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        draw(drawn, tmp_path / "map.png")
    assert set(tmp_path.iterdir()) == before
    draw(drawn, tmp_path / "map.html")


def test_drawing_leaves_the_state_of_matplotlib_alone(written, tmp_path):
    pytest.importorskip("matplotlib")
    _, path = written()
    code = ("import sys, matplotlib; names = ('svg.hashsalt', 'font.size', 'hatch.color'); rc = matplotlib.rcParams;"
            "before = [rc[name] for name in names]; from qpatch.cli import main;"
            "main(['lora', 'inspect', sys.argv[1], '--plot', sys.argv[2]]);"
            "assert [rc[name] for name in names] == before and 'matplotlib.pyplot' not in sys.modules")
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "x.png"], check=True, capture_output=True)


def strengthened(written, factors):
    """A chart of a file in which layer ``name`` is ``factor`` times as strong as the others."""
    _, path = written("ai-toolkit", "z-image", blocks=6, rank=1, singles=False)
    tensors = {key: torch.ones_like(tensor) for key, tensor in load_file(path).items()}
    for name, factor in factors.items():
        tensors[f"diffusion_model.{name}.lora_B.weight"] *= factor
    save_file(tensors, path)
    return measure(survey(path))


def test_a_layer_far_beyond_the_others_is_marked_and_leaves_them_their_colours(written, tmp_path):
    found = strengthened(written, {"layers.3.feed_forward.w2": 500, "layers.2.attention.to_q": 4})
    drawn = chart(found)
    assert [cell.name for cell in drawn.beyond] == ["layers.3.feed_forward.w2"]
    assert drawn.end.name == "layers.2.attention.to_q"
    others = {round(cell.relative, 6) for cell in drawn.cells if cell.rms is not None} - {1.0, 125.0}
    assert others == {0.25}
    text = page(found, drawn)
    assert text.count(" beyond") >= 2 and "beyond the scale: layers.3.feed_forward.w2, 125 times its end" in text
    row = next(line for line in draw(found, tmp_path / "x.txt").read_text().splitlines() if "feed_forward.w2" in line)
    assert "222+22" in row


def test_where_no_layer_stands_apart_the_strongest_is_the_end_of_the_scale(written):
    drawn = chart(strengthened(written, {"layers.3.feed_forward.w2": 4}))
    assert drawn.end.name == "layers.3.feed_forward.w2" and drawn.end.relative == 1.0 and not drawn.beyond


def test_a_file_of_zeros_has_a_map(written, tmp_path):
    _, path = written("ai-toolkit", "z-image", blocks=2)
    save_file({key: torch.zeros_like(tensor) for key, tensor in load_file(path).items()}, path)
    found = measure(survey(path))
    draw(found, tmp_path / "x.html")
    assert {cell.relative for cell in chart(found).cells if cell.facts} == {0.0} and not chart(found).beyond


@pytest.mark.parametrize("suffix", [".html", ".svg", ".txt"])
def test_control_characters_of_a_file_are_shown_not_obeyed(written, tmp_path, suffix):
    if suffix == ".svg":
        pytest.importorskip("matplotlib")
    _, path = written("ai-toolkit", "z-image", blocks=1, name="a\x1b[31m$x$.safetensors")
    save_file(load_file(path), path, {"modelspec.trigger_phrase": "one\x07\u202etwo"})
    text = draw(measure(survey(path)), tmp_path / f"map{suffix}").read_text()
    assert not {"\x1b", "\x07", "\u202e"} & set(text) and "a\\x1b[31m$x$.safetensors" in text
    if suffix == ".svg":
        ElementTree.fromstring(text)
