"""The nunchaku wheel against the torch, Python and diffusers that are installed."""

import pytest

from qpatch.doctor import nunchaku


def test_no_nunchaku_is_a_note_and_nothing_is_compared(machine):
    context = machine.context()
    assert nunchaku.nunchaku(context).verdict == "note"
    assert nunchaku.nunchaku_build(context).verdict == nunchaku.diffusers(context).verdict == "skipped"


def test_the_other_project_of_that_name_is_recognised_by_what_it_lacks(machine):
    machine.distribution("nunchaku", "0.16.1")
    machine.write("site-packages/nunchaku/__init__.py", "from .nunchaku import Nunchaku\n")
    machine.write("site-packages/nunchaku/nunchaku.py", "class Nunchaku: ...\n")
    verdict = nunchaku.nunchaku(machine.context())
    assert verdict.verdict == "problem" and "0.16.1" in verdict.found and "another project" in verdict.found
    assert verdict.todo.startswith("pip uninstall nunchaku")
    assert nunchaku.nunchaku_build(machine.context()).verdict == "skipped"


@pytest.mark.parametrize(("wheel", "torch", "cuda", "said"), [
    ("1.2.1+cu13.0torch2.10", "2.10.0+cu130", "13.0", None),
    ("1.2.1+cu12.8torch2.10", "2.10.1+cu128", "12.8", None),
    ("1.0.0+torch2.8", "2.8.0+cpu", None, None),
    ("1.2.1", "2.13.0", "13.0", None),
    ("1.2.1+cu13.0torch2.10", "2.11.0+cu130", "13.0", "built for torch 2.10, installed is torch 2.11.0+cu130"),
    ("1.2.1+cu13.0torch2.1", "2.10.0+cu130", "13.0", "built for torch 2.1, installed is torch 2.10.0+cu130"),
    ("1.2.1+cu13.0torch2.10", "2.10.0+cu128", "12.8", "built for CUDA 13, torch 2.10.0+cu128 for CUDA 12.8"),
    ("1.2.1+cu13.0torch2.10", "2.10.0+cpu", None, "built for CUDA 13, torch 2.10.0+cpu without CUDA"),
])
def test_the_torch_and_cuda_in_the_wheels_version_are_compared(machine, wheel, torch, cuda, said):
    machine.nunchaku(wheel)
    machine.torch(torch, cuda)
    verdict = nunchaku.nunchaku_build(machine.context())
    assert verdict.verdict == ("problem" if said else "ok")
    assert said is None or said in verdict.found and "whatever qpatch does" in verdict.found


@pytest.mark.parametrize(("tags", "fits"), [
    (["cp312-cp312-win_amd64"], True), (["cp311-cp311-win_amd64"], False), (["py3-none-any"], True),
    (["cp310-abi3-linux_x86_64"], True), ([], True),
])
def test_the_wheels_tags_are_compared_with_this_python(machine, tags, fits):
    machine.nunchaku(tags=tags)
    verdict = nunchaku.nunchaku_build(machine.context(python=(3, 12)))
    assert verdict.verdict == ("ok" if fits else "problem")
    assert fits or "cp311" in verdict.found and "3.12" in verdict.found


def test_an_extension_module_for_another_python_is_named(machine, monkeypatch):
    monkeypatch.setattr(nunchaku, "EXTENSION_SUFFIXES", [".cpython-312-x86_64-linux-gnu.so", ".abi3.so", ".so"])
    machine.nunchaku()
    file = machine.write("site-packages/nunchaku/_C.cpython-311-x86_64-linux-gnu.so")
    verdict = nunchaku.nunchaku_build(machine.context(python=(3, 12)))
    assert verdict.verdict == "problem" and file.name in verdict.found
    machine.write("site-packages/nunchaku/_C.cpython-312-x86_64-linux-gnu.so")
    assert nunchaku.nunchaku_build(machine.context(python=(3, 12))).verdict == "ok"


def test_a_diffusers_without_the_classes_that_nunchaku_imports_is_named_with_the_minimum(machine):
    machine.nunchaku(requires=["diffusers>=0.36"])
    machine.write("site-packages/nunchaku/models/zimage.py",
                  "from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel\n")
    machine.distribution("diffusers", "0.35.2")
    machine.write("site-packages/diffusers/__init__.py")
    machine.write("site-packages/diffusers/models/transformers/__init__.py")
    verdict = nunchaku.diffusers(machine.context())
    assert verdict.verdict == "problem"
    assert "diffusers 0.35.2" in verdict.found and "transformer_z_image" in verdict.found
    assert verdict.todo == 'pip install -U "diffusers>=0.36"'
    machine.write("site-packages/diffusers/models/transformers/transformer_z_image.py",
                  "class ZImageTransformer2DModel: ...\n")
    assert nunchaku.diffusers(machine.context()).verdict == "warn"


def test_no_diffusers_at_all_stops_nunchaku_as_well(machine):
    machine.nunchaku()
    verdict = nunchaku.diffusers(machine.context())
    assert verdict.verdict == "problem" and '"diffusers>=0.36"' in verdict.todo


def test_torch_is_described_from_its_files(machine):
    assert nunchaku.torch(machine.context()).verdict == "warn"
    machine.torch("2.10.0+cu130")
    assert nunchaku.torch(machine.context()).found == "torch 2.10.0+cu130, built for CUDA 13.0"
