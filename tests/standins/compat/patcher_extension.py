"""Stand-in for comfy.patcher_extension: the names under which callbacks are kept."""


class CallbacksMP:
    ON_LOAD = "on_load_after"
    ON_DETACH = "on_detach_after"
