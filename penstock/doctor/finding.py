"""What the doctor has to say: one line for each thing, with what to change."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum


class Severity(Enum):
    """How much a finding matters."""

    ERROR = "error"
    """Training could not work."""
    WARNING = "warning"
    """It works, but slowly, or not for long."""
    INFO = "info"
    """Good to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing: what it is, with its values, why it matters, and what to change.

    `change` is empty where `why` is an error that says so itself.  `ranks` are those that have it;
    none where it is about the whole job, or about a process alone.
    """

    severity: Severity
    what: str
    why: str
    change: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        who = f"{named(self.ranks)}: " if self.ranks else ""
        return f"{who}{self.what}: {self.why}" + (f". {self.change}" if self.change else "")


def error(what: str, why: str, change: str) -> Finding:
    """Make a finding that training could not work with."""
    return Finding(severity=Severity.ERROR, what=what, why=why, change=change)


def warning(what: str, why: str, change: str) -> Finding:
    """Make a finding about what is slow or fragile."""
    return Finding(severity=Severity.WARNING, what=what, why=why, change=change)


def has_error(findings: Iterable[Finding]) -> bool:
    """Tell whether training could not work."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def softened(findings: Iterable[Finding]) -> list[Finding]:
    """Make warnings of errors, where what is wrong is not needed now."""
    return [
        replace(f, severity=Severity.WARNING) if f.severity is Severity.ERROR else f
        for f in findings
    ]


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Say once what several ranks say alike; errors first, then warnings."""
    ranks: dict[Finding, set[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), set()).update(finding.ranks)
    whole = [replace(finding, ranks=tuple(sorted(who))) for finding, who in ranks.items()]
    order = list(Severity)
    return tuple(sorted(whole, key=lambda finding: order.index(finding.severity)))


def named(ranks: Iterable[int]) -> str:
    """Write "rank 1", "ranks 0 to 3" or "ranks 0, 2"."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers))}"
