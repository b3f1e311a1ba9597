"""The run folder of one site: looked at before it joins, made when its first session opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gossamer.app.config import load, shared
from gossamer.app.folder import RunFolder, check_new
from gossamer.app.job import Job
from gossamer.app.metrics import check_unchanged, facts_of
from gossamer.app.planning.planned import begin
from gossamer.core.errors import BadInput
from gossamer.train.data import Corpus
from gossamer.wan.roster.differing import named, settings_of

_ANEW = "choose another folder with --out, and for another run an id of its own: --set wan.run=NAME"
_COMMANDS = {"sim": "simulate", "net": "train"}


class SiteFolder(RunFolder):
    """A folder that this site goes on with, or that is made by `begin`.

    Raises:
        BadInput: it holds something else: another site's, another run's, or that of another configuration.
    """

    def __init__(self, path: Path, job: Job, corpus: Corpus, site: str, run: str) -> None:
        super().__init__(path)
        self._job, self._corpus, self._mine = job, corpus, {"site": site, "run": run}
        self.seat: int | None = None
        """That the site had; None: not known."""
        self.there = (path / "config.toml").is_file()
        """Whether it is made."""
        if not self.there:
            check_new(path, f"it has no config.toml, and so is no run folder to go on with: {_ANEW}")
            return
        facts = self.facts()
        if facts["world"] != "wan":
            raise BadInput(f"the run folder {path} is none of a site, but of gossamer {_COMMANDS[facts['world']]}: {_ANEW}")
        for key, what in (("site", "site"), ("run", "run")):
            if (found := facts.get(key, self._mine[key])) != self._mine[key]:
                raise BadInput(f"the run folder {path} is of {what} {found}, and this is {what} {self._mine[key]}: {_ANEW}")
        if facts.get("run_id") != f"{job.run_id:016x}" and (said := named(_settings(path), settings_of(shared(job.config), {}))):
            raise BadInput(f"the run in {path} began with another configuration: {said}. Put that back, or {_ANEW}")
        check_unchanged(job, corpus, facts, f"put it back, or {_ANEW}")
        seat = facts.get("seat")
        self.seat = seat if isinstance(seat, int) else None

    def begin(self, seat: int, names: Sequence[str] | None = None) -> None:
        """Makes it, unless it is there. `names`: of the workers, as far as they are known.

        Raises:
            BadInput: somebody has put something there meanwhile; or the site has another seat than before.
            RunFailed: it cannot be written.
        """
        if self.there:
            if self.seat not in (None, seat):
                raise BadInput(
                    f"site {self._mine['site']} has seat {seat} of run {self._mine['run']} now, and had seat {self.seat} in {self.path}: "
                    "choose another folder with --out; it takes the state of another site"
                )
            self.goes_on()
            return
        facts = facts_of(self._job, self._corpus, "wan") | self._mine | {"seat": seat}
        begin(self.path, self._job, facts, self._corpus.tokenizer, names)
        self.there, self.seat = True, seat


def _settings(path: Path) -> dict[str, str]:
    return settings_of(shared(load([path / "config.toml"])), {})
