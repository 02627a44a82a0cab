"""What the demo proves, and how a turn is compared with plain generation."""

from __future__ import annotations

from dataclasses import dataclass, field

TIE_GAP = 1e-4  # a difference counts as a tie only where the reference's two highest logits are closer than this
TIES_PERCENT = 1  # of the answers that may have one


@dataclass
class Comparison:
    """Of one answer with the reference's."""

    same: bool
    tie_at: int | None = None  # token index of a tie that made them part
    gap: float | None = None
    detail: str = ""
    tokens: int = 0  # of the answer

    @property
    def passed(self) -> bool:
        return self.same or self.tie_at is not None


def compare(answer: list[int], reference: list[int], gaps: list[float]) -> Comparison:
    """Token for token. After a tie the texts go separate ways, so the comparison ends there."""
    for index, (ours, theirs) in enumerate(zip(answer, reference, strict=False)):
        if ours != theirs:
            detail = f"token {index}: {ours}, reference {theirs}, its top two logits {gaps[index]:.2e} apart"
            if gaps[index] < TIE_GAP:
                return Comparison(False, index, gaps[index], detail, index)
            return Comparison(False, detail=detail)
    if len(answer) != len(reference):
        return Comparison(False, detail=f"{len(answer)} tokens, reference {len(reference)}")
    return Comparison(True, tokens=len(answer))


@dataclass
class Checks:
    """Named claims with their evidence, in the order they were made."""

    rows: list[dict] = field(default_factory=list)

    def claim(self, name: str, holds: bool, evidence: str) -> None:
        self.rows.append({"name": name, "holds": bool(holds), "evidence": evidence})

    def answers(self, name: str, comparisons: list[Comparison]) -> None:
        """The claim that answers are the reference's: none differs, and few are ties, which are named."""
        wrong = [each.detail for each in comparisons if not each.passed]
        ties = [each.detail for each in comparisons if each.passed and not each.same]
        few = len(ties) * 100 <= len(comparisons) * TIES_PERCENT
        evidence = f"{sum(each.tokens for each in comparisons)} tokens of {len(comparisons)} answers"
        details = [f"tie: {detail}" for detail in ties] + wrong[:3]
        self.claim(name, bool(comparisons) and not wrong and few, "; ".join([evidence, *details]))

    @property
    def all_hold(self) -> bool:
        return bool(self.rows) and all(row["holds"] for row in self.rows)
