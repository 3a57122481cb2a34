"""What is wrong with an installation; no hook can mend it, the doctor's other checks say more."""

from .signature import Signature

_WHEEL = "install the wheel that fits your torch and Python from the releases of nunchaku-ai/nunchaku on GitHub"

ENVIRONMENT = (
    Signature(
        "nunchaku-missing", r"No module named 'nunchaku'",
        "The inference engine nunchaku is not installed in the Python that ComfyUI runs on.", remedy=_WHEEL,
    ),
    Signature(
        "nunchaku-of-pypi", r"No module named 'nunchaku\.\w+|cannot import name '\w+' from 'nunchaku(?:\.\w+)*'",
        "The installed nunchaku lacks what ComfyUI-nunchaku imports: it is the unrelated project of that name on"
        " PyPI, or an older wheel.",
        remedy="qpatch doctor tells which; pip uninstall nunchaku, then " + _WHEEL,
    ),
    Signature(
        "nunchaku-build", r"nunchaku\S*_C\S*: undefined symbol|DLL load failed while importing _C\b",
        "The compiled part of nunchaku does not fit the installed torch or Python.",
        remedy="qpatch doctor tells what it was built for; " + _WHEEL,
    ),
    Signature(
        "diffusers-old",
        r"No module named 'diffusers\.models\.transformers\.transformer_z_image'"
        r"|cannot import name '\w*ZImage\w*' from 'diffusers",
        "nunchaku imports classes of Z-Image that the installed diffusers does not have.",
        remedy='pip install -U "diffusers>=0.36"',
    ),
    Signature(
        "nunchaku-old", r"ComfyUI-nunchaku (\S+) requires nunchaku >= (\S+?), but found nunchaku (\S+?)\.? Please",
        "ComfyUI-nunchaku {0} wants nunchaku {1} or later, {2} is installed.", remedy=_WHEEL,
    ),
    Signature(
        "node-missing", r"Nodes? `(\w+)`.* import failed",
        "The node {0} of ComfyUI-nunchaku is missing, because its file could not be imported; the traceback behind"
        " this line has the cause.",
        remedy="mend that cause",
    ),
    Signature(
        "old-setuptools", r"module 'pkgutil' has no attribute 'ImpImporter'",
        "pip tried to build a package with a setuptools that is older than this Python.",
        remedy="python -m pip install -U pip setuptools wheel, then install the package again",
    ),
    Signature(
        "start-up-file-alone", r"Error processing line \d+ of (\S*qpatch\.pth)",
        "Python found qpatch's start-up file without the package: qpatch was deleted by hand, or belongs to another"
        " Python.",
        remedy="install qpatch again in this Python, or delete the file that the line names",
    ),
    Signature(
        "torch-early", r"Torch already imported, torch should never be imported before this point",
        "Something imports torch before ComfyUI has set it up. It is not qpatch, which imports nothing at start-up: a"
        " prestartup_script.py of a node pack, or another package's .pth file.",
        remedy="start ComfyUI with only one node pack at a time enabled to see which",
    ),
)
