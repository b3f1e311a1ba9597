"""The command line. It reads arguments and turns errors into exit codes; everything else is in `gossamer.app.commands`.

Exit codes: 0 fine, 1 the run failed, 2 what was given cannot work, 130 interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gossamer import BadInput, RunFailed, Stopped, __version__
from gossamer.cli_model import BackTo
from gossamer.cli_model import add_to as add_models_to
from gossamer.cli_report import add_to as add_reports_to
from gossamer.cli_wan import LogFormat, Metrics, Relay, TakeOver, add_to

app = typer.Typer(
    name="gossamer",
    help="Train one model on workers that are far apart, unlike, and rarely in touch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

wan_app = typer.Typer(help="Sites on the internet.", no_args_is_help=True)
ca_app = typer.Typer(help="The project's own certificate authority: which site is which.", no_args_is_help=True)
wan_app.add_typer(ca_app, name="ca")
app.add_typer(wan_app, name="wan")
add_to(wan_app)
add_models_to(app)
add_reports_to(app)

Configs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="CONFIG", help="TOML files; a later one overrides an earlier one. None: built-in defaults.", show_default=False),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, such as plan.steps=10. May be repeated.", show_default=False),
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run; made when it is missing.", show_default=False)]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Go on with the last checkpoint of this run folder.", show_default=False)
]
Ca = Annotated[Path, typer.Option("--ca", metavar="DIR", help="Folder of the CA.")]
Site = Annotated[str, typer.Argument(metavar="SITE", help="Id of the site: a-z, 0-9 and -.", show_default=False)]
Identity = Annotated[
    Path | None,
    typer.Option("--identity", metavar="DIR", help="Folder of gossamer wan ca issue. None: this machine alone.", show_default=False),
]
Secret = Annotated[
    Path | None, typer.Option("--secret", metavar="FILE", help="The run secret; DIR/run.secret by default.", show_default=False)
]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gossamer {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options of the command as a whole."""


@app.command()
def train(
    configs: Configs = None,
    sets: Sets = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Local worker processes. Left out: one worker, as under torchrun.", show_default=False),
    ] = None,
    resume: Resume = None,
    round: BackTo = None,
    out: Out = None,
) -> None:
    """Train for real: local worker processes, or one worker of several under torchrun."""
    from gossamer.app import commands

    commands.train(configs or [], sets or [], workers=workers, resume=resume, round=round, out=out)


@app.command()
def simulate(
    configs: Configs = None,
    sets: Sets = None,
    resume: Resume = None,
    round: BackTo = None,
    out: Out = None,
    timing_only: Annotated[
        bool, typer.Option("--timing-only", help="Clock and bytes without training: seconds instead of minutes.")
    ] = False,
) -> None:
    """Train all workers of a fleet on this machine, on a virtual clock and a model of their network."""
    from gossamer.app import commands

    commands.simulate(configs or [], sets or [], resume=resume, round=round, out=out, timing_only=timing_only)


