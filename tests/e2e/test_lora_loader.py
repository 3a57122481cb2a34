"""LoRA nodes on tiny Nunchaku models in stand-ins for ComfyUI, ComfyUI-nunchaku and nunchaku, kernels emulated in float."""

import pytest

import qpatch
from emulation import world
from emulation.cases import Cases
from emulation.effect import Pairs


@pytest.fixture(scope="module")
def pairs():
    qpatch.activate()
    with world.standins():
        yield Pairs()


class TestOnStandins(Cases):
    pass
