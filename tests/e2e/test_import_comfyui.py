"""Targets inside ComfyUI: a node pack that is named by its folder, and other packs that patch the same things."""

import pytest

PATTERN = "*.models.zimage"
NAMES = ("fuse", "Attention", "f")

TARGET = "def fuse():\n    pass\nclass Attention:\n    pass\ndef f(x):\n    return x\n"

# As ComfyUI does it: the folder's path with every dot replaced, and no finder asked for the package itself.
LOADER = """
    import importlib.util, os, sys

    def load(folder, name=None):
        name = name or os.path.abspath(folder).replace(".", "_x_")
        spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
"""


INIT = "from .nodes.models.zimage import answer\nfrom .nodes.models import zimage as node\n"
NODE = ("from ...models.zimage import f as model\nfrom ...models import zimage as target\n"
        "def answer(x):\n    return model(x)\n")


def pack(bench, folder, init=INIT, node=NODE, model=TARGET):
    """A node pack: a loader node ``nodes.models.zimage`` that uses the model code ``models.zimage``."""
    files = {"__init__": init, "nodes/__init__": "", "nodes/models/__init__": "", "nodes/models/zimage": node,
             "models/__init__": "", "models/zimage": model}
    for path, text in files.items():
        file = bench.folder / folder / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def comfyui(bench):
    bench.write(comfyui=LOADER)
    bench.watch(PATTERN, defines=NAMES)
    bench.prelude += "from comfyui import load\n"
    return bench


@pytest.mark.parametrize("folder", [
    "ComfyUI-nunchaku", "comfyui_nunchaku", "ComfyUI nunchaku", "nunchaku.v1.2", "comfyui-nunchaku@1.2.1", "nœud-星",
    ".hidden", "C:\\ComfyUI\\custom_nodes\\nunchaku", "models",
])
def test_a_pack_in_a_folder_of_any_name_is_mended(each_python, comfyui, folder):
    pack(comfyui, folder)
    comfyui.run(each_python, f"""
        node = load({folder!r})
        assert node.answer(1) == 2
        (name, state), = probe.states().items()
        assert name == node.__name__ + ".models.zimage" and state == "applied", probe.states()
        assert node.node.target.__spec__.loader.path == node.node.target.__file__
    """, flags=["-X", "utf8"])


def test_the_loader_node_of_the_same_tail_is_not_taken_for_the_target(each_python, comfyui):
    pack(comfyui, "pack", node="from ...models.zimage import f as model\ndef answer(x):\n    return model(x)\n")
    comfyui.run(each_python, """
        node = load("pack")
        assert [name.replace(node.__name__, "") for name in probe.states()] == [".models.zimage"]
        assert not hasattr(node.node, "f")
    """)


def test_the_order_of_packs_does_not_matter(each_python, comfyui):
    pack(comfyui, "nunchaku")
    listing = "seen = [name for name in __import__('sys').modules if name.endswith('.models.zimage')]\n"
    comfyui.write(**{"first.__init__": listing})
    for order in (["first", "nunchaku"], ["nunchaku", "first"]):
        comfyui.run(each_python, f"""
            nodes = {{name: load(name) for name in {order!r}}}
            assert nodes["nunchaku"].answer(1) == 2
        """)


def test_a_pack_that_is_loaded_under_two_names_is_mended_under_both_once(each_python, comfyui):
    pack(comfyui, "nunchaku")
    comfyui.run(each_python, """
        import importlib
        by_path, by_name = load("nunchaku"), importlib.import_module("nunchaku")
        assert by_path.node.target is not by_name.node.target
        assert by_path.answer(1) == by_name.answer(1) == 2
        assert set(probe.states().values()) == {"applied"} and len(probe.states()) == 2
    """)


def test_a_pack_that_imports_its_model_code_only_when_a_node_runs(each_python, comfyui):
    pack(comfyui, "nunchaku", init="def answer(x):\n    from .models import zimage\n    return zimage.f(x)\n")
    comfyui.run(each_python, """
        node = load("nunchaku")
        assert probe.states() == {}
        assert node.answer(1) == 2
        assert set(probe.states().values()) == {"applied"}
    """)


