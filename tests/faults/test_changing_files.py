"""LoRA files that shrink, vanish or are replaced while they are read: an error that names the file, never a signal.
A dict of tensors that is changed after it was opened: what was in it then is applied.

What could end the process is tried in a child process.
"""

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import producers
import pytest
import torch
import trees
from test_composition import bits, same

from qpatch import lora
from qpatch.lora import mapping
from qpatch.lora.conversion import FORMATS, convert
from qpatch.lora.inspection import measure, survey

HERE = Path(__file__).parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")


@pytest.fixture
def path(tmp_path):
    return producers.make("peft", "qwen-image", rank=8, dims=trees.QWEN_DIMS).write(tmp_path / "style.safetensors")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return trees.qwen()


def shrink(path):
    os.truncate(path, path.stat().st_size // 2)


def rewrite(path):
    content = path.read_bytes()
    path.write_bytes(content[:-64] + bytes(64))


def replaced(path, other):
    """Another file under the same name, as a download puts it there."""
    os.replace(other.rename(path.with_suffix(".new")), path)


def vanish(path):
    path.unlink()


@pytest.mark.parametrize("change, said", [(shrink, "shorter"), (rewrite, "written to")])
def test_a_file_that_changes_between_its_header_and_its_data_is_refused(model, path, change, said):
    opened, before = lora.open_lora(path), bits(model)
    change(path)
    for use in (lambda: lora.compose(model, [(opened, 1.0)]), lambda: lora.plan(model, [(opened, 1.0)]),
                lambda: convert(opened, FORMATS["nunchaku"], max_rank=2)):
        with pytest.raises(lora.FileError, match=f"{said}.*open it again") as caught:
            use()
        assert caught.value.file == "style.safetensors" and caught.value.key in opened.source.entries
    assert same(bits(model), before) and lora.composed(model) == ()


def test_a_file_that_changes_while_it_is_inspected_is_a_problem_of_each_layer(path):
    found = survey(path)
    with found.reader:
        shrink(path)
        problems = measure(found).problems
    assert len(problems) == len(found.layers) and all("style.safetensors" in text for text in problems)


def emptied(tensors):
    tensors.clear()


def refilled(tensors):
    for key in tensors:
        tensors[key] = torch.zeros(3)


def given_other_data(tensors):
    for tensor in tensors.values():
        tensor.data = torch.zeros(3)


@pytest.mark.parametrize("moment", ["before the plan", "before the plan is applied"])
@pytest.mark.parametrize("change", [emptied, refilled, given_other_data])
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
def test_a_dict_is_applied_as_it_was_when_it_was_opened(model, kind, change, moment):
    tensors = producers.make("simpletuner lycoris", "qwen-image", kind, rank=4, dims=trees.QWEN_DIMS).tensors
    lora.compose(model, [({key: tensor.clone() for key, tensor in tensors.items()}, 1.0)])
    wanted = bits(model)
    lora.reset(model)
    opened = lora.open_lora(tensors)
    if moment == "before the plan":
        change(tensors)
    plan = lora.plan(model, [(opened, 1.0)])
    if moment == "before the plan is applied":
        change(tensors)
    plan.apply()
    assert same(bits(model), wanted)


@pytest.mark.parametrize("change", [vanish, replaced])
def test_a_file_that_vanishes_or_is_replaced_is_read_to_its_end(model, path, tmp_path, change):
    """Never the header of one file and the data of another."""
    lora.compose(model, [(path, 1.0)])
    wanted = bits(model)
    lora.reset(model)
    opened = lora.open_lora(path)
    other = producers.make("peft", "qwen-image", rank=8, dims=trees.QWEN_DIMS, seed=1).write(tmp_path / "other")
    change(path, *[other][:change is replaced])
    lora.compose(model, [(opened, 1.0)])
    assert same(bits(model), wanted)


def test_a_plan_needs_its_files_no_more(model, path):
    lora.compose(model, [(path, 1.0)])
    wanted = bits(model)
    lora.reset(model)
    plan = lora.plan(model, [(path, 1.0)])
    shrink(path)
    plan.apply()
    assert same(bits(model), wanted)


def test_a_composition_needs_its_files_no_more(model, path):
    lora.compose(model, [(lora.open_lora(path), 1.0)])
    before = bits(model)
    os.truncate(path, 0)
    lora.set_strengths(model, [0.25])
    lora.set_strengths(model, [1.0])
    assert same(bits(model), before)


@linux
def test_nothing_stays_mapped_or_open_after_a_composition(model, path):
    lora.compose(model, [(path, 1.0)])
    gc.collect()
    assert "style.safetensors" not in Path("/proc/self/maps").read_text()
    descriptors = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    assert not [name for name in descriptors if "style.safetensors" in name]


@linux
def test_a_file_is_mapped_while_nobody_writes_to_it_and_read_otherwise(model, path, monkeypatch):
    seen = []
    monkeypatch.setattr(mapping._Mappings, "_map", lambda self, stream: seen.append(mapped(self, stream)) or seen[-1])
    lora.compose(model, [(path, 1.0)])
    wanted = bits(model)
    with open(path, "r+b"):
        lora.compose(model, [(path, 1.0)])
    assert [data is not None for data in seen] == [True, False]
    assert same(bits(model), wanted)


mapped = mapping._Mappings._map


CHILD = """
    import os, subprocess, sys
    sys.path[:0] = {paths}
    import torch, trees
    from qpatch import lora

    def cut(done, total):
        # Another program, while the factors of the mapped file are being packed.
        if done == 1:
            others.append(subprocess.Popen([sys.executable, "-c", "import os; os.truncate({path!r}, 0)"]))

    others, model = [], trees.qwen()
    report = lora.compose(model, [({path!r}, 1.0)], progress=cut)
    print(report.files[0].applied, others[0].wait(30), os.path.getsize({path!r}))
"""


def run(code, path):
    paths = [str(HERE.parent / "unit" / "lora")]
    code = textwrap.dedent(code).format(path=str(path), paths=paths)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@linux
def test_a_program_that_truncates_the_file_in_the_middle_of_a_composition_waits_for_its_end(path):
    done = run(CHILD, path)
    assert (done.returncode, done.stdout.split()) == (0, ["20", "0", "0"]), done.stderr


STORM = """
    import os, sys, threading
    sys.path[:0] = {paths}
    import torch, trees
    from qpatch import lora
    from qpatch.lora.conversion import FORMATS, convert
    from qpatch.lora.inspection import measure, survey

    whole, stop, seen = open({path!r}, "rb").read(), threading.Event(), set()

    def rewrite():
        while not stop.is_set():
            with open({path!r}, "wb") as out:
                out.write(whole[:len(whole) // 2])
                out.flush()
                out.write(whole[len(whole) // 2:])

    model = trees.qwen()
    writer = threading.Thread(target=rewrite)
    writer.start()
    for use in [lambda: lora.compose(model, [({path!r}, 1.0)]), lambda: measure(survey({path!r})).reader.close(),
                lambda: convert(lora.open_lora({path!r}), FORMATS["nunchaku"])] * 30:
        try:
            use()
        except lora.LoraError as error:
            assert error.file == "style.safetensors", error
            seen.add(type(error).__name__)
    stop.set()
    writer.join()
    print("alive", *sorted(seen))
"""


def test_a_file_that_is_rewritten_again_and_again_never_ends_the_process(path):
    done = run(STORM, path)
    assert done.returncode == 0 and done.stdout.startswith("alive"), (done.returncode, done.stderr)
