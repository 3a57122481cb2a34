"""``qpatch lora convert``."""

from . import lora_output


def configure(parser) -> None:
    parser.add_argument("file", metavar="FILE", help="a .safetensors file")
    lora_output.configure(parser, default_format=None)


def run(arguments) -> int:
    lora_output.check(arguments, [arguments.file])
    from ..lora.conversion import FORMATS, convert
    from ..lora.files import open_lora

    file = open_lora(arguments.file, metadata_alpha=arguments.metadata_alpha)
    result = convert(file, FORMATS[arguments.to], **lora_output.options(arguments))
    return lora_output.write(result, arguments, [arguments.file])
