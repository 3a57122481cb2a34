"""The same on real checkouts of ComfyUI, ComfyUI-nunchaku and nunchaku, kernels emulated in float."""

import pytest

import qpatch
from emulation import world
from emulation.cases import Cases
from emulation.effect import Pairs

pytestmark = [pytest.mark.comfyui, pytest.mark.nunchaku,
              pytest.mark.skipif(world.missing() is not None, reason=f"{world.missing()} is not set")]


@pytest.fixture(scope="module")
def pairs():
    qpatch.activate()
    world.enter(world.checkouts())
    yield Pairs()


class TestOnCheckouts(Cases):
    pass
