"""What the plugin can do to vLLM, one feature per module, and what became of each.

A feature module has a function ``apply`` and a line in :data:`FEATURES`. ``apply`` may import
anything, is called once per process, and returns one line that says what it replaced. It raises
:class:`Declined` when the vLLM at hand is not what it was written for, :class:`NotNeeded` when that
does well without it; any other exception switches the feature off too, with its traceback in the
log. Nothing raises into vLLM.

``TORCH_DFLASH_DISABLE=all`` or ``=name,name`` turns features off, ``TORCH_DFLASH_ENABLE=name``
turns on those that wait to be asked for.
"""

import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "FEATURES",
    "Declined",
    "Feature",
    "NotNeeded",
    "Outcome",
    "decline",
    "outcomes",
    "register",
]

# A child of vLLM's logger has its handlers, level and format.
_log = logging.getLogger("vllm.torch_dflash")
_REPORTED: Final = "TORCH_DFLASH_REPORTED"  # set for child processes: the parent has said it

State = Literal["on", "off", "declined"]


class Declined(Exception):
    """The feature cannot work with this vLLM; the text says what was wanted and what was found."""


class NotNeeded(Exception):
    """This vLLM, or this platform, does well without the feature; the text says why."""


@dataclass(frozen=True)
class Feature:
    """One replacement.

    Attributes:
        name: as in the environment variables.
        module: of this package, with the function ``apply() -> str``.
        stable: built on vLLM's public registries alone, so it may run on versions nobody checked.
        checked: versions it was checked with, as ``major.minor``.
        default: on unless disabled; False waits for ``TORCH_DFLASH_ENABLE``.
    """

    name: str
    module: str
    stable: bool
    checked: tuple[str, ...] = ("0.32", "0.33")
    default: bool = True


@dataclass(frozen=True)
class Outcome:
    """What became of a feature: its state, and one line that says what was replaced, or why not."""

    feature: Feature
    state: State
    detail: str


FEATURES: Final[tuple[Feature, ...]] = (
    Feature("gdn", "gdn", stable=False),
    Feature("align_copies", "align_copies", stable=False),
    Feature("gguf", "gguf", stable=False),
    Feature("adaptive", "adaptive", stable=False),
    Feature("drafters", "drafters", stable=False),
    Feature("heads", "heads", stable=False, default=False),
    Feature("norms", "norms", stable=False),
    Feature("cpu_sampling", "cpu_sampling", stable=False),
)

_state: dict[str, str] = {}  # "version" of vLLM, once registered
_outcomes: dict[str, Outcome] = {}
_declined: dict[tuple[str, str], None] = {}  # (feature, reason) at run time, in order


def _vllm_version() -> str:
    from vllm.version import __version__

    return str(__version__)


def _minor(version: str) -> str:
    return ".".join(re.findall(r"\d+", version)[:2])


def _names(variable: str, known: Iterable[str]) -> set[str]:
    """Feature names in an environment variable; an unknown one is a warning, not ignored."""
    names = {n.strip() for n in os.environ.get(variable, "").split(",") if n.strip()}
    wrong = sorted(names - {*known, "all"})
    if wrong:
        _log.warning(
            "%s: must name features of torch-dflash (%s, all), got %s",
            variable,
            ", ".join(known),
            ", ".join(wrong),
        )
    return names


def _apply(feature: Feature) -> str:
    module = importlib.import_module(f"{__package__}.{feature.module}")
    apply: Callable[[], str] = module.apply
    return apply()


def _run(feature: Feature, version: str, disabled: set[str], enabled: set[str]) -> Outcome:
    if disabled & {feature.name, "all"}:
        return Outcome(feature, "off", "TORCH_DFLASH_DISABLE")
    if not feature.default and not enabled & {feature.name, "all"}:
        return Outcome(feature, "off", f"on with TORCH_DFLASH_ENABLE={feature.name}")
    if _minor(version) not in feature.checked and not feature.stable:
        checked = " and ".join(feature.checked)
        return Outcome(feature, "declined", f"checked with vLLM {checked}, this is {version}")
    try:
        return Outcome(feature, "on", _apply(feature))
    except NotNeeded as reason:
        return Outcome(feature, "off", str(reason))
    except Declined as reason:
        return Outcome(feature, "declined", str(reason))
    except Exception as error:
        _log.warning("torch-dflash: %s is off, it failed to install", feature.name, exc_info=True)
        return Outcome(feature, "declined", f"{type(error).__name__}: {error}")


def register() -> None:
    """Install every feature that this vLLM allows, and say so in one line; idempotent."""
    if "version" in _state:
        return
    try:
        version = _state["version"] = _vllm_version()
    except ImportError as error:
        _log.warning("torch-dflash: nothing was installed, vLLM cannot be imported: %s", error)
        return
    known = [f.name for f in FEATURES]
    disabled = _names("TORCH_DFLASH_DISABLE", known)
    enabled = _names("TORCH_DFLASH_ENABLE", known)
    for feature in FEATURES:
        _outcomes[feature.name] = _run(feature, version, disabled, enabled)
    if _REPORTED in os.environ:
        _log.debug("%s", summary())
    else:
        os.environ[_REPORTED] = version
        _say(summary())


def _say(line: str) -> None:
    """Log at INFO, also before vLLM has set its logging up, which it does after loading plugins."""
    early = None
    if not _log.hasHandlers() and os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0":
        early = logging.StreamHandler(sys.stdout)
        early.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        _log.addHandler(early)
        level = logging.getLevelName(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
        _log.setLevel(level if isinstance(level, int) else logging.INFO)
    _log.info("%s", line)
    if early is not None:
        _log.removeHandler(early)
        _log.setLevel(logging.NOTSET)


def summary() -> str:
    """One line: what is replaced, what is not and why."""
    version = _state.get("version", "?")
    parts = [f"torch-dflash on vLLM {version}"]
    if not any(_minor(version) in f.checked for f in FEATURES):
        parts.append("this version is unknown, only stable features are on")
    for state in ("on", "declined", "off"):
        found = [f"{o.feature.name} ({o.detail})" for o in _outcomes.values() if o.state == state]
        if found:
            parts.append(f"{state}: {', '.join(found)}")
    return "; ".join(parts)


def decline(feature: str, reason: str) -> None:
    """Note, and log once, that a feature leaves something of a running engine to vLLM.

    Args:
        feature: its name.
        reason: what is left to vLLM and why.
    """
    if (feature, reason) not in _declined:
        _declined[feature, reason] = None
        _log.warning("torch-dflash: %s leaves to vLLM: %s", feature, reason)


def outcomes() -> Mapping[str, Outcome]:
    """What became of every feature in this process, by name; empty before :func:`register`."""
    return dict(_outcomes)