@app.command()
def compare(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG", help="One TOML file for each run, or row.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs, the table and the report.", show_default=False)],
    sets: Sets = None,
    base: Annotated[
        Path | None, typer.Option("--base", metavar="CONFIG", help="A TOML file that all runs share.", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Runs at a time. Left out: 1; what an engine has room for.", show_default=False),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid", metavar="KEY=V1,V2", help="Every CONFIG with each of these values. May be repeated: combinations.", show_default=False
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Every row with seeds 0, 1, ...: so many of them.", show_default=False)
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="K/N", help="Run the K-th of N parts of a grid.", show_default=False)
    ] = None,
    cells: Annotated[
        Path | None,
        typer.Option(
            "--cells", metavar="DIR", help="Where a grid's finished runs are kept. Left out: cells under --out.", show_default=False
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the run folders of a grid.")] = False,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="NAME", help="Run a grid on ray, or on slurm.", show_default=False)
    ] = None,
    engine_options: Annotated[
        list[str] | None,
        typer.Option("--engine-option", metavar="KEY=VALUE", help="Of the engine: partition=gpu. May be repeated.", show_default=False),
    ] = None,
) -> None:
    """Simulate several configurations on the same data and fleet: one table and one report; with --grid or --seeds, one table of means."""
    from gossamer.app import commands

    if grid or seeds or shard or cells or keep or engine or engine_options:
        commands.compare_grid(
            configs, sets or [], base=base, jobs=jobs or 0, out=out, grid=grid or [], seeds=seeds, shard=shard, cells=cells, keep=keep,
            engine=engine, engine_options=engine_options or [],
        )  # fmt: skip
    else:
        commands.compare(configs, sets or [], base=base, jobs=jobs or 1, out=out)


@app.command()
def plan(
    configs: Configs = None,
    sets: Sets = None,
    topology: Annotated[
        list[str] | None,
        typer.Option(
            "--topology",
            metavar="NAME",
            help="Show this graph's spectral gap instead; all: every one. May be repeated.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say what each worker would do in a round, its bytes, and the expected utilisation. Trains nothing."""
    from gossamer.app import commands

    commands.plan(configs or [], sets or [], topology or [])


@app.command()
def profile(
    configs: Configs = None,
    sets: Sets = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Local worker processes. Left out: one worker, as under torchrun.", show_default=False),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option("--batches", metavar="B1,B2,...", help="Sequences per step to measure. Left out: 1, 2, 4, ...", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Inner steps to time at each batch size, at least.")] = 5,
    memory_limit_gb: Annotated[
        float | None,
        typer.Option("--memory-limit-gb", metavar="GB", help="What a worker may use. Left out: what there is.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The fleet file to write.")] = Path("profile.toml"),
) -> None:
    """Measure this machine's workers, their memory and the links between them: a fleet file for plans and simulations."""
    from gossamer.app import commands

    commands.profile(configs or [], sets or [], workers=workers, batches=batches, steps=steps, memory_limit_gb=memory_limit_gb, out=out)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which: geomesh, gasloc, zeroshot.", show_default=False)],
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time, each in a process of its own.")] = 2,
    cells: Annotated[
        Path | None, typer.Option("--cells", help="Folder of cached runs; default: bench/results/cells.", show_default=False)
    ] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder of the result file.")] = Path("bench/results"),
    docs: Annotated[Path, typer.Option("--docs", help="Folder of the page whose tables are filled in, and of its figures.")] = Path("docs"),
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="zeroshot: items of public tasks too, as of eval.", show_default=False)
    ] = None,
) -> None:
    """Reproduce a published table: tuned rows, paired seeds, figures. Cached runs are not run again."""
    from gossamer.bench.run import run

    run(name, jobs=jobs, cells=cells, results=results, docs=docs, data=data)


@app.command()
def demo(out: Out = None) -> None:
    """A few minutes on this machine: GeoMesh and its rivals on four regions, with a report."""
    from gossamer.app import commands

    commands.demo(out=out)


@ca_app.command("init")
def ca_init(
    ca: Ca = Path("ca"),
    name: Annotated[str, typer.Option("--name", help="Of the project; stands in the certificates.")] = "gossamer",
    days: Annotated[int, typer.Option("--days", min=1, help="How long the CA is good.")] = 3650,
) -> None:
    """Make a CA, in a new folder."""
    from gossamer.app.wan import authority

    authority.ca_init(ca, name=name, days=days)


@ca_app.command("issue")
def ca_issue(
    site: Site,
    ca: Ca = Path("ca"),
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="HOST", help="IP address or name the site is dialled at. May be repeated.", show_default=False),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, help="How long the certificate is good.")] = 365,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder to make for the site. Left out: sites/SITE in the CA.", show_default=False),
    ] = None,
) -> None:
    """Make a key and a certificate for a site, in a folder to bring there."""
    from gossamer.app.wan import authority

    authority.ca_issue(ca, site, hosts or [], days=days, out=out)


@ca_app.command("revoke")
def ca_revoke(
    site: Site,
    ca: Ca = Path("ca"),
    serial: Annotated[
        str | None,
        typer.Option("--serial", metavar="HEX", help="One certificate. Left out: all of the site.", show_default=False),
    ] = None,
) -> None:
    """Declare certificates of a site invalid: writes the signed list that the sites read."""
    from gossamer.app.wan import authority

    authority.ca_revoke(ca, site, serial=serial)


