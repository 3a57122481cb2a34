"""Stand-in for ComfyUI's extension points of a patcher."""


class CallbacksMP:
    ON_CLONE = "on_clone"
    ON_LOAD = "on_load_after"
    ON_DETACH = "on_detach_after"
    ON_CLEANUP = "on_cleanup"


class PatcherInjection:
    def __init__(self, inject, eject):
        self.inject, self.eject = inject, eject
