"""from_linear on lazy Linears: each case must end where a Linear with parameters ends unpatched."""

import pytest
import torch

from qpatch import patching
from qpatch.finding import INCOMPATIBLE, NEEDED, NOT_NEEDED
from qpatch.hooks import lazy_linear
from qpatch.hooks.lazy_call import lending

PATH, NAME = "packages/nunchaku/models/linear.py", "nunchaku.models.linear"
EAGER_DTYPE = 'kwargs.pop("torch_dtype", linear.weight.dtype)'
SAFE_DTYPE = ('kwargs.pop("torch_dtype", None) or '
              '(linear.weight_comfy_model_dtype if linear.weight is None else linear.weight.dtype)')
DEVICE, SAFE_DEVICE = "device=linear.weight.device", "device=None if linear.weight is None else linear.weight.device"
BIAS = "bias=linear.bias is not None"
SAFE_BIAS = 'bias=linear.bias is not None or getattr(linear, "comfy_need_lazy_init_bias", False)'


@pytest.fixture
def nunchaku(standin):
    """The stand-in as it is upstream."""
    return standin(PATH, NAME)


@pytest.fixture
def mended(standin):
    """A second copy of it, patched."""
    module = standin(PATH, NAME)
    patching.put(list(lazy_linear.patches(module)))
    return module