@ca_app.command("list")
def ca_list(ca: Ca = Path("ca")) -> None:
    """Show every certificate and what became of it."""
    from gossamer.app.wan import authority

    authority.ca_list(ca)


@wan_app.command("coordinator")
def wan_coordinator(
    state: Annotated[Path, typer.Option("--state", metavar="FILE", help="What it knows is kept there.")] = Path("runs.db"),
    bind: Annotated[str, typer.Option("--bind", metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:7400",
    identity: Identity = None,
    secret: Secret = None,
    relay: Annotated[
        str | None, typer.Option("--relay", metavar="HOST:PORT", help="Let sites that can only dial out meet there.", show_default=False)
    ] = None,
    metrics: Metrics = None,
    log_format: LogFormat = "text",
) -> None:
    """Keep the roster and the sessions of runs, until stopped."""
    from gossamer.app.wan import run

    run.coordinator(state, bind, identity=identity, secret=secret, relay=relay, metrics=metrics, log_format=log_format)


@wan_app.command("join")
def wan_join(
    site: Annotated[str, typer.Option("--site", metavar="SITE", help="Id of this site: a-z, 0-9 and -.", show_default=False)],
    coordinator: Annotated[str, typer.Option("--coordinator", metavar="HOST:PORT", help="Where the coordinator is.", show_default=False)],
    configs: Configs = None,
    sets: Sets = None,
    bind: Annotated[
        str | None, typer.Option("--bind", metavar="HOST:PORT", help="Where to listen. None: dials out only.", show_default=False)
    ] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", metavar="HOST:PORT", help="Where the others reach it.", show_default=False)
    ] = None,
    identity: Identity = None,
    secret: Secret = None,
    out: Out = None,
    bootstrap: Annotated[bool, typer.Option("--bootstrap", help="Begin from the state of this site.")] = False,
    take_over: TakeOver = False,
    relay: Relay = None,
    metrics: Metrics = None,
    time_outs: Annotated[bool, typer.Option("--time-outs", help="Show all time-outs at the start.")] = False,
    log_format: LogFormat = "text",
) -> None:
    """Train as one site of a run, with the others. Called again with the same --out it goes on."""
    from gossamer.app.wan.logs import loading

    loading(log_format, site)
    from gossamer.app.wan import run
    from gossamer.app.wan.presence import Where

    where = Where(site, coordinator, bind, advertise, identity, secret, bootstrap, take_over, relay, metrics, time_outs)
    run.join(configs or [], sets or [], where, out=out, log_format=log_format)


@wan_app.command("secret")
def wan_secret(file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.", show_default=False)]) -> None:
    """Make the secret of a run: who has it is invited."""
    from gossamer.app.wan import authority

    authority.secret(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. GOSSAMER_DEBUG=1 shows the tracebacks of errors that are otherwise one message.

    Args:
        arguments: what follows the command's name; from the process when left out.
    """
    try:
        app(args=arguments, prog_name="gossamer")
    except SystemExit as done:
        if _interrupted(done):  # typer says nothing of it
            _say("interrupted")
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except (BadInput, RunFailed, OSError) as error:
        if os.environ.get("GOSSAMER_DEBUG") == "1":
            raise
        _say(_os_words(error) if isinstance(error, OSError) else str(error))
        return 2 if isinstance(error, BadInput) else 1
    except (Stopped, KeyboardInterrupt) as stopped:
        _say(str(stopped) or "interrupted")
        return 130
    return 0


def _interrupted(error: BaseException | None) -> bool:
    """Whether it comes of a Ctrl-C."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _os_words(error: OSError) -> str:
    """`file: what the system said`."""
    said = error.strerror or str(error) or type(error).__name__
    return f"{os.fsdecode(error.filename)}: {said}" if isinstance(error.filename, str | bytes) else said


def _say(text: str) -> None:
    """To stderr, whatever is in it: a file name need not be text."""
    from gossamer.app.wan.logs import ends_with, note

    if not ends_with(text):
        note("gossamer: " + text.encode("utf-8", errors="backslashreplace").decode("utf-8"))
