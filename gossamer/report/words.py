"""Numbers and findings in plain words; shared by tables, figures and the page."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, TypeAlias

from gossamer.report import away, stopped
from gossamer.report.read import Run
from gossamer.report.records import KINDS

DASH = "—"
FEW_ROUNDS = 40
"""Below this many rounds a run shows the machinery and does not rank methods."""
NAMES = {
    "ddp": "DDP",
    "local_sgd": "Local SGD",
    "fedavg": "FedAvg",
    "diloco": "DiLoCo",
    "gasloc": "GASLoC",
    "dadam": "DAdam",
    "local_dadam": "Local-DAdam",
    "geomesh": "GeoMesh",
    "halos": "HALoS",
    "noloco": "NoLoCo",
    "sparse_loco": "SparseLoCo",
    "streaming_diloco": "Streaming DiLoCo",
    "muloco": "MuLoCo",
}
_GPU = re.compile(r"[A-Z]{1,4} ?[0-9]")
"""How names of GPUs begin; what else workers are called is a site's name."""
Recipe: TypeAlias = tuple[tuple[str, str], ...]
"""A configuration without seed, label and folder, as sorted (key, value)."""
KIND_NAMES = {kind: kind.replace("_", " ") for kind in KINDS} | {"outer": "outer step"}


def tidy(text: object, limit: int = 60) -> str:
    """One printable line of at most `limit` characters.

    >>> tidy("a\\n  b", 10), tidy("x" * 12, 5)
    ('a b', 'xxxx…')
    """
    line = "".join(c for c in " ".join(str(text).split()) if c.isprintable())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def clock(seconds: float | None) -> str:
    """Seconds as h:mm:ss, with tenths below a minute.

    >>> clock(3725.4), clock(4.24), clock(59.96), clock(None)
    ('1:02:05', '0:00:04.2', '0:01:00', '—')
    """
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 59.95:
        return f"0:00:{seconds:04.1f}"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def duration(seconds: float | None) -> str:
    """Seconds for prose.

    >>> duration(3725.4), duration(751), duration(4.21), duration(None)
    ('1 h 02 min', '12 min 31 s', '4.2 s', '—')
    """
    if seconds is None or not math.isfinite(seconds):
        return DASH
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole // 60 % 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{seconds:.2g} s"


def fixed(value: float | None, digits: int) -> str:
    """A number with `digits` decimals and thin grouping; a dash when there is none. Huge values in powers of ten.

    >>> fixed(23.456, 2), fixed(None, 2), fixed(1234567.0, 0), fixed(3e12, 2)
    ('23.46', '—', '1,234,567', '3.00e+12')
    """
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:.2e}" if digits and abs(value) >= 1e6 else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage without the sign.

    >>> percent(0.8812), percent(None)
    ('88.1', '—')
    """
    return DASH if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}"


def megabytes(n_bytes: float) -> str:
    """Bytes as MB (1e6 bytes), with more digits when few."""
    mb = n_bytes / 1e6
    return fixed(mb, 0 if mb >= 1000 or not mb else 1 if mb >= 10 else 3)


def short(count: float) -> str:
    """A count for prose: 26.2 M.

    >>> short(26_214_400), short(950), short(20_000)
    ('26.2 M', '950', '20 k')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def listed(names: Sequence[str]) -> str:
    """Names in a row: up to four, then how many more.

    >>> listed(["a", "b", "c"]), listed(list("abcdef"))
    ('a, b and c', 'a, b, c and 3 more')
    """
    shown = list(names) if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def method_name(method: object) -> str:
    """The name a person would write.

    >>> method_name("geomesh"), method_name("Sparse-Loco"), method_name("mine.py:plan")
    ('GeoMesh', 'SparseLoCo', 'mine.py:plan')
    """
    return NAMES.get(str(method).lower().replace("-", "_").replace(" ", "_"), tidy(method, 40))


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested configuration as dotted keys and printed values.

    >>> flat({"a": {"b": 1}, "c": [{"d": "x"}], "e": [1, 2]})
    {'a.b': '1', 'c[0].d': 'x', 'e': '[1, 2]'}
    """
    out: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            out |= flat(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            for i, item in enumerate(value):
                out |= flat(item, f"{name}[{i}].")
        elif isinstance(value, str):
            out[name] = value
        else:
            out[name] = json.dumps(value, default=str, ensure_ascii=False)
    return out


def fleet_name(run: Run) -> str | None:
    """The fleet's name when summary or configuration give one; a file's name without folder and ending."""
    if isinstance(known := run.summary.get("fleet"), str) and known:
        return tidy(known, 30)
    fleet = run.config.get("fleet")
    name = fleet.get("name") if isinstance(fleet, Mapping) else fleet
    if not isinstance(name, str) or not name:
        return None
    return tidy(f"uniform-{run.workers}" if name == "uniform" else PurePath(name).stem if name.endswith(".toml") else name, 30)


def worker_names(run: Run) -> tuple[str, ...]:
    """Each worker's name: `worker_names` of the summary (its GPU, or its site), otherwise "worker 0" and so on.

    Names used twice get the worker's number.
    """
    given = run.summary.get("worker_names")
    if not isinstance(given, list) or len(given) != run.workers:
        return tuple(f"worker {i}" for i in range(run.workers))
    names = [tidy(name, 18) or f"worker {i}" for i, name in enumerate(given)]
    many = Counter(names)
    return tuple(f"{name} #{i}" if many[name] > 1 else name for i, name in enumerate(names))


def worker_name(names: Sequence[str], worker: int) -> str:
    """The name of a worker, also of one that the run was not begun with.

    >>> worker_name(["H100"], 0), worker_name(["H100"], 3)
    ('H100', 'worker 3')
    """
    return names[worker] if worker < len(names) else f"worker {worker}"


def who(name: str) -> str:
    """A worker as prose names it.

    >>> who("worker 3"), who("H100"), who("A100 #1"), who("RTX 6000"), who("fast-6"), who("site lyon")
    ('worker 3', 'the H100', 'the A100 #1', 'the RTX 6000', 'worker fast-6', 'site lyon')
    """
    return name if name.startswith(("worker", "site ")) else f"the {name}" if _GPU.match(name) else f"worker {name}"


def with_method(label: str, run: Run) -> str:
    """`label`, with the method where the run has a name of its own that does not say it."""
    method = method_name(run.summary["method"])
    own = _letters(str(run.config.get("name") or ""))
    return label if not own or _letters(method) in own else f"{label} ({method})"


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def plain_label(run: Run) -> str:
    """The `name` of the configuration, or else the method's."""
    return tidy(run.config.get("name") or "", 40) or method_name(run.summary["method"])


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name per run, unlike each other: its label or method; where these repeat, with the seed if that is all that differs,
    otherwise with the folder's name."""
    names = [plain_label(run) for run in runs]
    out = []
    for name, run in zip(names, runs, strict=True):
        same = [r for n, r in zip(names, runs, strict=True) if n == name]
        if len(same) == 1:
            out.append(name)
        elif len({recipe(r) for r in same}) == 1 and len({str(r.summary.get("seed")) for r in same}) == len(same):
            out.append(f"{name}, seed {tidy(run.summary.get('seed'), 12)}")
        else:
            out.append(f"{name} ({tidy(run.folder.resolve().name, 24)})")
    again = Counter(out)
    return [f"{n} #{i + 1}" if again[n] > 1 else n for i, n in enumerate(out)]


