"""What convert and merge have in common: options of an output file, and what is said of it."""

import sys

from ..lora.printable import short
from .errors import CliError
from .lora import one_line
from .text import count, print_json, wrap

PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def configure(parser, default_format: str | None) -> None:
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the .safetensors file to write")
    parser.add_argument("--to", metavar="FORMAT", required=default_format is None, default=default_format,
                        choices=("comfyui", "diffusers", "kohya", "nunchaku"),
                        help="comfyui, diffusers, kohya or nunchaku"
                             + (f" (default: {default_format})" if default_format else ""))
    parser.add_argument("--rank", type=_rank, metavar="N",
                        help="approximate layers of a higher rank, or of none, by rank N; the error is stated")
    parser.add_argument("--precision", choices=PRECISIONS, help="round the factors to this (default: as they are)")
    parser.add_argument("--metadata-alpha", action="store_true",
                        help="where a layer has no alpha, take it from the metadata, as diffusers does")
    parser.add_argument("--drop", action="store_true",
                        help="leave out layers that the format cannot hold, instead of refusing the file")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists (never one of the inputs)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = """formats:
  comfyui    diffusion_model.<name>.lora_A.weight    every kind of adapter is kept as it is
  diffusers  transformer.<name>.lora_A.weight        low-rank factors only; without the prefix where
                                                     there are alphas, because diffusers adds it then
  kohya      lora_unet_<name>.lora_down.weight       every kind of adapter is kept as it is
  nunchaku   diffusion_model.<fused name>.lora_A...  as Nunchaku's modules are: q, k and v fused, w3 before
                                                     w1, rows of modulations interleaved; for qpatch only

""" + parser.epilog


def _rank(text: str) -> int:
    rank = int(text)
    if rank < 1:
        raise ValueError(text)
    return rank


def check(arguments, inputs) -> None:
    """What is wrong with OUT, before anything is computed."""
    from ..lora.publish import check as check_path

    if not arguments.output.endswith(".safetensors"):
        raise CliError(f"{arguments.output}: the output is a .safetensors file", code=2)
    try:
        check_path(arguments.output, inputs, arguments.force)
    except OSError as error:
        raise CliError(f"{error}") from error


def options(arguments) -> dict:
    """The keyword arguments of convert and merge."""
    import torch

    from .. import __version__

    dtype = getattr(torch, PRECISIONS[arguments.precision]) if arguments.precision else None
    return {"max_rank": arguments.rank, "dtype": dtype, "drop": arguments.drop, "made_by": f"qpatch {__version__}"}


def write(result, arguments, inputs) -> int:
    """Save the file and say what it is; the exit code."""
    from ..lora.conversion import save

    try:
        save(result, arguments.output, inputs=inputs, force=arguments.force)
    except OSError as error:
        raise CliError(f"{arguments.output}: {one_line(error)}") from error
    if arguments.json:
        print_json(_as_data(result, arguments))
        return 0
    for key, reason in result.left_out[:_LEFT_OUT]:
        print(f"left out: {short(key)}: {reason}", file=sys.stderr)
    if len(result.left_out) > _LEFT_OUT:
        print(f"left out: {len(result.left_out) - _LEFT_OUT} more (--json lists all)", file=sys.stderr)
    print("\n".join(_described(result, arguments)))
    return 0


def _as_data(result, arguments) -> dict:
    return {
        "output": arguments.output, "format": result.format.name, "family": result.family.name, "layers": result.layers,
        "tensors": len(result.tensors), "size": result.size, "error": result.error, "rounded": result.rounded,
        "errors": {str(target): error for target, error in result.errors.items()},
        "left_out": [{"key": key, "reason": reason} for key, reason in result.left_out],
        "text_encoder_keys": result.text_encoder_keys,
    }


def _described(result, arguments) -> list[str]:
    format = result.format
    lines = [wrap(f"{arguments.output}: {count(result.layers, 'layer')} of {result.family.title} in the {format.name}"
                  f" format ({result.size / 1e6:.1f} MB), read by {format.readers}")]
    if result.text_encoder_keys:
        lines.append(f"{count(result.text_encoder_keys, 'key')} of text encoders copied as they are")
    if format.name == "kohya" and any("_attention_to_q." in key for key in result.tensors):
        lines.append(wrap("ComfyUI by itself does not read q, k and v of Z-Image in this format (qpatch does): for it,"
                          " use --to comfyui"))
    if not result.errors and result.rounded:
        return [*lines, "exact up to rounding in float32: products became factors"]
    if not result.errors:
        return [*lines, "exact: every layer changes what it changed before"]
    if result.error < _ROUNDING:
        return [*lines, f"exact up to rounding in float32 ({result.error:.1e} of the change)"]
    lines.append(f"error: {_percent(result.error)} of the change ({count(len(result.errors), 'layer')} not exact)")
    worst = sorted(result.errors.items(), key=lambda item: -item[1])[:_WORST]
    return lines + [f"  {str(target):<50} {_percent(error)}" for target, error in worst]


#: Below this share of the change an error is that of float32's rounding.
_ROUNDING = 1e-6
#: Keys shown of those that are left out.
_LEFT_OUT = 20
#: Layers shown, those with the largest error.
_WORST = 5


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
