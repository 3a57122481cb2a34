"""What the tests of the file tools share."""

import producers
import pytest

from qpatch import cli


@pytest.fixture
def command(capsys):
    """Run ``qpatch lora ...`` in this process: (exit code, standard output, standard error)."""

    def run(*words):
        code = cli.main(["lora", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def written(tmp_path):
    """Write a file as some producer does: (producers.Example, path)."""

    def write(producer="ai-toolkit", family="z-image", kind="lora", *, name="style.safetensors", **how):
        example = producers.make(producer, family, kind, **how)
        return example, example.write(tmp_path / name)

    return write
