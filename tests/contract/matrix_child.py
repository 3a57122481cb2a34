"""Child program of matrix.py: loads ComfyUI and one pack, and prints {hook: state} as JSON.

    python matrix_child.py COMFYUI_FOLDER NUNCHAKU_PARENT PACK
"""

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))

import build_zimage

#: Modules with targets of hooks that a pack imports only when its node runs, or not at all.
LATE = ("comfy.ldm.qwen_image.model", "comfy.model_patcher", "comfy.sd",
        "nunchaku.models.transformers.transformer_zimage")


def main() -> None:
    build_zimage.start(*sys.argv[1:3], sys.argv[3:4])
    for name in LATE:
        importlib.import_module(name)
    print("\n" + json.dumps({hook: row["state"] for hook, row in build_zimage.hooks().items()}))


if __name__ == "__main__":
    main()
