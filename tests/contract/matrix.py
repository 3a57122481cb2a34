"""Makes the table of docs/compatibility.md: every hook against every ComfyUI checkout in a folder.

    python tests/contract/matrix.py CHECKOUTS --nunchaku FOLDER --pack FOLDER [--pack FOLDER ...]
                                    [--write docs/compatibility.md]

CHECKOUTS holds ComfyUI folders. The interpreter needs qpatch installed, and ComfyUI's requirements. Each
checkout is loaded in a child process with each version of ComfyUI-nunchaku, as ComfyUI loads it, and the
hooks' own states are written down. Without --write the table goes to standard output.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MARKS = ("<!-- matrix: made by tests/contract/matrix.py -->", "<!-- end of matrix -->")
#: State -> cell; the legend stands in the document.
SIGNS = {"applied": "A", "not-needed": "–", "waiting": "", "disabled": "o", "incompatible": "I",
         "failed": "**F**", "lost": "**L**"}


def version(folder: Path) -> str:
    """The version in ``comfyui_version.py`` or ``pyproject.toml`` of ``folder``."""
    for name in ("comfyui_version.py", "pyproject.toml"):
        file = folder / name
        found = re.search(r'^_*version_*\s*=\s*"([^"]+)"', file.read_text(), re.MULTILINE) if file.exists() else None
        if found:
            return found.group(1)
    return folder.name


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def states(comfyui: Path, nunchaku: Path, pack: Path) -> dict[str, str]:
    """{hook: state} after ComfyUI in ``comfyui`` has loaded ``pack``."""
    command = [sys.executable, str(HERE / "matrix_child.py"), str(comfyui), str(nunchaku), str(pack)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=HERE)
    if done.returncode:
        raise SystemExit(f"{comfyui} with {pack}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(title: str, columns: list[str], found: list[dict[str, str]]) -> list[str]:
    """A Markdown table: one row for each hook that met its target anywhere."""
    lines = [f"### {title}", "", "| hook | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for hook in found[0]:
        cells = [SIGNS[row[hook]] for row in found]
        if any(cells):
            lines.append(f"| {hook} | " + " | ".join(cells) + " |")
    return lines + [""]


def made(arguments) -> str:
    folders = [path for path in arguments.checkouts.iterdir() if (path / "comfy").is_dir()]
    checkouts = sorted(folders, key=lambda path: numbers(version(path)))
    if not checkouts:
        raise SystemExit(f"{arguments.checkouts} holds no ComfyUI folder")
    lines = []
    for pack in arguments.pack:
        found = []
        for checkout in checkouts:
            print(f"ComfyUI {version(checkout)}, ComfyUI-nunchaku {version(pack)}", file=sys.stderr)
            found.append(states(checkout, arguments.nunchaku, pack))
        title = f"ComfyUI-nunchaku {version(pack)}, nunchaku {arguments.nunchaku.name}"
        lines += table(title, [version(path) for path in checkouts], found)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--nunchaku", type=Path, required=True, help="the folder that holds the package nunchaku")
    parser.add_argument("--pack", type=Path, action="append", required=True,
                        help="ComfyUI-nunchaku (may be given again)")
    parser.add_argument("--write", type=Path, help="a file whose text between the marks is replaced")
    arguments = parser.parse_args()
    text = made(arguments)
    if arguments.write is None:
        print(text)
        return
    before, _, rest = arguments.write.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    arguments.write.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
