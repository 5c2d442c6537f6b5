"""What a check found: one row per compared tensor, and a verdict in one line."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One compared tensor: `kind` is loss, gradient, buffer or output.

    `differing` of its `elements` differ in at least one bit, by at most `max_difference`.
    """

    kind: str
    name: str
    elements: int
    differing: int
    max_difference: float
    scale: float

    @property
    def equal(self) -> bool:
        return self.differing == 0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` found; printing it gives a table and a verdict."""

    rows: tuple[CheckRow, ...]
    first_difference: str | None
    likely_causes: tuple[str, ...]
    setting: str

    @property
    def equal(self) -> bool:
        """Whether every compared tensor is equal, to the bit."""
        return all(row.equal for row in self.rows)

    @property
    def verdict(self) -> str:
        """One line: equal or not, and where it starts."""
        differing = [row for row in self.rows if not row.equal]
        if not differing:
            return (
                f"EQUAL: all {len(self.rows)} tensors of {self.setting} are the unsplit model's; "
                "0 bits differ"
            )
        worst = max(differing, key=lambda row: row.max_difference)
        return (
            f"DIFFERENT: {len(differing)} of {len(self.rows)} tensors of {self.setting} differ "
            f"from the unsplit model's (most: {worst.kind} {worst.name!r} by "
            f"{worst.max_difference:.3g}); starts at {self.first_difference}"
        )

    def to_json(self) -> str:
        """Write the report as JSON."""
        data = asdict(self) | {"equal": self.equal, "verdict": self.verdict}
        return json.dumps(data)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [
            f"{'kind':8}  {'name':{width}}  {'elements':>10}  {'differing':>9}  "
            f"{'max difference':>14}"
        ]
        for row in self.rows:
            lines.append(
                f"{row.kind:8}  {row.name:{width}}  {row.elements:>10,}  {row.differing:>9,}  "
                f"{row.max_difference:>14.3g}"
            )
        lines += [f"likely cause: {cause}" for cause in self.likely_causes]
        return "\n".join([*lines, self.verdict])
