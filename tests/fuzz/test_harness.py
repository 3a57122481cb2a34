"""The harness sees what it is there to see, and the nightly command says it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuzz import harness as under_test
from fuzz.cases import Case
from fuzz.container import table_of, whole
from fuzz.harness import Broken, Hang, Harness
from fuzz.tensors import Contents, example
from qpatch import lora

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return Harness(tmp_path_factory.mktemp("harness"))


@pytest.fixture
def case():
    groups, _ = example("peft", "qwen-image", "lora")
    tensors = {key: stored for group in list(groups.values())[:3] for key, stored in group.items()}
    return Case(whole(*table_of(Contents(tensors))), model=0, strength=1.0, metadata_alpha=False, trainer=False,
                beside=False)


def test_a_good_file_is_applied(harness, case):
    harness.check(case)
    assert harness.seen == {"applied": 1}


def test_a_model_that_is_not_put_back_is_seen(harness, case, monkeypatch):
    monkeypatch.setattr(under_test.lora, "reset", lambda root: None)
    with pytest.raises(Broken, match="other objects"):
        harness.check(case)


def test_a_weight_that_was_written_to_is_seen(harness, case, monkeypatch):
    def inspect(self, keys):
        harness.models[0].root.img_in.weight.data[0, 0] += 1

    monkeypatch.setattr(Harness, "_inspect", inspect)
    with pytest.raises(Broken, match="img_in.weight has changed"):
        harness.check(case)


@pytest.mark.parametrize("error, said", [
    (lora.FileError("it is bad"), "does not name the file"),
    (lora.ShapeError("it is bad", file=under_test.NAME), "does not name the key"),
    (lora.ShapeError("it is bad", file=under_test.NAME, key="nowhere"), "not in the file"),
])
def test_a_refusal_that_does_not_say_what_is_at_fault_is_seen(harness, case, monkeypatch, error, said):
    def plan(*_, **__):
        raise error

    monkeypatch.setattr(under_test.lora, "plan", plan)
    with pytest.raises(Broken, match=said):
        harness.check(case)


def test_another_exception_comes_through(harness, case, monkeypatch):
    monkeypatch.setattr(under_test, "measure", lambda found: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        harness.check(case)


def test_a_file_that_takes_too_long_is_seen(harness, case, monkeypatch):
    def endless(found):
        while True:
            pass

    monkeypatch.setattr(under_test, "SECONDS", 0.2)
    monkeypatch.setattr(under_test, "measure", endless)
    with pytest.raises(Hang):
        harness.check(case)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of the memory is reset by Linux only")
def test_a_file_that_takes_too_much_memory_is_seen(harness, case, monkeypatch):
    monkeypatch.setattr(under_test, "measure", lambda found: torch.ones(60 * 2**20))
    with pytest.raises(Broken, match="took .* MiB"):
        harness.check(case)


def test_the_nightly_command_tries_the_same_files_for_the_same_seed(tmp_path):
    command = [sys.executable, HERE / "nightly.py", "--inputs", "40", "--seed", "5", "--out", tmp_path / "out"]
    runs = [subprocess.run(command, capture_output=True, text=True, timeout=300) for _ in range(2)]
    counts = [run.stdout.splitlines()[-2] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stdout + runs[0].stderr
    assert counts[0] == counts[1] and "applied" in counts[0] and not (tmp_path / "out").exists()
