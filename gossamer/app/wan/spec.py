"""A wide-area run as the coordinator and the other sites know it, made of its configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

import gossamer
from gossamer.app.config import shared
from gossamer.app.job import Job
from gossamer.app.served import due
from gossamer.app.train import check_several_ranks
from gossamer.app.wan.places import ANY
from gossamer.core.errors import BadInput
from gossamer.core.tree import layout_hash
from gossamer.train.data import Corpus
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.links.link import LinkSettings
from gossamer.wan.roster.differing import settings_of
from gossamer.wan.roster.records import Roster, Spec
from gossamer.wan.trust.certificates import Identity
from gossamer.wan.trust.terms import Terms, host_of, is_loopback, joined, read_secret

MOST_EVALUATIONS = 2000
"""Of a method with servers: each is a word of every site in the store of a session."""
SECRET_FILE = "run.secret"
"""Of the identity folder, where no other is given."""


def spec_of(job: Job, corpus: Corpus) -> Spec:
    """What all sites must have in common.

    Raises:
        BadInput: the method or the fleet is not for sites on the internet.
    """
    if job.method.tiers and (many := sum(due(job, block) for block in range(1, job.method.rounds + 1))) > MOST_EVALUATIONS:
        raise BadInput(
            f"{many} evaluations of {job.method.name} (eval.every = {job.config.eval.every}): at most {MOST_EVALUATIONS} go by the "
            "connections of the sites; evaluate less often"
        )
    check_several_ranks(job)
    if job.kills and 0 in job.kills.values():
        raise BadInput("clock.kill with round 0 is for simulations: leave the site out instead (wan.founders)")
    wan, sync = job.config.wan, job.method.synchronous
    if not sync and not job.goes_on:
        raise BadInput(
            f"{job.method.name} over this graph cannot go on without a site (or run.on_death forbids it): use one_peer, two_peer or ring"
        )
    if wan.late == "keep" and (not sync or job.method.cadence.overlap):
        why = "works with overlap: an exchange may be in flight, and what of it the others have is not known" if sync else "is gossip"
        raise BadInput(
            f"wan.late = 'keep' is for synchronous methods without overlap, and {job.method.name} {why}: leave it out, or set "
            f"wan.late = 'drop'{', or method.overlap = 0' if sync else ''}"
        )
    without: Literal["elect", "wait", "go_on"] = ("elect" if sync else "go_on") if wan.without == "auto" else wan.without
    return Spec(
        run=run_name(job),
        configuration=f"{job.run_id:016x}",
        settings=settings_of_job(job),
        layout=f"{layout_hash(job.layout):016x}",
        versions={"gossamer": gossamer.__version__, "torch": torch.__version__, "corpus": corpus.content_hash[:64]}
        | ({"frozen": job.models.frozen_digest} if job.models.frozen_digest else {}),
        seats=job.n,
        sites=tuple(wan.sites),
        synchronous=sync,
        min_sites=min(wan.min_sites, job.n) if not wan.alone else wan.min_sites,
        founders=wan.founders,
        alone=wan.alone or job.n == 1,
        quorum=wan.quorum,
        late=wan.late,
        without=without,
        floor_s=wan.deadline_s,
        lease_s=wan.lease_s,
        spread=wan.spread,
    )


def settings_of_job(job: Job) -> dict[str, str]:
    """What its configuration says, and marks of what that stands for."""
    return settings_of(shared(job.config), {"fleet": job.fleet, "method": job.method, "layout": layout_hash(job.layout)})


def run_name(job: Job) -> str:
    """The id of the run.

    Raises:
        BadInput: the one that was given cannot be. Two that differ must not become one.
    """
    given = job.config.wan.run
    named = re.sub(r"[^A-Za-z0-9._-]+", "-", given or job.title).strip("-._")[:64]
    if given and named != given:
        raise BadInput(
            f"wan.run is {given[:80]!r}: expected 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-', beginning and ending with a letter or digit"
        )
    return named or "run"


def link_settings(job: Job, timeouts: Timeouts) -> LinkSettings:
    """Connections whose time-outs go with all others. Sites of several ranks have connections between all of these, so each needs fewer."""
    beat_s, channels = timeouts.beat / 2, -(-job.config.wan.channels // max(job.fleet.ranks))
    return LinkSettings(channels=channels, beat_s=beat_s, silent_s=timeouts.lease / 2, patience_s=timeouts.lease)


def secret_of(identity: Path | None, secret: Path | None) -> bytes | None:
    """The secret of the run. None: neither certificates nor a secret were given, and all goes plainly, on this machine.

    Raises:
        BadInput: there is an identity, and no secret.
    """
    if secret is None and identity is None:
        return None
    if secret is None and not (there := (identity or Path()) / SECRET_FILE).exists():
        raise BadInput(
            f"{there}: no such file: give the run's secret with --secret FILE, the same on all sites (gossamer wan secret makes one)"
        )
    return read_secret(secret or (identity or Path()) / SECRET_FILE)


def identity_of(folder: Path | None) -> Identity | None:
    """Certificate and key."""
    return None if folder is None else Identity.load(folder)


def terms_of(spec: Spec, secret: bytes) -> Terms:
    """For greetings between the sites."""
    return Terms(spec.run, secret, spec.configuration, spec.layout)


class RosterOf:
    """Who may call: the sites that are there, as the coordinator last said."""

    def __init__(self, roster: Callable[[], Roster | None]) -> None:
        self._roster = roster

    @property
    def epoch(self) -> int:
        found = self._roster()
        return 0 if found is None else found.epoch

    def allows(self, site: str) -> bool:
        found = self._roster()
        return found is not None and any(m.site == site and m.there for m in found.members)


def advertised(bind: str | None, advertise: str | None, port: int | None, coordinator: str) -> str | None:
    """Where the others reach this site; None: nowhere, it dials out.

    Raises:
        BadInput: it listens on all its addresses, and none to advertise was given.
    """
    if bind is None or port is None:
        if advertise is not None:
            raise BadInput(f"--advertise {advertise}, and this site listens nowhere: give --bind too, such as 0.0.0.0:7001")
        return None
    if advertise is not None:
        return advertise
    host = host_of(bind)
    if host in ANY:
        raise BadInput(f"--bind {bind} is all addresses of this machine: say with --advertise HOST:PORT which one the others reach")
    if is_loopback(host) and not is_loopback(host_of(coordinator)):
        raise BadInput(f"--bind {bind} is loopback, which other sites cannot reach: bind 0.0.0.0:PORT and give --advertise HOST:PORT")
    return joined(host, port)
