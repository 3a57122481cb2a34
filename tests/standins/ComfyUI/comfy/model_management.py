"""Stand-in: the platform flag that the lazy Linear of older releases needs as well, and which patcher is loaded."""

import weakref

import torch

WINDOWS = False
current_loaded_models = []


def get_torch_device():
    return torch.device("cpu")


class LoadedModel:
    """Keeps no patcher alive: when it goes, its parent stands for the model that is still there."""

    def __init__(self, patcher):
        self._set(patcher)

    def _set(self, patcher):
        self._patcher = weakref.ref(patcher)
        if patcher.parent is not None:
            parent = weakref.ref(patcher.parent)
            weakref.finalize(patcher, lambda: parent() is not None and self._set(parent())).atexit = False

    @property
    def model(self):
        return self._patcher()


def load_models_gpu(models, **_):
    for patcher in models:
        for loaded in [one for one in current_loaded_models if patcher.is_clone(one.model)]:
            current_loaded_models.remove(loaded)
            loaded.model.detach(unpatch_all=False)
        patcher.partially_load(patcher.load_device, 1e32)
        current_loaded_models.insert(0, LoadedModel(patcher))


def unload_all_models():
    for loaded in current_loaded_models:
        if loaded.model is not None:
            loaded.model.detach(unpatch_all=True)
    current_loaded_models.clear()
