"""The error that a verb raises to end with one line and an exit code."""

from pathlib import Path


class CliError(Exception):
    """``code``: 1 where the thing asked for could not be done, 2 where it was asked for wrongly."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def as_data(error: BaseException, text: str) -> dict:
    """The error for ``--json``: its text and, of a refused LoRA, where and what; null where that is not known."""
    refusal = error if hasattr(error, "expected") else error.__cause__
    facts = {name: getattr(refusal, name, None) for name in ("file", "key", "expected", "found")}
    return {"message": text} | {name: None if value is None else str(value) for name, value in facts.items()}


def existing_folders(names) -> list[Path]:
    """The folders named on the command line; CliError for one that does not exist."""
    return [_existing(name) for name in names or ()]


def _existing(name: str) -> Path:
    try:
        # Strict: "." fails too where the working directory has been removed.
        folder = Path(name).resolve(strict=True)
    except OSError:
        folder = None
    if folder is None or not folder.is_dir():
        raise CliError(f"--comfyui {name}: there is no such folder", code=2)
    return folder