def recipe(run: Run) -> Recipe:
    """The configuration without seed, label and folder: runs with the same recipe differ by their seed only."""
    return tuple(sorted((k, v) for k, v in flat(run.config).items() if k not in ("seed", "name", "run.out")))


def charged(runs: Sequence[Run]) -> str:
    """What a title must say when a bigger model's clock goes with a smaller model's loss; empty when none does."""
    names = {run.charged_as for run in runs if run.charged_as is not None}
    if not names:
        return ""
    text = charged_as(names)
    own = [label for label, run in zip(labels(runs), runs, strict=True) if run.charged_as is None]
    return text + (f" (not for {', '.join(own)})" if own else "")


def charged_as(names: Collection[str]) -> str:
    """What a title says of the models, one or more, whose clock and bytes were charged in place of the trained one's."""
    return f"clock and bytes charged as {' / '.join(tidy(n, 40) for n in sorted(names))}, loss from the small model that was trained"


MANY_ZEROS = 0.001
"""Share of exact zeros that a codec made into steps, above which it is said."""


def goes_on(runs: Sequence[Run]) -> str:
    """What a page must say of runs that have not finished; empty when all have."""
    said = []
    for label, run in zip(labels(runs), runs, strict=True):
        if not run.finished:
            of = f" of {run.planned.rounds:,}" if run.planned else ""
            done = int(run.summary["rounds"])
            what = f"round {done:,}{of} is what all workers have completed"
            if run.stopped:
                what = f"it was {stopped.said(run.stopped, run.folder, done)}"
            said.append(f"{label} has not finished: {what}")
    return f"{'; '.join(said)}. All numbers are of what has been so far." if said else ""


def _called(run: Run, worker: int) -> str:
    """A worker where it is told what became of it: by its number, or by the site that it was."""
    name = worker_name(worker_names(run), worker)
    return name if run.summary["world"] == "wan" and name.startswith("site ") else f"worker {worker}"


def alarms(runs: Sequence[Run]) -> list[str]:
    """A sentence for each run in which something calls for a look, whatever the loss says: refused contributions, or coordinates that did
    not move and were made to by a codec that has no zero."""
    said = []
    for label, run in zip(labels(runs), runs, strict=True):
        count = int(run.number("refused") or 0)
        if count:
            said.append(
                f"{label}: {count} of {len(run.rounds)} contributions were refused, being not finite or far too large; "
                "metrics.jsonl names workers and rounds. A lower learning rate is the usual remedy."
            )
        called = partial(_called, run)
        if gone := away.stayed_away(run, called):
            kept = "; records of those who are not there at the end are not in this folder" if run.summary.get("without_records") else ""
            said.append(f"{label}: {', '.join(gone)}, and the others went on: the final model is their mean{kept}.")
        if back := away.came_back(run, called):
            of = "" if run.summary["world"] == "wan" else ", with the state of another"
            said.append(f"{label}: {', '.join(back)}{of}.")
        if skipped := int(run.number("absent") or 0):
            said.append(f"{label}: {skipped} times a worker skipped an exchange, its peer being dead or late (absent in metrics.jsonl).")
        zeros = run.number("exact_zeros") or 0.0
        if zeros > MANY_ZEROS:
            said.append(
                f"{label}: up to {percent(zeros)} % of a worker's drift was exactly zero and travelled as a step (a sign has no zero). "
                "method.magnitude = row or block leaves rows and blocks that nothing touched where they are."
            )
    return said


