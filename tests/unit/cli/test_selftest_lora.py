"""The selftest's LoRA program, in a child interpreter as the selftest starts it."""

from qpatch.selftest import children


def test_the_lora_trial_needs_nothing_beyond_torch_and_safetensors(tmp_path):
    # A fresh environment with qpatch has no numpy: none of its dependencies asks for it.
    program = children.write_standins(tmp_path).with_name("lora.py")
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")

    seen = children.run(program, cwd=tmp_path)

    assert seen["restored"] and max(seen["errors"]) < 0.005
