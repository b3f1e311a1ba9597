"""The floors: who may import whom, what pure code may touch, and how long a file may be. Read from the source, nothing is run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400

FLOORS: dict[str, set[str]] = {
    "core": {"core"},
    "worker": {"core", "worker"},
    "recipes": {"core", "worker", "recipes"},
    "sim": {"core", "worker", "sim"},
    "real": {"core", "worker", "real"},
    "net": {"core", "worker", "real", "net"},
    "wan": {"core", "worker", "real", "wan"},
    "train": {"core", "worker", "train"},
    "app": {"core", "worker", "recipes", "sim", "real", "net", "wan", "train", "app", "report", ""},
    "report": {"report"},
    "library": {"core", "worker", "recipes", "real", "net", "train", "app", "library"},
    "integrations": {"core", "library", "integrations"},
    "bench": {"core", "app", "bench"},
    "cli": {"cli_model", "cli_report", "cli_wan", "app", "report", "bench", ""},
    "cli_model": {"app", ""},
    "cli_report": {"app", ""},
    "cli_wan": {"app", ""},
    "__main__": {"cli"},
    "": {"core", "worker", "recipes", "sim", "real", "net", "wan", "train", "app", "library"},
}
"""Part -> parts that it may import; "" is the package itself (its version and its error types)."""

EXTRA = {"report": {"gossamer.core.errors"}}
"""Single modules beyond the floors."""

HOOKED = ("integrations",)
"""Their `on_...` are called by other libraries, with whatever names these have."""
PURE = ("core", "worker")
WITHOUT_C10D = ("real", "wan")
"""Real worlds beside torch.distributed, which stays behind a wire."""
DOCUMENTED = ("core", "worker", "recipes")
FORBIDDEN_MODULES = ("logging", "time", "random", "socket", "torch.distributed")
FORBIDDEN_CALLS = ("open", "print")
SEEDED = {"Philox", "PCG64", "Generator", "SeedSequence", "BitGenerator"}
"""Of numpy.random: what keeps its state in an object of its own."""
TORCH_RANDOM = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"}


def part_of(module: str) -> str:
    """gossamer.core.tree -> core; gossamer -> the empty string."""
    return [*module.split("."), ""][1]


def module_of(path: Path) -> str:
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str, list[str]]]:
    """Line, module, and names imported from it. Imports inside functions and under TYPE_CHECKING count as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                up = here[: len(here) - node.level + is_package]
                base = ".".join([*up, base] if base else up)
            yield node.lineno, base, [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and dotted(node.func) in ("importlib.import_module", "import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value, []


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain, or nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def import_faults(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    mine = part_of(module)
    for line, target, names in imports(tree, module, is_package):
        if target.split(".")[0] != "gossamer":
            continue
        # `from gossamer import core` imports a part; `from gossamer import __version__` imports a name of the package.
        targets = [f"gossamer.{name}" for name in names] if target == "gossamer" and names else [target]
        for one in targets:
            part = part_of(one)
            if target == "gossamer" and part not in FLOORS:
                part = ""
            if part not in FLOORS.get(mine, set()) and one not in EXTRA.get(mine, set()):
                yield f"{module}:{line}: {mine or 'gossamer'} may not import {one}"


def purity_faults(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    if part_of(module) in WITHOUT_C10D:
        for line, target, names in imports(tree, module, is_package):
            if any(one.startswith("torch.distributed") for one in [target, *(f"{target}.{name}" for name in names)]):
                yield f"{module}:{line}: {part_of(module)} may not import torch.distributed: that is what net is for"
    if part_of(module) not in PURE:
        return
    for line, target, names in imports(tree, module, is_package):
        for one in [target, *(f"{target}.{name}" for name in names)]:
            if any(one == bad or one.startswith(bad + ".") for bad in FORBIDDEN_MODULES):
                yield f"{module}:{line}: pure code may not import {one}"
        if target == "numpy.random" and set(names) - SEEDED:
            yield f"{module}:{line}: pure code may not use numpy's global random state"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name.startswith(("np.random.", "numpy.random.")) and name.split(".")[2] not in SEEDED:
                yield f"{module}:{node.lineno}: pure code may not use numpy's global random state ({name})"
            if name.startswith("torch.distributed"):
                yield f"{module}:{node.lineno}: pure code may not use {name}"
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in FORBIDDEN_CALLS:
                yield f"{module}:{node.lineno}: pure code may not call {name}()"
            keywords = {k.arg for k in node.keywords}
            if name in ("torch.manual_seed", "torch.seed") or (
                name.startswith("torch.") and name.split(".")[-1] in TORCH_RANDOM and "generator" not in keywords
            ):
                yield f"{module}:{node.lineno}: pure code may not use torch's global random state ({name})"


def docstring_faults(tree: ast.Module, module: str) -> Iterator[str]:
    """Modules, public classes and functions, and the methods of protocols (an implementation inherits the words of its protocol)."""
    if part_of(module) not in DOCUMENTED:
        return
    if not ast.get_docstring(tree):
        yield f"{module}: no module docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield f"{module}:{node.lineno}: {node.name} has no docstring"
            if isinstance(node, ast.ClassDef) and any(dotted(base).endswith("Protocol") for base in node.bases):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and not ast.get_docstring(method):
                        yield f"{module}:{method.lineno}: {node.name}.{method.name} has no docstring"


def signature_faults(tree: ast.AST, module: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg is not None:
            private = node.name.startswith("_") and not node.name.startswith("__")
            hook = part_of(module) in HOOKED and node.name.startswith("on_")
            if not private and not hook:
                yield f"{module}:{node.lineno}: {node.name} takes **{node.args.kwarg.arg}: a wrong name would pass in silence"


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """Everything wrong with one module."""
    tree = ast.parse(source)
    return [
        *import_faults(tree, module, is_package),
        *purity_faults(tree, module, is_package),
        *docstring_faults(tree, module),
        *signature_faults(tree, module),
    ]


def sources(*folders: str) -> list[Path]:
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


def test_every_module_keeps_to_its_floor() -> None:
    paths = sources("gossamer")
    assert len(paths) > 10
    found = [f for p in paths for f in faults(p.read_text(encoding="utf-8"), module_of(p), p.name == "__init__.py")]
    assert not found, "\n" + "\n".join(found)


def test_every_part_is_on_a_floor() -> None:
    parts = {part_of(module_of(p)) for p in sources("gossamer")}
    assert parts <= set(FLOORS), f"new parts {parts - set(FLOORS)}: give each a floor"


def test_every_package_has_an_init() -> None:
    missing = {p.parent for p in sources("gossamer") if not (p.parent / "__init__.py").exists()}
    assert not missing, "without __init__.py a folder is not installed"


def test_files_are_short() -> None:
    long = {
        str(p.relative_to(ROOT)): n for p in sources("gossamer", "tests", "bench") if (n := len(p.read_text().splitlines())) > MAX_LINES
    }
    assert not long, f"files above {MAX_LINES} lines, split them: {long}"


@pytest.mark.parametrize(
    "module, source, fault",
    [
        ("gossamer.core.a", "from gossamer.worker.effects import Go", "core may not import gossamer.worker.effects"),
        ("gossamer.core.a", "from gossamer import worker", "core may not import gossamer.worker"),
        ("gossamer.core.a", "from ..sim import clock", "core may not import gossamer.sim"),
        ("gossamer.core.a", "def f():\n    import gossamer.app.config", "core may not import gossamer.app.config"),
        ("gossamer.core.a", "import importlib\nimportlib.import_module('gossamer.net')", "core may not import gossamer.net"),
        ("gossamer.sim.a", "from gossamer.train.model import x", "sim may not import gossamer.train.model"),
        ("gossamer.net.a", "import gossamer.sim", "net may not import gossamer.sim"),
        ("gossamer.real.a", "from gossamer.net import init", "real may not import gossamer.net"),
        ("gossamer.wan.a", "from gossamer.net.start import init", "wan may not import gossamer.net.start"),
        ("gossamer.real.a", "import torch.distributed as dist", "real may not import torch.distributed"),
        ("gossamer.wan.a", "from torch import distributed", "wan may not import torch.distributed"),
        ("gossamer.worker.a", "from gossamer.recipes import diloco", "worker may not import gossamer.recipes"),
        ("gossamer.report.a", "from gossamer.core.tree import Tree", "report may not import gossamer.core.tree"),
        ("gossamer.cli", "from gossamer.sim import driver", "cli may not import gossamer.sim"),
        ("gossamer.app.a", "from gossamer.cli import main", "app may not import gossamer.cli"),
        ("gossamer", "from gossamer.cli import main", "gossamer may not import gossamer.cli"),
        ("gossamer.core.a", "import time", "may not import time"),
        ("gossamer.core.a", "from time import monotonic", "may not import time"),
        ("gossamer.worker.a", "import torch.distributed as dist", "may not import torch.distributed"),
        ("gossamer.worker.a", "from torch import distributed", "may not import torch.distributed"),
        ("gossamer.worker.a", "import torch\ntorch.distributed.barrier()", "may not use torch.distributed"),
        ("gossamer.core.a", "import logging.handlers", "may not import logging.handlers"),
        ("gossamer.core.a", "import numpy as np\nnp.random.rand(3)", "numpy's global random state"),
        ("gossamer.core.a", "from numpy.random import rand", "numpy's global random state"),
        ("gossamer.core.a", "import torch\ntorch.randn(3)", "torch's global random state"),
        ("gossamer.core.a", "def f(p):\n    return open(p)", "may not call open()"),
        ("gossamer.worker.a", "print(1)", "may not call print()"),
        ("gossamer.core.a", '"""Doc."""\ndef f(): ...', "f has no docstring"),
        ("gossamer.core.a", '"""Doc."""\nclass C(Protocol):\n    """Doc."""\n    def f(self): ...', "C.f has no docstring"),
        ("gossamer.recipes", "x = 1", "no module docstring"),
        ("gossamer.app.a", "class C:\n    def __init__(self, **options): ...", "__init__ takes **options"),
    ],
)  # fmt: skip
def test_the_check_can_fail(module: str, source: str, fault: str) -> None:
    found = faults(source, module)
    assert any(fault in f for f in found), found


@pytest.mark.parametrize(
    "module, source",
    [
        ("gossamer.worker.a", '"""Doc."""\nfrom gossamer.core.tree import Tree\nfrom . import effects'),
        ("gossamer.core.a", '"""Doc."""\nimport numpy as np\nnp.random.Philox(key=1)\nimport torch\ntorch.randn(3, generator=g)'),
        ("gossamer.app.a", "import time, random\nfrom gossamer import __version__\nfrom gossamer.sim import x\nprint(open('f'))"),
        ("gossamer.wan.a", "import torch, time\nfrom gossamer.real import Group, run"),
        ("gossamer.report.a", "from gossamer.core.errors import BadInput\nfrom . import table"),
        ("gossamer.cli", "from gossamer import BadInput\nfrom gossamer.app import commands"),
        ("gossamer.core.a", '"""Doc."""\ndef _f(**options): ...'),
    ],
)
def test_the_check_lets_good_code_pass(module: str, source: str) -> None:
    assert faults(source, module) == []


def test_the_command_starts_without_heavy_imports() -> None:
    code = "import sys, gossamer.cli; print(sorted({'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
