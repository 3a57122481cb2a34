"""The same files and the same property, driven by the coverage that atheris sees (pip install atheris).

    OMP_NUM_THREADS=1 python tests/fuzz/coverage_guided.py -runs=100000 -timeout=60 -rss_limit_mb=8192 [corpus folder]

Options are those of libFuzzer. A file that fails is kept in the folder fuzz-failures.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), str(HERE.parent / "unit" / "lora"), *(path for path in sys.path if path != str(HERE))]


#: Bytes that a case is drawn from.
LENGTH = 8192


def _seeds() -> Path:
    """A corpus to begin with: bytes at random, always the same."""
    folder, chance = Path(tempfile.mkdtemp()), random.Random(0)
    for number in range(200):
        (folder / str(number)).write_bytes(chance.randbytes(LENGTH))
    return folder


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["qpatch.lora"]):
        from fuzz.cases import cases
        from fuzz.harness import Harness

    import hypothesis

    harness = Harness(Path(tempfile.mkdtemp()))

    @hypothesis.settings(database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=cases())
    def run(case):
        try:
            harness.check(case)
        except BaseException:
            kept = Path("fuzz-failures")
            kept.mkdir(exist_ok=True)
            (kept / f"guided-{hash(case.content) & 2**64 - 1:x}.safetensors").write_bytes(case.content)
            raise

    # A case takes hypothesis some thousand bytes to draw; libFuzzer would begin with one.
    begin = [str(_seeds())] if not any(Path(word).is_dir() for word in sys.argv[1:]) else []
    atheris.Setup([sys.argv[0], "-len_control=0", f"-max_len={LENGTH}", *sys.argv[1:], *begin],
                  run.hypothesis.fuzz_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
