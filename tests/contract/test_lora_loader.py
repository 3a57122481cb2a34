"""The same on real checkouts of ComfyUI, ComfyUI-nunchaku and nunchaku, kernels emulated in float."""

import pytest
from emulation import world
from emulation.cases import Cases
from emulation.effect import Pairs
from emulation.fixtures import clip, count_calls  # noqa: F401
from emulation.life import LifeCases
from emulation.merging import MergingCases
from emulation.surroundings import SurroundingCases
from emulation.users import UserCases
from emulation.ways_in import WaysInCases

import qpatch

pytestmark = [pytest.mark.comfyui, pytest.mark.nunchaku,
              pytest.mark.skipif(world.missing() is not None, reason=f"{world.missing()} is not set")]


@pytest.fixture(scope="module")
def pairs():
    qpatch.activate()
    world.enter(world.checkouts())
    yield Pairs()


@pytest.fixture
def register():
    """What a sampler does with the hooks of its conditioning, before it loads the model."""
    import comfy.hooks

    target = comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model)
    return lambda patcher, hooks: patcher.register_all_hook_patches(hooks, target, {}, comfy.hooks.HookGroup())


class TestEffectOnCheckouts(Cases):
    pass


class TestLifeOnCheckouts(LifeCases):
    pass


class TestSurroundingsOnCheckouts(SurroundingCases):
    pass


class TestWaysInOnCheckouts(WaysInCases):
    pass


class TestMergingOnCheckouts(MergingCases):
    pass


class TestUsersOnCheckouts(UserCases):
    pass
