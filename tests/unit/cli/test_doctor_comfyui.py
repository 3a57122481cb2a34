"""A ComfyUI folder, its node packs and its dynamic VRAM, read from disk."""

import sys
from types import ModuleType

import pytest

from qpatch.doctor import comfyui, dynamic_vram, node_packs

ZIMAGE = ("from nunchaku.models.linear import SVDQW4A4Linear\nfrom comfy.model import NextDiT\n"
          "def fuse_to_svdquant_linear(): ...\nclass ComfyNunchakuZImageAttention: ...\n"
          "def add_comfy_cast_weights_attr(): ...\n")


def test_the_version_of_a_comfyui_folder_comes_from_its_files(machine):
    assert comfyui.comfyui(machine.context()).verdict == "note"
    machine.program("0.33.0")
    assert comfyui.comfyui(machine.with_comfyui()).found == f"ComfyUI 0.33.0 in {machine.comfyui}"


def test_comfyui_beside_an_embedded_python_is_found_by_itself(machine):
    machine.program()
    assert comfyui.program(machine.context()) == machine.comfyui


def test_a_base_folder_without_the_program_is_looked_at_for_node_packs_only(machine):
    machine.pack()
    verdict = comfyui.comfyui(machine.with_comfyui())
    assert verdict.verdict == "warn" and "only custom_nodes" in verdict.found
    assert node_packs.nunchaku_pack(machine.with_comfyui()).verdict == "ok"


def test_companions_are_compared_with_what_this_comfyui_asks_for(machine):
    machine.program()
    machine.distribution("comfy-kitchen", "0.2.31")
    machine.distribution("comfy_aimdo", "0.4.9")
    verdict = comfyui.companions(machine.with_comfyui())
    assert verdict.verdict == "warn" and verdict.todo.endswith('pip install "comfy-aimdo==0.4.13"')
    machine.distribution("comfy_aimdo", "0.4.13")
    (machine.site / "comfy_aimdo-0.4.9.dist-info" / "METADATA").unlink()
    assert comfyui.companions(machine.with_comfyui()).verdict == "ok"


@pytest.mark.parametrize("folder", ["ComfyUI-nunchaku", "comfyui_nunchaku", "something else", "nunchaku@1.2.1"])
def test_the_pack_is_known_by_its_content_whatever_its_folder_is_called(machine, folder):
    machine.pack(folder)
    verdict = node_packs.nunchaku_pack(machine.with_comfyui())
    assert verdict.verdict == "ok" and "1.2.1" in verdict.found and folder in verdict.found


def test_the_pack_is_known_by_its_code_when_it_has_no_pyproject(machine):
    home = machine.pack(name="renamed-fork")
    assert node_packs.nunchaku_pack(machine.with_comfyui()).verdict == "note"
    machine.write("ComfyUI/custom_nodes/ComfyUI-nunchaku/models/zimage.py", ZIMAGE)
    assert node_packs.nunchaku_pack(machine.with_comfyui()).verdict == "ok"
    assert (home / "pyproject.toml").is_file()


def test_two_copies_of_the_pack_are_a_problem_unless_one_is_disabled(machine):
    machine.pack()
    machine.pack("ComfyUI-nunchaku-old.disabled")
    assert node_packs.nunchaku_pack(machine.with_comfyui()).verdict == "ok"
    machine.pack("ComfyUI-nunchaku-old", version="1.0.0")
    verdict = node_packs.nunchaku_pack(machine.with_comfyui())
    assert verdict.verdict == "problem" and "2 copies" in verdict.found and "ComfyUI-nunchaku-old" in verdict.found


@pytest.mark.parametrize("folder", ["ComfyUI-nunchaku.disabled", ".disabled/comfyui-nunchaku@1_2_1"])
def test_a_pack_that_is_disabled_by_its_folder_name_is_named(machine, folder):
    machine.pack(folder)
    verdict = node_packs.nunchaku_pack(machine.with_comfyui())
    assert verdict.verdict == "problem" and "disabled by its folder name" in verdict.found


def test_a_pack_that_imports_what_the_wheel_lacks_is_a_problem(machine):
    machine.pack()
    machine.write("ComfyUI/custom_nodes/ComfyUI-nunchaku/models/zimage.py",
                  "from nunchaku.models.embeddings import pack_rotemb\n")
    machine.nunchaku("1.0.1")
    verdict = node_packs.wheel_mismatch(machine.with_comfyui())
    assert verdict.verdict == "problem" and "nunchaku.models.embeddings (wanted by zimage.py)" in verdict.found
    machine.write("site-packages/nunchaku/models/embeddings.py", "def pack_rotemb(): ...\n")
    assert node_packs.wheel_mismatch(machine.with_comfyui()).verdict == "ok"


def test_a_wheel_below_the_minimum_that_the_pack_states_is_a_problem(machine):
    machine.pack()
    machine.nunchaku("0.3.2")
    verdict = node_packs.wheel_mismatch(machine.with_comfyui())
    assert verdict.verdict == "problem" and "needs nunchaku 1.0.0 or later, installed is 0.3.2" in verdict.found


