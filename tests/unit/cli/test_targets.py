"""What ``qpatch status`` says of hooks whose target nobody has imported."""

import sys

import pytest

from qpatch import catalogue
from qpatch.cli import importing, status
from qpatch.doctor import targets

ZIMAGE = ("def fuse_to_svdquant_linear(): ...\nclass ComfyNunchakuZImageAttention: ...\n"
          "def add_comfy_cast_weights_attr(): ...\n")
LAZY, FUSE = catalogue.named("lazy-linear"), catalogue.named("zimage-fuse")


def place(hook, context, pattern=None):
    return next(found for found in targets.find(hook, context) if pattern in (None, found.pattern))


def test_an_installed_target_is_named_with_its_version_and_file(machine):
    machine.nunchaku("1.2.1")
    found = place(LAZY, machine.context(), "nunchaku.models.linear")
    assert found.file == machine.site / "nunchaku" / "models" / "linear.py"
    assert found.sentence(live=True) == "nunchaku 1.2.1 is installed; it is patched when it is imported"
    assert "will NOT be patched" in found.sentence(live=False)


def test_several_targets_of_one_package_are_one_sentence(machine, monkeypatch, capsys):
    machine.nunchaku("1.2.1")
    machine.write("site-packages/nunchaku/models/utils.py")
    monkeypatch.setattr("qpatch.doctor.context.Context.here", lambda comfyui=(): machine.context())
    monkeypatch.setattr("qpatch.states.live", lambda: True)
    report = status.collect()
    row = next(row for row in report["hooks"] if row["hook"] == "lazy-linear")
    assert row["explanation"] == "nunchaku 1.2.1 is installed; it is patched when it is imported"
    assert [place["module"] for place in row["installed"]] == ["nunchaku.models.linear", "nunchaku.models.utils"]


def test_a_target_that_is_not_there_is_said_not_to_be(machine):
    assert place(LAZY, machine.context()).sentence(live=True).endswith("is not here: nothing to mend")


def test_another_package_of_the_targets_name_is_told_apart(machine):
    machine.write("site-packages/nunchaku/__init__.py")
    found = place(LAZY, machine.context(), "nunchaku.models.linear")
    assert found.file is None
    assert found.sentence(live=True).endswith("nunchaku has none of what this hook mends")


def test_without_a_comfyui_folder_node_packs_are_not_said_to_be_absent(machine, monkeypatch):
    monkeypatch.chdir(machine.site)
    assert "were not looked at" in place(FUSE, machine.context()).sentence(live=True)


def test_a_node_pack_is_found_by_what_its_module_defines(machine):
    machine.pack("any folder")
    machine.pack("lookalike", name="other")
    machine.write("ComfyUI/custom_nodes/lookalike/models/zimage.py", "class NunchakuZImageDiTLoader: ...\n")
    assert place(FUSE, machine.with_comfyui()).file is None
    file = machine.write("ComfyUI/custom_nodes/any folder/models/zimage.py", ZIMAGE)
    assert place(FUSE, machine.with_comfyui()).file == file


def test_a_disabled_node_pack_is_not_said_to_be_patched(machine):
    machine.pack("ComfyUI-nunchaku.disabled")
    machine.write("ComfyUI/custom_nodes/ComfyUI-nunchaku.disabled/models/zimage.py", ZIMAGE)
    assert place(FUSE, machine.with_comfyui()).file is None


@pytest.fixture
def clean_modules(monkeypatch, machine):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    # Only what was made up: a hook may have imported torch, which cannot be imported a second time.
    ours = [name for name, module in sys.modules.items()
            if str(machine.folder) in (getattr(module, "__file__", None) or "")]
    for name in ours:
        del sys.modules[name]


