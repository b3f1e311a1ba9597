"""Commands of `gossamer wan` for those who look after runs: check, status, relay. As in `gossamer.cli`, there is no logic here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Identity = Annotated[
    Path | None,
    typer.Option("--identity", metavar="DIR", help="Folder of gossamer wan ca issue. None: this machine alone.", show_default=False),
]
Secret = Annotated[
    Path | None, typer.Option("--secret", metavar="FILE", help="The run secret; DIR/run.secret by default.", show_default=False)
]
Coordinator = Annotated[str, typer.Option("--coordinator", metavar="HOST:PORT", help="Where the coordinator is.", show_default=False)]
Bind = Annotated[str | None, typer.Option("--bind", metavar="HOST:PORT", help="Where to listen. None: dials out only.", show_default=False)]
Advertise = Annotated[str | None, typer.Option("--advertise", metavar="HOST:PORT", help="Where the others reach it.", show_default=False)]
Relay = Annotated[str | None, typer.Option("--relay", metavar="HOST:PORT", help="Where the relay is.", show_default=False)]
Metrics = Annotated[
    str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Show figures for Prometheus there.", show_default=False)
]
TakeOver = Annotated[bool, typer.Option("--take-over", help="Stop another process of this site that is in the run, and take its place.")]
LogFormat = Annotated[Literal["text", "json"], typer.Option("--log-format", help="Of the log, on stderr.")]


def check(
    coordinator: Coordinator,
    bind: Bind = None,
    advertise: Advertise = None,
    relay: Relay = None,
    identity: Identity = None,
    secret: Secret = None,
    site: Annotated[
        str | None, typer.Option("--site", metavar="SITE", help="Id of this site; that of its certificate by default.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0, max=5, help="How long each rate is measured. 0: not at all.")] = 2.0,
) -> None:
    """Say whether this site can take part from here, what is wrong, and what to do: the coordinator dials back."""
    from gossamer.app.wan import ops

    ops.check(coordinator, site=site, bind=bind, advertise=advertise, relay=relay, identity=identity, secret=secret, seconds=seconds)


def status(
    coordinator: Coordinator,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="This run alone.", show_default=False)] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="How often, with --watch.")] = 2.0,
    identity: Identity = None,
    secret: Secret = None,
) -> None:
    """Show who is in a run, how far behind, losses, bytes, the last exchange, leases."""
    from gossamer.app.wan import ops

    ops.status(coordinator, run=run, watch=watch, every_s=every, identity=identity, secret=secret)


def forget(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of the run at the coordinator.", show_default=False)],
    coordinator: Coordinator,
    site: Annotated[
        str | None, typer.Option("--site", metavar="SITE", help="Only this site of it, which frees its seat.", show_default=False)
    ] = None,
    identity: Identity = None,
    secret: Secret = None,
) -> None:
    """Have the coordinator forget a run, when none of its sites is there, or a site of it that is out for good."""
    from gossamer.app.wan import ops

    ops.forget(coordinator, run, site=site, identity=identity, secret=secret)


def relay(
    bind: Annotated[str, typer.Option("--bind", metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:7401",
    identity: Identity = None,
    secret: Secret = None,
    most_mbps: Annotated[
        float | None, typer.Option("--most-mbps", min=0.1, help="The most that one site may send through it.", show_default=False)
    ] = None,
    metrics: Metrics = None,
    log_format: LogFormat = "text",
) -> None:
    """Let sites that can only dial out meet here, until stopped."""
    from gossamer.app.wan import ops

    ops.relay(bind, identity=identity, secret=secret, most_mbps=most_mbps, metrics=metrics, log_format=log_format)


def add_to(group: typer.Typer) -> None:
    """Adds these commands to `gossamer wan`."""
    for command in (check, status, forget, relay):
        group.command()(command)