def test_names_that_left_comfyui_are_found_and_those_that_qpatch_supplies_told_apart(machine, monkeypatch):
    machine.program()
    machine.pack()
    machine.write("ComfyUI/custom_nodes/ComfyUI-nunchaku/models/qwenimage.py",
                  "from comfy.ldm.qwen_image.model import apply_rotary_emb\n")
    model = machine.write("ComfyUI/comfy/ldm/qwen_image/model.py", "class QwenImage: ...\n")
    monkeypatch.setattr("qpatch.states.live", lambda: False)
    verdict = node_packs.pack_imports(machine.with_comfyui())
    assert verdict.verdict == "problem" and "apply_rotary_emb (wanted by qwenimage.py)" in verdict.found
    monkeypatch.setattr("qpatch.states.live", lambda: True)
    verdict = node_packs.pack_imports(machine.with_comfyui())
    assert verdict.verdict == "note" and "by comfy-compat-rotary" in verdict.found
    monkeypatch.setenv("QPATCH_DISABLE", "comfy-compat-rotary")
    assert node_packs.pack_imports(machine.with_comfyui()).verdict == "problem"
    model.write_text("def apply_rotary_emb(x, freqs): ...\n")
    assert node_packs.pack_imports(machine.with_comfyui()).verdict == "ok"


def test_other_packs_that_patch_the_same_places_are_noted(machine):
    machine.pack()
    assert node_packs.neighbours(machine.with_comfyui()).verdict == "ok"
    machine.pack("any-folder", name="ComfyUI-QwenImageLoraLoader", version="2.5.7")
    verdict = node_packs.neighbours(machine.with_comfyui())
    assert verdict.verdict == "note" and "2.5.7" in verdict.found


class TestDynamicVram:
    """"lazy Linear active: yes | no | unknown"."""

    @pytest.fixture
    def answer(self, machine, monkeypatch):
        monkeypatch.delitem(sys.modules, "comfy.memory_management", raising=False)
        machine.program()
        machine.write("site-packages/comfy_aimdo/__init__.py")
        machine.torch("2.10.0+cu130")
        return lambda **changes: dynamic_vram.decide(machine.with_comfyui(**changes))

    def test_yes_on_a_recent_comfyui_with_all_it_needs(self, answer):
        assert answer()[0] == "yes" and "--disable-dynamic-vram" in answer()[1]

    def test_no_without_comfy_aimdo(self, answer, machine):
        (machine.site / "comfy_aimdo" / "__init__.py").unlink()
        (machine.site / "comfy_aimdo").rmdir()
        assert answer() == ("no", "comfy-aimdo is not installed")

    @pytest.mark.parametrize(("torch", "cuda", "said"), [
        ("2.7.1+cu128", "12.8", "needs 2.8"), ("2.10.0+rocm7", None, "not built for NVIDIA"),
        ("2.13.0+cpu", None, "not built for NVIDIA"),
    ])
    def test_no_with_a_torch_that_does_not_do_it(self, answer, machine, torch, cuda, said):
        machine.torch(torch, cuda)
        assert answer()[0] == "no" and said in answer()[1]

    def test_windows_only_in_releases_whose_condition_names_it(self, answer, machine):
        machine.write("ComfyUI/comfy/ops.py",
                      "if (not comfy.model_management.WINDOWS\n        or not comfy.memory_management.aimdo_enabled\n"
                      "        or x):\n    pass\nself.comfy_need_lazy_init_bias = bias\n")
        assert answer()[0] == "no" and "Windows only" in answer()[1]
        assert answer(platform="win32")[0] == "yes"

    def test_no_in_a_comfyui_that_has_no_lazy_linear(self, answer, machine):
        machine.write("ComfyUI/comfy/ops.py", "class Linear: ...\n")
        assert answer() == ("no", "this ComfyUI has no lazy Linear")

    def test_only_on_request_in_releases_without_the_switch(self, answer, machine):
        machine.write("ComfyUI/comfy/cli_args.py", 'parser.add_argument("--fast")\n')
        assert "--fast" in answer()[1]

    @pytest.mark.parametrize("release", ["5.15.0-microsoft-standard-WSL2", "6.1.0-generic"])
    def test_wsl_matters_only_where_main_py_asks_for_it(self, answer, machine, monkeypatch, release):
        monkeypatch.setattr(dynamic_vram.platform, "uname", lambda: type("Uname", (), {"release": release}))
        assert answer()[0] == "yes"
        machine.write("ComfyUI/main.py", "if enables_dynamic_vram() and is_nvidia() and not is_wsl():\n    pass\n")
        assert answer()[0] == ("no" if "microsoft" in release else "yes")

    def test_unknown_without_a_comfyui_folder_or_without_torch(self, answer, machine, monkeypatch):
        (machine.site / "torch" / "version.py").unlink()
        assert answer() == ("unknown", "torch is not installed for this Python")
        monkeypatch.chdir(machine.site)
        (machine.comfyui / "main.py").unlink()
        assert answer()[0] == "unknown"

    @pytest.mark.parametrize(("flag", "expected"), [(True, "yes"), (False, "no")])
    def test_inside_comfyui_its_own_flag_is_the_answer(self, machine, monkeypatch, flag, expected):
        running = ModuleType("comfy.memory_management")
        running.aimdo_enabled = flag
        monkeypatch.setitem(sys.modules, "comfy.memory_management", running)
        assert dynamic_vram.decide(machine.context())[0] == expected
        assert f"lazy Linear active: {expected}" in dynamic_vram.lazy_linear(machine.context()).found

    def test_lazy_linears_without_qpatch_are_the_problem_that_people_have(self, answer, machine, monkeypatch):
        monkeypatch.setattr("qpatch.states.live", lambda: True)
        assert dynamic_vram.lazy_linear(machine.with_comfyui()).verdict == "ok"
        monkeypatch.setattr("qpatch.states.live", lambda: False)
        verdict = dynamic_vram.lazy_linear(machine.with_comfyui())
        assert verdict.verdict == "problem" and "'NoneType' object has no attribute 'dtype'" in verdict.found
