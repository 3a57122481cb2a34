"""The benchmarks can be listed, and the README's speed table is one that they made."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "benchmarks"
README = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import table

    return table


def test_each_benchmark_is_listed_with_what_it_measures():
    done = subprocess.run([sys.executable, FOLDER / "run.py", "--list"], capture_output=True, text=True, check=True)
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert {"startup", "finder", "lora_compose", "convrot", "table"} <= lines.keys()
    assert all(len(text) > 20 for text in lines.values())


def test_a_row_gives_medians_and_the_ratios_within_the_rounds(table):
    row = table.Row("task", [2.0, 4.0, 6.0], [1.0, 2.0, 3.0], "copy", [4.0, 8.0, 12.0], "theirs")
    assert row.cells() == ["task", "4 s", "2 s, copy", "2.00 [2.00 2.00]", "8 s, theirs", "0.50 [0.50 0.50]"]
    assert table.Row("task", [2e-7, 3e-7, 4e-7]).cells() == ["task", "300 ns", "", "", "", ""]


def test_the_table_is_written_between_its_marks_and_nowhere_else(table, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    for part in ("composer", "rotation", "inspection"):
        monkeypatch.setattr(table, part, lambda folder, rounds: [])
    monkeypatch.setattr(table, "engine", lambda folder, rounds: [table.Row("one", [1e-3, 1e-3])])
    monkeypatch.setattr(sys, "argv", ["table.py", "--write", str(page)])
    table.main()
    head, rule, row = page.read_text().splitlines()[2:5]
    assert row == "| one | 1 ms |  |  |  |  |" and rule.count("---") == 6
    assert page.read_text().startswith(f"before\n{table.BEGIN}\n|")
    assert page.read_text().endswith(f"|\n{table.END}\nafter\n")


def test_the_readme_has_a_row_for_each_task():
    rows = re.search(r"<!-- speed table -->\n(.*?)<!-- end", README, re.DOTALL)[1].splitlines()[2:]
    told = " ".join(row.split("|")[1] for row in rows)
    for task in ("start of Python", "finder", "compose", "strength", "reset", "rotate", "bake", "inspect"):
        assert task in told
