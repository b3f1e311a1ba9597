"""Settings of checkpoints: when, how, how many, and what becomes of a run that goes on with other workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from gossamer.app.settings.base import Section
from gossamer.core.errors import BadInput


class CheckpointSection(Section):
    """Resumable cuts of the run."""

    every: int = Field(default=0, ge=0, description="rounds between checkpoints; 0: only at the end")
    keep: int = Field(default=2, ge=1, description="checkpoints to keep")
    background: bool = Field(
        default=True, description="real runs: written while the next steps are taken, from a copy; false: the worker waits for its disk"
    )
    resize: Literal["refuse", "mean"] = Field(
        default="refuse",
        description="a resume with another number of workers: refuse; mean: who comes begins at the mean, who leaves stays in it",
    )
    resized: list[list[int]] = Field(
        default=[],
        description="[round, workers until then, planned tokens until then, planned tokens of the run] of each such resume; written by it",
    )

    @field_validator("resized")
    @classmethod
    def _rising(cls, resized: list[list[int]]) -> list[list[int]]:
        whole = all(len(one) == 4 and one[0] >= 1 and one[1] >= 1 and 0 <= one[2] < one[3] for one in resized)
        if not whole or sorted(resized) != resized:
            raise BadInput(
                f"checkpoint.resized = {resized}: expected [round, workers, planned tokens until then, planned tokens of the run] of each "
                "resume, rounds rising, as gossamer train --resume RUN --workers M writes it"
            )
        return resized
