"""``qpatch status``."""

import json


def configure(parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments) -> int:
    from .. import states

    print(json.dumps(states.snapshot(), indent=2))
    return 0
