"""LoRA nodes on tiny Nunchaku models: stand-ins for ComfyUI, its node pack and nunchaku, kernels emulated in float."""

import pytest
from emulation import world
from emulation.cases import Cases
from emulation.effect import Pairs
from emulation.fixtures import clip, count_calls  # noqa: F401
from emulation.life import LifeCases
from emulation.long_run import LongRunCases
from emulation.merging import MergingCases
from emulation.surroundings import SurroundingCases
from emulation.users import UserCases
from emulation.ways_in import WaysInCases

import qpatch


@pytest.fixture(scope="module")
def pairs():
    qpatch.activate()
    with world.standins():
        yield Pairs()


@pytest.fixture
def register():
    return lambda patcher, hooks: patcher.register_all_hook_patches(hooks)


class TestEffectOnStandins(Cases):
    pass


class TestLifeOnStandins(LifeCases):
    pass


class TestSurroundingsOnStandins(SurroundingCases):
    pass


class TestWaysInOnStandins(WaysInCases):
    pass


class TestMergingOnStandins(MergingCases):
    pass


class TestUsersOnStandins(UserCases):
    pass


class TestLongRunOnStandins(LongRunCases):
    pass