@pytest.mark.parametrize("defines, state", [("f = abs\n", "incompatible"), ("g = abs\n", None)])
def test_a_module_of_another_pack_with_the_same_tail(each_python, comfyui, defines, state):
    pack(comfyui, "other", init="from .models import zimage as model\n", model=defines)
    comfyui.run(each_python, f"""
        other = load("other")
        assert list(probe.states().values()) == {[state] if state else []}
        assert getattr(other.model, "f", abs) is abs
    """)


def test_a_core_module_that_is_loaded_again_under_its_bare_name_stays_as_it_is(each_python, bench):
    bench.write(**{"comfy.ops": "def f(x):\n    return x\n"})
    bench.watch("comfy.ops")
    bench.run(each_python, """
        import sys
        sys.path.insert(0, "comfy")
        import comfy.ops, ops
        assert (comfy.ops.f(1), ops.f(1)) == (2, 1)
        assert list(probe.states()) == ["comfy.ops"]
    """)


def test_a_patch_survives_that_comfyui_puts_back_what_it_saved_before_the_nodes_were_loaded(each_python, bench):
    bench.write(**{"comfy.model_management": "def f(x):\n    return x\n"})
    bench.watch("comfy.model_management")
    bench.run(each_python, """
        import comfy.model_management as management
        saved = management.f
        management.f = lambda x: -1
        assert probe.states() == {"comfy.model_management": "lost"}
        management.f = saved
        assert management.f(1) == 2
        assert probe.states() == {"comfy.model_management": "applied"}
    """)


WRAPPERS = {
    "with functools.wraps": "import functools, pkg.target\noriginal = pkg.target.f\n"
                            "@functools.wraps(original)\ndef g(x):\n    return original(x) * 10\npkg.target.f = g\n",
    "with a closure": "import pkg.target\n"
                      "def patch(original):\n    def g(x):\n        return original(x) * 10\n    return g\n"
                      "pkg.target.f = patch(pkg.target.f)\n",
    "with a global variable": "import pkg.target\n_original = pkg.target.f\n"
                              "def g(x):\n    return _original(x) * 10\npkg.target.f = g\n",
    "with a default": "import pkg.target\n"
                      "def g(x, original=pkg.target.f):\n    return original(x) * 10\npkg.target.f = g\n",
    "twice": "import pkg.target\ndef patch(original):\n    return lambda x: original(x)\n"
             "pkg.target.f = patch(patch(lambda x, original=pkg.target.f: original(x) * 10))\n",
}


@pytest.mark.parametrize("how", WRAPPERS)
def test_a_pack_that_wraps_our_patch_later_leaves_it_in_effect_and_is_named(each_python, bench, how):
    bench.write(**{"pkg.target": "def f(x):\n    return x\n", "late": WRAPPERS[how]})
    bench.watch("pkg.target")
    told = bench.run(each_python, """
        import pkg.target, late, qpatch
        assert pkg.target.f(1) == 20
        from qpatch import catalogue, states
        (attempt,) = states.attempts(catalogue.named("probe"))
        for patch in attempt.patches:
            patch.revert()
        qpatch.activate()
        assert pkg.target.f(1) == 20 and attempt.state == "applied"
        print(attempt.explanation)
    """)
    assert "called through late." in told


def test_a_pack_that_replaces_our_patch_later_is_named_as_the_one_who_stands_there(each_python, bench):
    bench.write(**{"pkg.target": "def f(x):\n    return x\n", "late": """
        import functools, pkg.target
        def usurper(x):
            return -x
        usurper.__module__, usurper.__qualname__ = "pkg.target", "f"
        pkg.target.f = usurper
    """})
    bench.watch("pkg.target")
    told = bench.run(each_python, """
        import pkg.target, late
        from qpatch import catalogue, states
        print(*states.overall(catalogue.named("probe")))
    """)
    assert told == "lost pkg.target.f is now late.usurper"


def test_a_pack_that_peels_our_patch_off_makes_it_lost_and_the_next_import_mends_again(each_python, bench):
    bench.write(**{"pkg.target": "def f(x):\n    return x\n"})
    bench.watch("pkg.target")
    bench.run(each_python, """
        import importlib, sys
        import pkg.target
        while hasattr(pkg.target.f, "__wrapped__"):
            pkg.target.f = pkg.target.f.__wrapped__
        assert probe.states() == {"pkg.target": "lost"}
        del sys.modules["pkg.target"]
        assert importlib.import_module("pkg.target").f(1) == 2
        assert probe.states() == {"pkg.target": "applied"}
    """)
