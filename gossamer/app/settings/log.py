"""Settings of loggers: where the numbers of a run are shown besides its folder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gossamer.app.settings.base import Section

Place = Literal["tensorboard", "wandb", "trackio"]


class LogSection(Section):
    """Loggers beside metrics.jsonl, which is always written. It is no part of the hash of the configuration."""

    to: list[Place] = Field(default=[], description="tensorboard, wandb, trackio: all of these that are to have the numbers of the run")
    project: str = Field(default="gossamer", min_length=1, description="wandb, trackio: the project that the run is listed in")
    name: str = Field(default="", description="wandb, trackio: the name of the run; empty: its label")
    offline: bool = Field(default=False, description="wandb: no network; the run folder keeps all, for wandb sync")
