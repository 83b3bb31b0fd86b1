"""One log line about a drafter that the target almost never agrees with."""

import logging

__all__ = ["AcceptanceReport"]

_LOG = logging.getLogger("torch_dflash")

_AFTER, _BELOW = 64, 0.1  # offered tokens before a verdict; acceptance that counts as never
_MEMORY = 192  # offered tokens that the average remembers: a hard passage is no verdict


class AcceptanceReport:
    """Warns once when the recent share of accepted draft tokens falls below a tenth.

    Tokens that were not offered do not count, so a policy that offers little cannot hide it.
    """

    def __init__(self) -> None:
        self._offered = 0
        self._rate = 0.0
        self._reported = False

    def observe(self, offered: int, accepted: int) -> None:
        """Take note of a step; one that offered nothing says nothing."""
        if self._reported or offered <= 0:
            return
        self._offered += offered
        # the plain average at first, an exponential one later
        weight = offered / min(self._offered, max(_MEMORY, offered))
        self._rate += weight * (accepted / offered - self._rate)
        if self._offered >= _AFTER and self._rate < _BELOW:
            self._reported = True
            _LOG.warning(
                "the target accepts %.1f %% of the last draft tokens (%d offered so far): this "
                "drafter does not pay here; check that it was trained for this target and this "
                "kind of text",
                100 * self._rate,
                self._offered,
            )
