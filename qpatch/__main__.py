"""``python -m qpatch`` and the ``qpatch`` command."""

import sys


def main(argv=None) -> int:
    """Run the command line; returns the exit code."""
    from . import cli

    return cli.main(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
