"""The commands `gossamer wan coordinator` and `gossamer wan join`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

from gossamer.app.config import load
from gossamer.app.folder import LOGS, default_path
from gossamer.app.job import Job, resolve
from gossamer.app.tracking.sinks import check_loggers
from gossamer.app.wan.folder import SiteFolder
from gossamer.app.wan.logs import Format, LogPlace, set_up_logs
from gossamer.app.wan.ops import party, watched
from gossamer.app.wan.places import ranks_of
from gossamer.app.wan.presence import Where, check_relay
from gossamer.app.wan.rank import RankRun
from gossamer.app.wan.ranks import Ranks
from gossamer.app.wan.site import Leaving, SiteRun
from gossamer.app.wan.spec import identity_of, run_name, secret_of, spec_of
from gossamer.core.errors import BadInput
from gossamer.net.start import world_of
from gossamer.real.signals import handling
from gossamer.wan.dialback import check_handlers
from gossamer.wan.metrics import CoordinatorMetrics
from gossamer.wan.relay.server import RelayServer
from gossamer.wan.roster.service import CoordinatorServer
from gossamer.wan.trust.certificates import check_site
from gossamer.wan.trust.guard import AioGuard, Guard, caller_of, ended_of
from gossamer.wan.trust.terms import check_bind


def coordinator(
    state: Path,
    bind: str,
    *,
    identity: Path | None,
    secret: Path | None,
    relay: str | None = None,
    metrics: str | None = None,
    log_format: Format = "text",
) -> None:
    """`gossamer wan coordinator`: serves until Ctrl-C or SIGTERM. It serves any run whose sites know the secret. With `relay`, sites that
    can only dial out meet there."""
    for option, address in (("--bind", bind), ("--relay", relay), ("--metrics", metrics)):
        if address is not None:
            check_bind(address, option)
    known = secret_of(identity, secret)
    if relay is not None and known is None:
        raise BadInput(f"--relay {relay}: a relay wants the run secret: give --secret FILE, and --identity DIR off this machine")
    over = threading.Event()
    mine, looks = identity_of(identity), []
    beside: RelayServer | None = None
    if known is None:
        set_up_logs(log_format, site="coordinator", run="-")
        server = CoordinatorServer(state, bind, services=[check_handlers(lambda context: None, None)])
    else:
        whole = known
        me = mine.site if mine else "coordinator"
        set_up_logs(log_format, site=me, run="-")
        find = lambda run: party(run, whole)  # noqa: E731
        guard = Guard(me, find, mine)
        name = lambda context: caller_of(context).site  # noqa: E731
        services = [check_handlers(name, mine)]
        server = CoordinatorServer(state, bind, interceptors=[guard], listen=guard.listen, identify=name, ended=ended_of, services=services)
        looks.append(guard.look)
        if relay is not None:
            aio = AioGuard(me, find, mine)
            looks.append(aio.look)
            beside = RelayServer(relay, aio)
    with ExitStack() as stack:
        stack.enter_context(watched(mine, looks, over))
        stack.enter_context(server)
        if beside is not None:
            stack.callback(beside.close)
        if metrics is not None:
            page = CoordinatorMetrics(server.status, relay=None if beside is None else beside.counters)
            page.serve(metrics)
            stack.callback(page.close)
        stack.enter_context(handling(lambda number: over.set()))
        print(f"coordinator: listening at port {server.port}, state in {state}", flush=True)
        if beside is not None:
            print(f"relay: listening at port {beside.port}", flush=True)
        over.wait()


def join(configs: Sequence[Path], sets: Sequence[str], where: Where, *, out: Path | None, log_format: Format = "text") -> None:
    """`gossamer wan join`."""
    check_site(where.site, "--site")
    config = load(configs, sets)
    for named in config.wan.sites:
        check_site(named, "wan.sites names site")
    place = set_up_logs(log_format, site=where.site, run="-", level=logging.INFO if log_format == "json" else logging.WARNING)
    job = resolve(config)
    check_loggers(job.config.log)
    place.run = run_name(job)
    path = out or (Path(job.config.run.out) if job.config.run.out else default_path(f"{job.title}-{where.site}"))
    size = ranks_of(job, where.site)
    rank, started = world_of(size, where.site)
    if rank:
        _serve(job, where, rank, size)
        return
    command = [*map(str, configs), *(word for one in sets for word in ("--set", one)), *_words(where), "--out", str(path)]
    command = ["wan", "join", *command, "--log-format", log_format]
    folder, whole = _take_part(job, where, path, place, size, started, command)
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    if whole:
        from gossamer.report import page

        console.print(f"report: {page.write_page([folder], folder / 'report.html')}", markup=False)
    console.print(f"run folder: {folder}", markup=False)


def _words(where: Where) -> list[str]:
    """As options of the command. What only the first rank of a site needs is left out."""
    given = {
        "--site": where.site, "--coordinator": where.coordinator, "--bind": where.bind, "--advertise": where.advertise,
        "--identity": where.identity, "--secret": where.secret, "--relay": where.relay,
    }  # fmt: skip
    return [word for option, value in given.items() if value is not None for word in (option, str(value))]


def _serve(job: Job, where: Where, rank: int, size: int) -> None:
    """A further rank of a site, to the end."""
    torch.set_num_threads(job.config.run.threads_per_worker)
    job.pace_s(0)
    run = RankRun(job, where, job.corpus(), rank, size)
    try:
        run.serve()
    finally:
        run.close()


def _take_part(job: Job, where: Where, out: Path, place: LogPlace, size: int, started: bool, command: Sequence[str]) -> tuple[Path, bool]:
    """Takes part in a wide-area run as one site, to its end.

    Args:
        size: ranks of the site.
        started, command: as of Ranks.of.

    Returns:
        The site's run folder, and whether it has the records of all sites (the lowest one has).

    Raises:
        BadInput: what was given cannot be.
        RunFailed: this site cannot go on. The others can.
        SystemExit: 128 + signal, after a clean leave.
    """
    torch.set_num_threads(job.config.run.threads_per_worker)
    job.pace_s(0)
    corpus = job.corpus()
    folder = SiteFolder(out, job, corpus, where.site, place.run)
    check_relay(where, size)
    spec_of(job, corpus)
    ranks, site = Ranks.of(job, size, started, command, out / LOGS), None
    try:
        if folder.finished:
            print(f"site {where.site} has finished run {place.run}: there is nothing to go on with", flush=True)
            return folder.path, False
        site = SiteRun(job, where, corpus, place, ranks)
        with handling(site.on_signal):
            return folder.path, site.take_part(folder)
    except Leaving as leaving:
        raise SystemExit(128 + leaving.signal) from None
    finally:
        ranks.close()
        if site is not None:
            site.close()
