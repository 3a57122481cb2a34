"""Hook quant-lora on ComfyUI's native SVDQuant layout, with comfy_kitchen's own CPU kernel."""

import pytest
import torch

kitchen = pytest.importorskip("comfy_kitchen.tensor")
if not hasattr(kitchen, "TensorCoreSVDQuantW4A4Layout"):
    pytest.skip("this comfy_kitchen has no SVDQuant layout", allow_module_level=True)

from qpatch.hooks.quant_lora import branch, options, patchers, svdq
from qpatch.hooks.quant_lora.pair import Pair
from qpatch.hooks.quant_lora.weights import coarse
from qpatch.patching import put

SIZE = 256


def svdquant(rank=32, out=SIZE, inp=SIZE):
    params = kitchen.TensorCoreSVDQuantW4A4Layout.Params(
        scale=(torch.rand(inp // 64, out) * 0.1).bfloat16(), orig_dtype=torch.bfloat16, orig_shape=(out, inp),
        proj_down=(torch.randn(inp, rank) * 0.1).bfloat16(), proj_up=(torch.randn(out, rank) * 0.1).bfloat16(),
        smooth_factor=(torch.rand(inp) + 0.5).bfloat16())
    data = torch.randint(-128, 128, (out, inp // 2), dtype=torch.int8)
    return kitchen.QuantizedTensor(data, "TensorCoreSVDQuantW4A4Layout", params)


@pytest.fixture
def world(standin, monkeypatch):
    """(stand-in, model with one SVDQuant layer, patcher, x, its output)"""
    monkeypatch.delenv(options.VARIABLE, raising=False)
    torch.manual_seed(0)
    comfy = standin("quant_lora/model_patcher.py", "comfy.model_patcher")
    put(list(patchers.patches(comfy)))
    model = torch.nn.Module()
    model.layer = comfy.Linear(svdquant(), torch.randn(SIZE).bfloat16())
    patcher, x = comfy.ModelPatcher(model), torch.randn(8, SIZE).bfloat16()
    patcher.partially_load(patcher.load_device, 1e32)
    return comfy, model, patcher, x, model.layer(x)


def lora(comfy, rank):
    return comfy.Adapter("lora", torch.randn(SIZE, rank), torch.randn(rank, SIZE), None, None, None, None)


def check(found, base, one, x, strength):
    wanted = strength * (x.double() @ one.weights[1].double().T @ one.weights[0].double().T)
    added = found.double() - base.double()
    assert (added - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize("rank", (1, 16, 40))
def test_terms_are_appended_to_the_layout_s_own_branch(world, rank):
    comfy, model, patcher, x, base = world
    one, original = lora(comfy, rank), model.layer.weight
    clone = patcher.clone()
    clone.add_patches({"layer.weight": one}, 0.5)
    clone.partially_load(clone.load_device, 1e32)
    longer = coarse(model.layer)._params
    assert "forward" not in vars(model.layer) and longer.proj_down.shape[1] == 32 + -(-rank // 16) * 16
    assert longer.proj_down.shape[1] % 16 == 0 and original._params.proj_down.shape[1] == 32
    check(model.layer(x), base, one, x, 0.5)
    # Loading again (another step of a partial load) appends nothing twice.
    clone.partially_load(clone.load_device, 1e32)
    assert coarse(model.layer)._params.proj_down.shape[1] == longer.proj_down.shape[1]
    clone.unpatch_model()
    assert torch.equal(model.layer(x), base) and coarse(model.layer)._params.proj_down.shape[1] == 32


def test_moved_out_of_the_device_it_runs_beside_and_moved_in_again_it_is_appended(world):
    comfy, model, patcher, x, base = world
    one, clone = lora(comfy, 16), patcher.clone()
    clone.add_patches({"layer.weight": one})
    clone.partially_load(clone.load_device, 1e32)
    clone.partially_unload(clone.offload_device, 1)
    assert branch.of(model.layer) is not None and not svdq.appended(model.layer)
    check(model.layer(x), base, one, x, 1.0)
    clone.partially_load(clone.load_device, 1e32)
    assert branch.of(model.layer) is None and svdq.appended(model.layer)
    check(model.layer(x), base, one, x, 1.0)


def test_more_rank_than_the_kernel_takes_runs_beside(world):
    comfy, model, patcher, x, base = world
    one, clone = lora(comfy, 1000), patcher.clone()
    clone.add_patches({"layer.weight": one})
    clone.partially_load(clone.load_device, 1e32)
    assert branch.of(model.layer) is not None and coarse(model.layer)._params.proj_down.shape[1] == 32
    check(model.layer(x), base, one, x, 1.0)


def test_a_tiled_up_factor_gets_its_rows_in_the_tiles():
    tensor, down, up = svdquant(), torch.randn(3, SIZE), torch.randn(SIZE, 3)
    tiles = tensor._params.proj_up.unflatten(0, (2, 128)).transpose(1, 2)
    tiled = type(tensor._params)(**{**vars(tensor._params), "proj_up": tiles})
    natural = svdq.longer(tensor, Pair(down, up))._params.proj_up
    result = svdq.longer(type(tensor)(tensor._qdata, tensor._layout_cls, tiled), Pair(down, up))._params.proj_up
    assert torch.equal(result.transpose(1, 2).flatten(0, 1), natural)
    assert torch.equal(natural[:, 32:35], up.bfloat16()) and not natural[:, 35:].any()