def kinds(layer):
    """{parameter: (shape, dtype, device)} and what else the constructor was told."""
    told = {name: getattr(layer, name, None) for name in ("in_features", "out_features", "rank", "precision")}
    return told, {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in layer.named_parameters()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("asked", [{}, {"torch_dtype": torch.float16}])
@pytest.mark.parametrize("cls, more", [
    ("SVDQW4A4Linear", {}),
    ("SVDQW4A4Linear", {"rank": 16, "precision": "nvfp4", "in_features": 128}),
    ("AWQW4A16Linear", {"rank": 32, "precision": "int4"}),
])
def test_a_lazy_linear_gives_the_layer_that_a_filled_one_gives(comfy, nunchaku, mended, cls, more, asked, bias):
    filled = comfy.linear(256, 128, bias=bias, dtype=torch.bfloat16, lazy=False)
    source = comfy.linear(256, 128, bias=bias, dtype=torch.bfloat16)
    before = dict(vars(source))
    made = getattr(mended, cls).from_linear(source, **more, **asked)
    assert kinds(made) == kinds(getattr(nunchaku, cls).from_linear(filled, **more, **asked))
    assert vars(source) == before


def test_upstream_itself_fails_on_a_lazy_linear(comfy, nunchaku):
    source = comfy.linear(128, 128, bias=True, dtype=torch.bfloat16)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'dtype'"):
        nunchaku.SVDQW4A4Linear.from_linear(source, torch_dtype=torch.float16)
    assert nunchaku.AWQW4A16Linear.from_linear(source).bias is None


def test_dtype_and_device_are_taken_by_position_too(comfy, mended):
    source = comfy.linear(128, 128, bias=True, dtype=torch.float32)
    layer = mended.AWQW4A16Linear.from_linear(source, 64, torch.float16, "meta")
    assert layer.bias.dtype == torch.float16 and layer.qweight.device.type == "meta"
    layer = mended.SVDQW4A4Linear.from_linear(linear=source, torch_dtype=torch.float16, device="meta")
    assert layer.bias.dtype == torch.float16 and layer.qweight.device.type == "meta"


def test_a_linear_with_a_weight_reaches_upstream_as_the_same_object(comfy, standin):
    module = standin(PATH, NAME, ("in_features = kwargs.pop", "cls.got = linear; in_features = kwargs.pop"))
    patching.put(list(lazy_linear.patches(module)))
    filled = comfy.linear(128, 128, bias=True, dtype=torch.bfloat16, lazy=False)
    module.SVDQW4A4Linear.from_linear(filled)
    assert module.SVDQW4A4Linear.got is filled
    with pytest.raises(TypeError, match="multiple values for keyword argument 'device'"):
        module.SVDQW4A4Linear.from_linear(filled, device="cpu")


def test_an_attribute_error_of_another_cause_is_upstream_s_own(comfy, standin):
    module = standin(PATH, NAME, ("in_features = kwargs.pop", "linear.unknown; in_features = kwargs.pop"))
    patching.put([patching.Wrap(module.SVDQW4A4Linear, "from_linear", lambda f: lending(f, ("linear",)))])
    for lazy in (True, False):
        with pytest.raises(AttributeError, match="no attribute 'unknown'"):
            module.SVDQW4A4Linear.from_linear(comfy.linear(128, 128, dtype=torch.bfloat16, lazy=lazy))


def test_a_function_that_hands_its_argument_back_hands_back_the_source(comfy):
    source = comfy.linear(128, 128, dtype=torch.bfloat16)
    assert lending(lambda linear, **kwargs: linear, ("linear",))(source) is source


def test_the_source_is_as_it_was_when_upstream_raises(comfy, mended):
    source = comfy.linear(128, 128, bias=True, dtype=torch.bfloat16)
    before = dict(vars(source))
    with pytest.raises(ValueError, match="Invalid precision: int3"):
        mended.SVDQW4A4Linear.from_linear(source, precision="int3")
    assert vars(source) == before


def test_without_a_dtype_the_error_names_layer_and_remedy(comfy, mended):
    with pytest.raises(TypeError, match=r"Linear\(in_features=128, out_features=64\).*pass torch_dtype="):
        mended.SVDQW4A4Linear.from_linear(comfy.linear(128, 64))
    # AWQ's own default needs no help.
    assert mended.AWQW4A16Linear.from_linear(comfy.linear(128, 64)).wscales.dtype == torch.bfloat16


def test_subclasses_that_inherit_or_override_get_their_own_class(comfy, mended):
    class Inherits(mended.SVDQW4A4Linear):
        pass

    class Overrides(mended.SVDQW4A4Linear):
        @classmethod
        def from_linear(cls, linear, **kwargs):
            made = super().from_linear(linear, **kwargs)
            made.overridden = True
            return made

    source = comfy.linear(128, 128, bias=True, dtype=torch.bfloat16)
    assert type(Inherits.from_linear(source)) is Inherits
    made = Overrides.from_linear(source)
    assert type(made) is Overrides and made.overridden and made.bias is not None


def test_a_layer_that_is_quantized_already_ends_in_an_error_that_says_so(comfy, mended):
    layer = mended.SVDQW4A4Linear.from_linear(comfy.linear(128, 64, dtype=torch.bfloat16))
    for prepare in (lambda: None, lambda: setattr(layer, "weight", None)):
        prepare()
        with pytest.raises(TypeError, match=r"SVDQW4A4Linear\(in_features=128, out_features=64\).*quantized already"):
            mended.SVDQW4A4Linear.from_linear(layer, torch_dtype=torch.float16)


def test_applying_it_again_changes_nothing(mended):
    stands = vars(mended.SVDQW4A4Linear)["from_linear"], vars(mended.AWQW4A16Linear)["from_linear"]
    assert lazy_linear.examine(mended).verdict == NOT_NEEDED
    patching.put(list(lazy_linear.patches(mended)))
    assert (vars(mended.SVDQW4A4Linear)["from_linear"], vars(mended.AWQW4A16Linear)["from_linear"]) == stands


def test_from_import_copies_of_the_class_are_mended_with_it(comfy, nunchaku):
    from nunchaku.models.linear import SVDQW4A4Linear as copy

    assert copy is nunchaku.SVDQW4A4Linear
    patching.put(list(lazy_linear.patches(nunchaku)))
    assert copy.from_linear(comfy.linear(128, 128, dtype=torch.float16)).proj_up.dtype == torch.float16


def test_a_class_that_is_only_imported_there_belongs_to_its_own_module(standin, nunchaku):
    module = standin(PATH, "nunchaku.models.other")
    module.Foreign = nunchaku.AWQW4A16Linear
    patching.put(list(lazy_linear.patches(module)))
    assert patching.marked(vars(module.AWQW4A16Linear)["from_linear"])
    assert not patching.marked(vars(nunchaku.AWQW4A16Linear)["from_linear"])


def test_the_finding_says_whether_lazy_linears_are_in_use(comfy, nunchaku):
    for on, words in ((True, "lazy Linear active: yes"), (False, "lazy Linear active: no")):
        comfy.memory.aimdo_enabled = on
        finding = lazy_linear.examine(nunchaku)
        assert finding.verdict == NEEDED and words in finding.reason


def test_an_upstream_that_mended_both_classes_is_left_alone(comfy, standin):
    module = standin(PATH, NAME, (EAGER_DTYPE, SAFE_DTYPE), (DEVICE, SAFE_DEVICE), (BIAS, SAFE_BIAS))
    assert lazy_linear.examine(module).verdict == NOT_NEEDED
    assert list(lazy_linear.patches(module)) == []


@pytest.mark.parametrize("changes, fault", [
    ([(EAGER_DTYPE, SAFE_DTYPE), (DEVICE, SAFE_DEVICE)], "drops the bias"),
    ([(DEVICE, SAFE_DEVICE), (BIAS, SAFE_BIAS)], "'NoneType' object has no attribute 'dtype'"),
    ([(EAGER_DTYPE, SAFE_DTYPE), (BIAS, SAFE_BIAS)], "'NoneType' object has no attribute 'device'"),
    ([(DEVICE, 'device="cpu" if linear.weight is not None else "meta"'), (EAGER_DTYPE, SAFE_DTYPE), (BIAS, SAFE_BIAS)],
     "puts the layer on meta"),
    ([(EAGER_DTYPE, 'kwargs.pop("torch_dtype", torch.float32 if linear.weight is None else linear.weight.dtype)'),
      (DEVICE, SAFE_DEVICE), (BIAS, SAFE_BIAS)], "makes a layer of torch.float32 where torch.bfloat16"),
])
def test_an_upstream_that_mended_half_of_it_is_mended_for_the_rest(comfy, standin, changes, fault):
    module = standin(PATH, NAME, *changes)
    finding = lazy_linear.examine(module)
    assert finding.verdict == NEEDED and f"SVDQW4A4Linear.from_linear, on a Linear that has no weight yet, {fault}" \
        in finding.reason.replace("raises AttributeError: ", "")
    patching.put(list(lazy_linear.patches(module)))
    layer = module.SVDQW4A4Linear.from_linear(comfy.linear(128, 64, bias=True, dtype=torch.bfloat16))
    assert layer.bias.dtype == torch.bfloat16 and layer.bias.device.type == "cpu"


@pytest.mark.parametrize("changes, words", [
    ([("def from_linear(cls, linear, **kwargs)", "def of_linear(cls, linear, **kwargs)")], "is gone"),
    ([("@classmethod\n    def from_linear(cls, linear, **", "@staticmethod\n    def from_linear(cls, linear, **")],
     "not a classmethod"),
    ([("from_linear(cls, linear, **kw", "from_linear(cls, linear, name, **kw")], "missing a required argument"),
    ([("from_linear(cls, linear, **kwargs)", "from_linear(cls, **kwargs)")], "does not take"),
    ([(EAGER_DTYPE, "moon")], "even on a Linear with a weight it raises NameError"),
    ([(EAGER_DTYPE, '(kwargs.pop("torch_dtype", None), torch.float32)[1]')],
     "even on a Linear with a weight it makes a layer of torch.float32"),
])
def test_a_shape_that_is_not_known_is_incompatible_with_the_reason(standin, changes, words):
    finding = lazy_linear.examine(standin(PATH, NAME, *changes))
    assert finding.verdict == INCOMPATIBLE and words in finding.reason