def test_a_pack_is_imported_under_the_name_that_comfyui_gives_it_without_its_init(machine, clean_modules, capsys):
    home = machine.pack("pack.with.dots")
    (home / "__init__.py").write_text("raise SystemExit('ran')\n")
    machine.write("ComfyUI/custom_nodes/pack.with.dots/models/__init__.py", "print('a banner')\n")
    machine.write("ComfyUI/custom_nodes/pack.with.dots/models/zimage.py", ZIMAGE)
    found = targets.Place("*.models.zimage", "pack", home / "models" / "zimage.py", home)
    assert importing.import_targets([found], None, lazy=False) == {}
    assert str(home).replace(".", "_x_") + ".models.zimage" in sys.modules
    assert capsys.readouterr() == ("", "a banner\n")


def test_a_target_that_cannot_be_imported_is_reported_with_its_error(machine, clean_modules):
    home = machine.pack()
    file = machine.write("ComfyUI/custom_nodes/ComfyUI-nunchaku/models/zimage.py", "import no_such_module_of_mine\n")
    found = targets.Place("*.models.zimage", "pack", file, home)
    errors = importing.import_targets([found], None, lazy=False)
    assert errors == {str(file): "ModuleNotFoundError: No module named 'no_such_module_of_mine'"}


def test_comfyui_is_told_to_stay_on_the_cpu_and_what_its_linears_do(machine, clean_modules):
    machine.program()
    machine.write("ComfyUI/comfy/cli_args.py", "class args: cpu = False\n")
    machine.write("ComfyUI/comfy/memory_management.py", "aimdo_enabled = False\n")
    assert importing.import_targets([], machine.comfyui, lazy=True) == {}
    assert sys.modules["comfy.cli_args"].args.cpu is True
    assert sys.modules["comfy.memory_management"].aimdo_enabled is True


@pytest.mark.parametrize(("state", "code"), [
    ("waiting", 0), ("applied", 0), ("not-needed", 0), ("disabled", 0), ("failed", 1), ("lost", 1), ("incompatible", 1),
])
def test_the_exit_code_of_status_is_1_where_somebody_should_look(monkeypatch, state, code, capsys):
    monkeypatch.setattr("qpatch.states.live", lambda: True)
    row = {"hook": "h", "state": state, "explanation": "why", "mends": "", "targets": []}
    monkeypatch.setattr("qpatch.states.snapshot", lambda: [dict(row)])
    from qpatch import cli

    assert cli.main(["status"]) == code
    assert "why" in capsys.readouterr().out or state == "waiting"


def met(state, *targets, explanation="it lacks a name"):
    return {"state": state, "explanation": explanation, "targets": [{"state": each} for each in targets]}


@pytest.mark.parametrize(("hook", "said"), [
    (met("applied", "applied"), "mended in nunchaku 1.2.1; before: it lacks a name"),
    (met("applied", "applied", "not-needed", "applied"), "mended in nunchaku 1.2.1, 2 modules"),
    (met("incompatible", "applied", "incompatible"), "nunchaku 1.2.1: it lacks a name"),
])
def test_a_hook_that_met_its_target_is_explained_with_the_version_of_it(hook, said):
    assert status._of_met(hook, "nunchaku 1.2.1") == said


def test_what_a_hook_says_of_living_objects_is_shown_where_it_has_patched_several_modules(monkeypatch):
    hook = {"hook": "quant-lora", **met("applied", "applied", "applied")}
    monkeypatch.setattr("qpatch.states.details", lambda name: ["3 layers beside"] if name == "quant-lora" else [])
    assert status._with_places(hook, [], {}, True)["explanation"] == "mended, 2 modules; 3 layers beside"


def test_status_shows_the_error_of_start_up_and_unknown_switches(monkeypatch, capsys):
    monkeypatch.setattr("qpatch.activation_error", RuntimeError("at start"))
    monkeypatch.setattr("qpatch.states.live", lambda: False)
    monkeypatch.setenv("QPATCH_DISABLE", "lazy-liner")
    from qpatch import cli

    assert cli.main(["status"]) == 1
    shown = capsys.readouterr().out
    assert "RuntimeError: at start" in shown and "QPATCH_DISABLE=lazy-liner" in shown and "did you mean" in shown
    assert status.collect()["activation_error"] == "RuntimeError: at start"
