"""Stand-in for ComfyUI's nodes.py: how a node pack is named and loaded."""

import importlib.util
import logging
import os
import sys
import traceback

NODE_CLASS_MAPPINGS = {}


async def load_custom_node(module_path, ignore=set(), module_parent="custom_nodes"):
    """Import the pack in the folder ``module_path``; errors are logged, not raised."""
    name = module_path.replace(".", "_x_")
    try:
        spec = importlib.util.spec_from_file_location(name, os.path.join(module_path, "__init__.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        NODE_CLASS_MAPPINGS.update(module.NODE_CLASS_MAPPINGS)
        return True
    except Exception:
        logging.warning(traceback.format_exc())
        return False
