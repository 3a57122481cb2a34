"""Repairs of ComfyUI-nunchaku's patchers: ``patcher_calls`` and ``qwen_moves``."""

import pytest


class Model:
    def __init__(self, **weights):
        self.__dict__.update(weights)
        self.moves = []
        self.diffusion_model = self

    def to_safely(self, device):
        self.moves.append(device)

    def state_dict(self):
        return {}


@pytest.fixture
def zimage(core, standin):
    return standin("compat/zimage_patcher.py", "pack.model_patcher.zimage")


@pytest.fixture
def common(core, standin):
    return standin("compat/common_patcher.py", "pack.model_patcher.common")


def test_the_stand_in_has_the_fault(zimage):
    with pytest.raises(TypeError, match="disable_dynamic"):
        zimage.ZImageModelPatcher(Model()).clone(disable_dynamic=True)


def test_clone_for_torch_compile_gives_the_pack_s_own_clone(zimage, mend):
    found = mend("patcher_calls", zimage)
    assert found.verdict == "needed" and "clone does not take disable_dynamic" in found.reason
    patcher = zimage.ZImageModelPatcher(Model())
    clone = patcher.clone(disable_dynamic=True)
    assert type(clone) is zimage.ZImageModelPatcher
    assert clone.svdq_backup is patcher.svdq_backup


def test_a_clone_over_another_model_does_not_share_the_first_one_s_backup(zimage, mend):
    mend("patcher_calls", zimage)
    patcher = zimage.ZImageModelPatcher(Model())
    patcher.svdq_backup["layer"] = "of the first model"
    other, backup = Model(), {}
    clone = patcher.clone(model_override=(other, backup))
    assert clone.model is other and clone.backup is backup
    assert clone.svdq_backup == {}


def test_a_deep_clone_is_refused_as_comfyui_refuses_it(zimage, mend):
    mend("patcher_calls", zimage)
    with pytest.raises(RuntimeError, match="cached_patcher_init is not initialized"):
        zimage.ZImageModelPatcher(Model()).clone(force_deepcopy=True)


def test_asking_for_the_patched_weight_returns_it_and_leaves_the_model_alone(zimage, mend):
    mend("patcher_calls", zimage)
    patcher = zimage.ZImageModelPatcher(Model(weight=3))
    patcher.patches["weight"] = 4
    assert patcher.patch_weight_to_device("weight", "cpu", return_weight=True) == 7
    assert patcher.model.weight == 3 and patcher.log == []


def test_patching_without_the_new_argument_is_the_pack_s_own(zimage, mend):
    mend("patcher_calls", zimage)
    patcher = zimage.ZImageModelPatcher(Model(weight=3))
    patcher.patches["weight"] = 4
    patcher.patch_weight_to_device("weight", return_weight=False)
    assert patcher.model.weight == 7 and patcher.log == [("patched", "weight")]


def test_unpatch_and_detach_get_their_keywords_intact(zimage, mend):
    mend("patcher_calls", zimage)
    patcher = zimage.ZImageModelPatcher(Model())
    patcher.unpatch_model(device_to=None, unpatch_weights=False)
    patcher.detach(unpatch_all=True)
    assert patcher.log == [("unpatch", None, False), ("unpatch", "cpu", True)]


def test_a_patcher_that_takes_everything_is_left_alone(core, standin, mend):
    mended = standin(
        "compat/zimage_patcher.py", "pack.model_patcher.zimage",
        ("def clone(self):", "def clone(self, disable_dynamic=False, model_override=None, force_deepcopy=False):"),
        ("inplace_update=False):\n        assert", "inplace_update=False, **later):\n        assert"),
    )
    before = dict(vars(mended.ZImageModelPatcher))
    assert mend("patcher_calls", mended).verdict == "not-needed"
    assert dict(vars(mended.ZImageModelPatcher)) == before


def test_the_qwen_stand_in_has_the_fault(common):
    patcher = common.NunchakuModelPatcher(Model(), offload_device="cpu")
    patcher.detach(unpatch_all=False)
    assert patcher.model.moves == ["cpu"]


def test_forgetting_a_qwen_patcher_leaves_its_model_where_it_is(core, common, mend):
    assert mend("qwen_moves", common).verdict == "needed"
    patcher = common.NunchakuModelPatcher(Model(), load_device="cuda")
    patcher.load("cuda")
    assert patcher.detach(unpatch_all=False) is patcher.model
    assert patcher.model.moves == ["cuda"]
    assert patcher.model.model_loaded_weight_memory == patcher.model_size()


def test_a_load_is_recorded_and_announced(core, common, mend):
    mend("qwen_moves", common)
    patcher = common.NunchakuModelPatcher(Model(), load_device="cuda")
    heard = []
    patcher.callbacks["on_load_after"] = [lambda *args: heard.append(args[1:])]
    patcher.load("cuda", lowvram_model_memory=5, full_load=True)
    model = patcher.model
    assert (model.device, model.model_loaded_weight_memory, model.model_lowvram) == ("cuda", 100, False)
    assert model.current_weight_patches_uuid == patcher.patches_uuid
    assert heard == [("cuda", 5, False, True)]


def test_an_unload_moves_the_model_and_is_recorded_and_announced(core, common, mend):
    mend("qwen_moves", common)
    patcher = common.NunchakuModelPatcher(Model(), load_device="cuda")
    heard = []
    patcher.callbacks["on_detach_after"] = [lambda patcher, everything: heard.append(everything)]
    patcher.load("cuda")
    assert patcher.detach() is patcher.model
    model = patcher.model
    assert model.moves == ["cuda", "cpu"]
    assert (model.device, model.model_loaded_weight_memory, model.current_weight_patches_uuid) == ("cpu", 0, None)
    assert heard == [True]


def test_a_model_that_nunchaku_offloads_by_itself_is_not_counted_as_loaded(core, common, mend):
    mend("qwen_moves", common)
    patcher = common.NunchakuModelPatcher(Model(offload=True))
    patcher.load("cuda")
    assert not hasattr(patcher.model, "model_loaded_weight_memory")


def test_a_qwen_patcher_that_keeps_the_records_is_left_alone(core, standin, mend):
    mended = standin(
        "compat/common_patcher.py", "pack.model_patcher.common",
        ("to_safely(device_to)", "to_safely(device_to)\n        self.model.model_loaded_weight_memory = 1"),
        ("self.eject_model()", "return super().detach(unpatch_all)"),
    )
    assert mend("qwen_moves", mended).verdict == "not-needed"
