"""Stand-in for comfy.supported_models_base: a configuration that answers None for whatever it lacks."""

import logging


class BASE:
    def __init__(self, unet_config):
        self.unet_config = unet_config

    def __getattr__(self, name):
        logging.warning("WARNING, you accessed {} from the model config object which doesn't exist.".format(name))
        return None
