"""``qpatch lora merge``."""

from . import lora_output
from .lora_arguments import opened, with_strength


def configure(parser) -> None:
    parser.add_argument("files", metavar="FILE[:STRENGTH]", nargs="+",
                        help="a .safetensors file; the strength is 1 if not given")
    lora_output.configure(parser, default_format="comfyui")


def run(arguments) -> int:
    pairs = [with_strength(text) for text in arguments.files]
    paths = [path for path, _ in pairs]
    lora_output.check(arguments, paths)
    from ..lora.conversion import FORMATS, merge

    files = opened(pairs, metadata_alpha=arguments.metadata_alpha)
    result = merge(files, FORMATS[arguments.to], **lora_output.options(arguments))
    return lora_output.write(result, arguments, paths)