def caution(runs: Sequence[Run]) -> str:
    """The honest note when a run is short, a recipe ran with one seed only or the runs saw unlike numbers of tokens; otherwise empty."""
    why = []
    fewest = min(int(run.summary["rounds"]) for run in runs)
    if fewest < FEW_ROUNDS:
        why.append(f"short ({'the shortest has ' * (len(runs) > 1)}{fewest} round{'s' * (fewest != 1)})")
    seeds: dict[Recipe, set[str]] = {}
    for run in runs:
        seeds.setdefault(recipe(run), set()).add(str(run.summary.get("seed")))
    if min(len(s) for s in seeds.values()) < 2:
        why.append("of a single seed")
    said = []
    if why and len(runs) == 1:
        said.append(f"This run is {' and '.join(why)}. It shows that the machinery works; it does not rank methods.")
    elif why:
        said.append(f"These runs are {' and '.join(why)}. They show that the machinery works; they do not rank methods.")
    tokens = [float(run.summary["tokens"]) for run in runs]
    if max(tokens) > 1.02 * min(tokens):
        said.append(
            f"They trained on unlike numbers of tokens, {short(min(tokens))} to {short(max(tokens))}, which alone moves the final loss."
        )
    return " ".join(said)


def _perplexity(value: float) -> str:
    return fixed(value, 1 if value >= 10 else 2)


def sentence(run: Run) -> str:
    """What came of a run, in one sentence computed from its numbers."""
    fleet = fleet_name(run)
    rounds, perplexity = int(run.summary["rounds"]), run.number("final_perplexity")
    length = f"{rounds:,} round{'s' * (rounds != 1)} and {duration(run.number('wall_s'))}"
    parts = [length if perplexity is None else f"perplexity {_perplexity(perplexity)} after {length}"]
    target, reached = run.number("target_perplexity"), run.number("time_to_target_s")
    if target:
        parts.append(f"the target of {target:g} was {'reached after ' + duration(reached) if reached is not None else 'not reached'}")
    used = run.share("utilisation")
    if used:
        parts.append(f"workers computed {percent(used.mean, 0)} % of the time")
    names = worker_names(run)
    for key, why in (("straggler_idle", "slower workers"), ("network_idle", "the network")):
        share = run.share(key)
        if not share:
            continue
        longest = max(share.workers, default=0.0)
        if len(share.workers) > 1 and longest >= 0.0005:
            most = share.workers.index(longest)
            parts.append(f"{who(worker_name(names, most))} waited most for {why}, {percent(longest)} %")
        elif share.mean >= 0.0005:
            parts.append(f"{percent(share.mean)} % went to waiting for {why}")
    where = f" on {fleet}" if fleet else f" on {run.workers} worker{'s' * (run.workers != 1)}"
    return f"{with_method(plain_label(run), run)}{where}: {'; '.join(parts)}."


def comparison_sentence(runs: Sequence[Run]) -> str:
    """What a comparison shows, in plain words computed from the numbers. Times and bytes are compared among the runs on one clock: where
    some are charged as a bigger model, those."""
    named = list(zip(labels(runs), runs, strict=True))
    clocked = [(n, r) for n, r in named if r.charged_as is not None] or named
    parts = []
    scored = sorted((p, n) for n, r in named if (p := r.number("final_perplexity")) is not None)
    if scored:
        (low, best), (high, worst) = scored[0], scored[-1]
        parts.append(f"the lowest final perplexity is {_perplexity(low)} ({best}), the highest {_perplexity(high)} ({worst})")
    targets = {r.number("target_perplexity") for _, r in named}
    quick = sorted((t, n) for n, r in clocked if (t := r.number("time_to_target_s")) is not None)
    if quick and len(targets) == 1 and (target := targets.pop()) is not None:
        text = f"{quick[0][1]} came first to perplexity {target:g}, after {duration(quick[0][0])}"
        if len(quick) > 1 and quick[0][0] > 0:
            ratio = quick[1][0] / quick[0][0]
            text += f" ({quick[1][1]}: {f'{ratio:.2g} times that' if ratio >= 1.05 else 'within 5 % of that'})"
        parts.append(text)
    sent = sorted((sum(r.bytes_sent) / max(1, len(r.bytes_sent)), n) for n, r in clocked)
    parts.append(f"{sent[0][1]} sent least, {megabytes(sent[0][0])} MB per worker; {sent[-1][1]} most, {megabytes(sent[-1][0])} MB")
    return f"{len(runs)} runs: {'; '.join(parts)}."
