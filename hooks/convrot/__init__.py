"""ConvRot: quantized weights stored in a rotated basis. The hooks, and what other hooks may use of them.

A ConvRot file stores W H, where H rotates each block of ``group size`` inputs by a regular Hadamard matrix;
activations are to be rotated to match, and whatever is added to the weight (LoRA) belongs into the un-rotated
basis. These hooks make the basis a property of the weight's own tensor type, and touch nothing else:

    config.py      reading and writing a layer's ``comfy_quant``
    rotation.py    H, and multiplying by it
    layouts.py     the layout classes
    basis.py       telling a rotated weight from the tensor alone, working on it in its basis (for other hooks)
    operators.py   products with such weights
    adoption.py    giving a layer that ComfyUI has loaded its layout; hswq.py says whose layer it is
    saving.py      writing the basis back
    probe.py       what the installed ComfyUI does by itself
    loader.py      hook ``convrot``: NVFP4; detection.py its part in comfy.model_detection
    int8.py        hook ``convrot-int8``: INT8 Linear, on the releases that lose its basis
    conv2d.py      hook ``convrot-conv2d``: INT8 Conv2d
    bake.py        hook ``convrot-bake``: LoRA added once at load, with dynamic VRAM; baking.py does the work
"""
