"""What the demo proves, and how a turn is compared with plain generation."""

from __future__ import annotations

from dataclasses import dataclass, field

TIE_GAP = 1e-4  # a difference counts as a tie only where the reference's two highest logits are closer than this


@dataclass
class Comparison:
    """Of one answer with the reference's."""

    same: bool
    tie_at: int | None = None  # token index of a tie that made them part
    gap: float | None = None
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.same or self.tie_at is not None


def compare(answer: list[int], reference: list[int], gaps: list[float]) -> Comparison:
    """Token for token. After a tie the texts go separate ways, so the comparison ends there."""
    for index, (ours, theirs) in enumerate(zip(answer, reference, strict=False)):
        if ours != theirs:
            detail = f"token {index}: {ours}, reference {theirs}, its top two logits {gaps[index]:.2e} apart"
            if gaps[index] < TIE_GAP:
                return Comparison(False, index, gaps[index], detail)
            return Comparison(False, detail=detail)
    if len(answer) != len(reference):
        return Comparison(False, detail=f"{len(answer)} tokens, reference {len(reference)}")
    return Comparison(True)


@dataclass
class Checks:
    """Named claims with their evidence, in the order they were made."""

    rows: list[dict] = field(default_factory=list)

    def claim(self, name: str, holds: bool, evidence: str) -> None:
        self.rows.append({"name": name, "holds": bool(holds), "evidence": evidence})

    @property
    def all_hold(self) -> bool:
        return bool(self.rows) and all(row["holds"] for row in self.rows)
