"""Stand-in: switches the command line on; there is none here."""


def enable_args_parsing():
    pass
