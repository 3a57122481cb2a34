"""``zimage_batch``: each image of a batch gets its own positions."""

import weakref

import pytest
import torch


@pytest.fixture
def rope(standin):
    return standin("compat/rope_hook.py", "pack.models.zimage")


def _table(tokens, images=1):
    """A rotary table [images, tokens, 1, 4, 2, 2] whose rows are all different."""
    return torch.arange(images * tokens * 16, dtype=torch.float32).reshape(images, tokens, 1, 4, 2, 2)


def _rows(table):
    """What the kernel wants of a table row: [rows, 8]."""
    return table[..., 1, :].reshape(-1, 8)


def _packed(hook, batch, tokens, table):
    args, kwargs = hook.pre_forward(None, (torch.zeros(batch, tokens, 4), "mask", table), {"options": 1})
    assert args[1] == "mask" and kwargs == {"options": 1}
    return args[2].reshape(-1, 8)


def test_the_stand_in_has_the_fault(rope):
    packed = _packed(rope.RopeFuseAttentionHook(), 2, 20, _table(20))
    assert torch.equal(packed[20:40], torch.zeros(20, 8))


@pytest.mark.parametrize("batch, tokens", [(2, 20), (3, 100), (2, 256), (5, 300)])
def test_token_n_of_the_batch_finds_its_position_in_row_n(rope, mend, batch, tokens):
    assert mend("zimage_batch", rope).verdict == "needed"
    table = _table(tokens)
    packed = _packed(rope.RopeFuseAttentionHook(), batch, tokens, table)
    assert packed.shape[0] >= batch * tokens and packed.shape[0] % 256 == 0
    for image in range(batch):
        assert torch.equal(packed[image * tokens:(image + 1) * tokens], _rows(table)), f"image {image}"


def test_a_table_with_rows_for_each_image_is_used_image_after_image(rope, mend):
    mend("zimage_batch", rope)
    table = _table(30, images=2)
    packed = _packed(rope.RopeFuseAttentionHook(), 2, 30, table)
    assert torch.equal(packed[:60], _rows(table))


def test_one_image_goes_through_as_it_was(rope, mend):
    hook, table = rope.RopeFuseAttentionHook(), _table(20)
    before = _packed(hook, 1, 20, table)
    mend("zimage_batch", rope)
    mended = rope.RopeFuseAttentionHook()
    assert torch.equal(_packed(mended, 1, 20, table), before)
    assert list(mended.packed_freqs_cis_cache) == list(hook.packed_freqs_cis_cache)


def test_the_layers_of_one_forward_share_one_packed_table(rope, mend):
    mend("zimage_batch", rope)
    hook, table = rope.RopeFuseAttentionHook(), _table(20)
    for _ in range(30):
        _packed(hook, 2, 20, table)
    assert hook.packings == 1


def test_tables_of_two_parts_of_the_model_are_kept_apart(rope, mend):
    mend("zimage_batch", rope)
    hook, first, second = rope.RopeFuseAttentionHook(), _table(20), _table(20) + 1
    _packed(hook, 2, 20, first)
    assert torch.equal(_packed(hook, 2, 20, second)[20:40], _rows(second))
    assert torch.equal(_packed(hook, 2, 20, first)[20:40], _rows(first))


def test_a_table_lives_as_long_as_its_entry_because_its_identity_is_the_key(rope, mend):
    mend("zimage_batch", rope)
    hook, table = rope.RopeFuseAttentionHook(), _table(20)
    _packed(hook, 2, 20, table)
    alive = weakref.ref(table)
    del table
    assert alive() is not None
    hook.packed_freqs_cis_cache.clear()
    assert alive() is None


def test_attention_without_positions_is_left_alone(rope, mend):
    mend("zimage_batch", rope)
    assert rope.RopeFuseAttentionHook().pre_forward(None, (torch.zeros(2, 4, 4), None, None), {}) is None


def test_a_pack_that_repeats_the_table_itself_is_left_alone(standin, mend):
    mended = standin("compat/rope_hook.py", "pack.models.zimage",
                     ("table = args[2]\n", "table = args[2].repeat(1, args[0].shape[0], 1, 1, 1, 1)\n"),
                     ("        self.attn_hook = Rope", "        if hasattr(self, 'attn_hook'):\n"
                      "            self.attn_hook.unhook()\n        self.attn_hook = Rope"))
    assert mend("zimage_batch", mended).verdict == "not-needed"


def test_a_release_that_does_not_fuse_positions_is_left_alone(standin, mend):
    older = standin("compat/rope_hook.py", "pack.models.zimage", ("class RopeFuseAttentionHook", "class Other"),
                    ("def fused_qkv_norm_rotary", "def other"), ("class RopeFuseTransformerHook", "class Another"))
    assert mend("zimage_batch", older).verdict == "not-needed"


def test_a_class_that_only_has_another_name_is_not_taken_for_such_a_release(standin, mend):
    renamed = standin("compat/rope_hook.py", "pack.models.zimage", ("class RopeFuseAttentionHook", "class Other"))
    assert mend("zimage_batch", renamed).verdict == "incompatible"


class Cancelled(BaseException):
    """As ComfyUI's exception for it: no Exception."""


class _Attention(torch.nn.Module):
    cancelled = False

    def forward(self, x, mask, table):
        if self.cancelled:
            raise Cancelled
        return table


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].attention = _Attention()

    def forward(self, x, table):
        return self.layers[0].attention(x, None, table)


@pytest.mark.parametrize("mended", [False, True])
def test_a_run_after_a_cancelled_one_packs_the_table_once(rope, mend, mended):
    if mended:
        mend("zimage_batch", rope)
    model, x, table = _Model(), torch.zeros(1, 20, 4), _table(20)
    rope.RopeFuseTransformerHook(True).hook(model)
    wanted = model(x, table)
    model.layers[0].attention.cancelled = True
    with pytest.raises(Cancelled):
        model(x, table)
    model.layers[0].attention.cancelled = False
    assert torch.equal(model(x, table), wanted) is mended
    assert (not model.layers[0].attention._forward_pre_hooks) is mended
