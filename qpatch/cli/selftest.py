"""``qpatch selftest``."""


from .text import print_json, row, wrap


def configure(parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = """Child interpreters are started as a user would start them, on small stand-ins for
ComfyUI, nunchaku and a node pack in a temporary folder. Exit code 0 means that everything was
proved; 1 that something failed, or could not be tried (without torch, for example).

""" + parser.epilog


SIZES = (11, 13)


def run(arguments) -> int:
    from .. import __version__
    from ..doctor.context import Context
    from ..selftest import PROVED

    context = Context.here()
    proofs = []
    if not arguments.json:
        print(f"{context.executable}\nqpatch {__version__} in {context.package}\n", flush=True)
    for proof in _trials(context):
        proofs.append(proof)
        if not arguments.json:
            print(row((proof.outcome, proof.name), SIZES, proof.seen), flush=True)
    proved = sum(proof.outcome == PROVED for proof in proofs)
    if arguments.json:
        print_json({"qpatch": __version__, "python": str(context.executable), "all_proved": proved == len(proofs),
                    "proofs": [vars(proof) for proof in proofs]})
    else:
        print("\n" + wrap(_summary(proofs)))
    return 0 if proved == len(proofs) else 1


def _summary(proofs) -> str:
    from ..selftest import FAILED, NOT_TRIED, PROVED

    numbers = {kind: sum(proof.outcome == kind for proof in proofs) for kind in (PROVED, FAILED, NOT_TRIED)}
    said = ", ".join(f"{number} {kind}" for kind, number in numbers.items() if number)
    return said + ("; qpatch doctor looks for the reason" if numbers[FAILED] else "")


def _trials(context):
    from ..selftest import FAILED, Proof
    from ..selftest.children import ChildFailed
    from ..selftest.trials import all_trials

    try:
        yield from all_trials(context)
    except ChildFailed as error:
        yield Proof("child", FAILED, str(error))
