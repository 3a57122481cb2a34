"""``qpatch lora diff``."""


from .lora_arguments import opened, stack
from .text import count, print_json, wrap


def configure(parser) -> None:
    for name, what in (("a", "the one side"), ("b", "the other side")):
        parser.add_argument(name, metavar=name.upper(),
                            help=f"{what}: FILE, FILE:STRENGTH, or a stack FILE:0.8+FILE:0.5")
    parser.add_argument("--metadata-alpha", action="store_true",
                        help="where a layer has no alpha, take it from the metadata, as diffusers does")
    parser.add_argument("--top", type=int, metavar="N", default=10,
                        help="show the N layers that differ most (default 10)")
    parser.add_argument("--json", action="store_true", help="print JSON, with every layer")
    parser.epilog = """The same file at two strengths: qpatch lora diff style.safetensors:1.0 style.safetensors:0.6
  cosine      of the angle between the two changes: 1 the same direction, 0 unrelated, -1 opposite
  B/A         norm of the second change over that of the first
  difference  norm of A - B over the larger of the two norms, in percent
All numbers are of the changes of the weights, in float64, at the strengths given.

""" + parser.epilog


def run(arguments) -> int:
    from ..lora.comparison import compare

    options = {"metadata_alpha": arguments.metadata_alpha}
    sides = [opened(stack(text), **options) for text in (arguments.a, arguments.b)]
    comparison = compare(*sides)
    if arguments.json:
        print_json(_as_data(comparison, arguments))
    else:
        print("\n".join(_described(comparison, arguments)))
    return 0


def _as_data(comparison, arguments) -> dict:
    return {"a": arguments.a, "b": arguments.b, "family": comparison.family.name, "total": _numbers(comparison.total),
            "layers": [{"target": str(layer.target), **_numbers(layer)} for layer in comparison.layers]}


def _numbers(layer) -> dict:
    return {"norm_a": layer.first, "norm_b": layer.second, "cosine": layer.cosine, "ratio": layer.ratio,
            "relative_difference": layer.relative, "note": layer.note}


def _described(comparison, arguments) -> list[str]:
    lines = [f"A  {arguments.a}", f"B  {arguments.b}", "", _ROW.format("", "cosine", "B/A", "difference"),
             _line("all layers", comparison.total)]
    groups = comparison.components().items()
    lines += [_line("  " + name, group) for name, group in groups if group.difference is not None]
    differing = sorted((layer for layer in comparison.layers if layer.relative), key=lambda layer: -layer.relative)
    if differing[:arguments.top]:
        lines += ["", "the layers that differ most"]
        lines += [_line(f"  {layer.target}", layer) for layer in differing[:arguments.top]]
    return lines + _apart(comparison)


def _apart(comparison) -> list[str]:
    lines = []
    for side, name in enumerate("AB"):
        only = comparison.only(side)
        if only:
            lines.append(wrap(f"only in {name}: {count(len(only), 'layer')}, such as {only[0].target}", indent="  "))
    unknown = [layer for layer in comparison.layers if layer.note]
    if unknown:
        first = unknown[0]
        lines.append(wrap(f"not compared: {count(len(unknown), 'layer')}, such as {first.target}: {first.note}",
                          indent="  "))
    return ["", *lines] if lines else []


#: Name, cosine, B/A, difference.
_ROW = "{:<46}{:>9}{:>11}{:>13}"


def _line(name, layer) -> str:
    percent = None if layer.relative is None else 100 * layer.relative
    values = ((layer.cosine, "{:.4f}"), (layer.ratio, "{:.4f}"), (percent, "{:.2f} %"))
    return _ROW.format(name, *("-" if value is None else form.format(value) for value, form in values))
