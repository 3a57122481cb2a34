"""The known breaks between the versions that are installed, read from disk."""

from .. import catalogue, states, toggles
from ..hooks.compat import known
from . import comfyui, node_packs, packages
from .verdict import Verdict, note, ok, skipped


def versions(context) -> dict[str, str | None]:
    """{component of the table: installed version}; a component that is not here is left out."""
    program = comfyui.program(context)
    found = {known.COMFYUI: comfyui.version(program) or "unknown"} if program else {}
    for name in (known.NUNCHAKU, known.KITCHEN):
        found[name] = packages.version(name, context)
    for pack in node_packs.packs(context):
        if packages.normal(pack.name) in known.TITLES and not pack.disabled:
            found[packages.normal(pack.name)] = pack.version or "unknown"
    for pack in node_packs.nunchaku_packs(context):
        if not pack.disabled:
            found[known.PACK] = pack.version or "unknown"
    return {name: version for name, version in found.items() if version is not None}


def rows(context) -> list[known.Row]:
    """The table for this installation; empty where no ComfyUI was found."""
    if comfyui.program(context) is None:
        return []
    why = None if states.live() else "the import hook is not live"
    off = {hook.name: why or toggles.why_disabled(hook) for hook in catalogue.HOOKS}
    return known.breaks(versions(context), {name: reason for name, reason in off.items() if reason})


def known_breaks(context) -> Verdict:
    """How many of the known breaks are here, and how many of those are mended."""
    found = rows(context)
    if not found:
        return skipped("no ComfyUI folder was looked at")
    states_of = [row.state for row in found]
    number = {state: states_of.count(state) for state in (known.MENDED, known.NOT_NEEDED, known.NOT_MENDED)}
    text = (f"of {len(found)} known breaks between releases, {number[known.MENDED]} are here and mended, "
            f"{number[known.NOT_NEEDED]} are not here, {number[known.NOT_MENDED]} are here and not mended")
    return note(text, "see the table below") if number[known.NOT_MENDED] else ok(text)
