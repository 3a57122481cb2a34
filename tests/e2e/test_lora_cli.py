"""The file tools of the installed wheel, as a person runs them: pipes, terminals, interrupts."""

import json
import os
import signal
import struct
import subprocess
import time

import producers
import pytest

#: A bar appears at once, and not after half a second.
AT_ONCE = ("import sys, qpatch.lora.progress as progress; progress._DELAY = 0;"
           "from qpatch.cli import main; sys.exit(main(sys.argv[1:]))")


@pytest.fixture
def folder(tmp_path):
    for name, seed in (("style", 1), ("other", 2)):
        producers.make("musubi", "z-image", rank=3, seed=seed).write(tmp_path / f"{name}.safetensors")
    return tmp_path


def qpatch(env, folder, *words, **how):
    return env.command("-m", "qpatch", *words, cwd=folder, **how)


def test_convert_merge_diff_and_inspect_work_together(installed_with_torch, folder):
    env = installed_with_torch
    qpatch(env, folder, "lora", "convert", "style.safetensors", "-o", "fused.safetensors", "--to", "nunchaku")
    qpatch(env, folder, "lora", "merge", "fused.safetensors:0.8", "other.safetensors:0.5", "-o", "stack.safetensors")
    done = qpatch(env, folder, "lora", "diff", "--json", "stack.safetensors",
                  "style.safetensors:0.8+other.safetensors:0.5")
    assert json.loads(done.stdout)["total"]["relative_difference"] < 1e-6 and done.stderr == ""
    shown = qpatch(env, folder, "lora", "inspect", "stack.safetensors", "--plot", "stack.html")
    assert "for           Z-Image" in shown.stdout and shown.stderr == ""
    assert (folder / "stack.html").read_text().startswith("<!DOCTYPE html>")


def test_nothing_but_the_output_appears_in_the_folder(installed_with_torch, folder):
    before = {path.name for path in folder.iterdir()}
    qpatch(installed_with_torch, folder, "lora", "convert", "style.safetensors", "-o", "out.safetensors", "--to",
           "kohya")
    assert {path.name for path in folder.iterdir()} - before == {"out.safetensors"}


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are POSIX")
@pytest.mark.parametrize("words", [["inspect", "style.safetensors"], ["diff", "style.safetensors", "other.safetensors"],
                                   ["convert", "style.safetensors", "-o", "out.safetensors", "--to", "comfyui"],
                                   ["merge", "style.safetensors", "other.safetensors", "-o", "out.safetensors"]])
def test_a_bar_is_shown_on_a_terminal_and_only_there(installed_with_torch, folder, words):
    pytest.importorskip("tqdm")
    import fcntl
    import pty
    import termios

    command = [installed_with_torch.python, "-c", AT_ONCE, "lora", *words]
    parent, child = pty.openpty()
    # A terminal of no width gets no bar.
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=child, timeout=120)
    assert done.returncode == 0 and b"%|" in os.read(parent, 100_000)
    os.close(child)
    os.close(parent)
    (folder / "out.safetensors").unlink(missing_ok=True)
    quiet = subprocess.run(command, cwd=folder, capture_output=True, timeout=120)
    assert quiet.returncode == 0 and quiet.stderr == b"" and quiet.stdout


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_a_conversion_quietly_and_leaves_nothing(installed_with_torch, folder, number, code):
    # A test run in the background of a shell hands on that it ignores interrupts.
    slow = ("import signal, time, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from qpatch.lora.conversion import result; from qpatch.cli import main\n"
            "save = result.save_file\n"
            "def slowly(*given):\n    save(*given)\n    print('half', flush=True)\n    time.sleep(60)\n"
            "result.save_file = slowly\nsys.exit(main(sys.argv[1:]))")
    before = {path.name for path in folder.iterdir()}
    running = subprocess.Popen([installed_with_torch.python, "-c", slow, "lora", "convert", "style.safetensors", "-o",
                                "out.safetensors", "--to", "kohya"], cwd=folder, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "half\n"
    time.sleep(0.2)
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert running.returncode == code and err == "" and {path.name for path in folder.iterdir()} == before


def test_a_file_of_a_text_encoder_only_is_described_and_not_drawn(installed_with_torch, tmp_path):
    import torch
    from safetensors.torch import save_file

    save_file({"lora_te_layers_0.lora_down.weight": torch.ones(2, 3)}, tmp_path / "te.safetensors")
    done = qpatch(installed_with_torch, tmp_path, "lora", "inspect", "te.safetensors")
    assert "a text encoder only" in done.stdout
    done = qpatch(installed_with_torch, tmp_path, "lora", "inspect", "te.safetensors", "--plot", "x.html", check=False)
    assert done.returncode == 1 and "nothing to draw" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_log_on_standard_input_of_the_installed_command(installed, tmp_path):
    import failures

    done = subprocess.run([installed.python, "-m", "qpatch", "doctor", "--log", "-"], input=failures.LOGS["rotary"],
                          capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "comfy-compat-rotary mends this" in done.stdout
