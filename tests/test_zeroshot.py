"""Zero-shot evaluation: items that are what they say, prompts that are lm-eval's own, accuracies that can be checked by hand, and a suite
that tells a trained model from an untrained one."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from rich.console import Console
from small_runs import WORDS
from zeroshot_toys import RECORDS, chains, short_training, write_items

from gossamer.app.config import load as read_config
from gossamer.app.export import export
from gossamer.app.job import resolve
from gossamer.app.simulate import simulate
from gossamer.app.zeroshot import embedded, evaluation, harness, sources, subject
from gossamer.app.zeroshot.items import Item, digest
from gossamer.app.zeroshot.tasks import EMBEDDED, PUBLIC, TASKS
from gossamer.cli import main
from gossamer.core.errors import BadInput, RunFailed

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [path.read_text() for path in sorted(chains(tmp_path_factory.mktemp("chains")).iterdir())][:4]


@pytest.fixture(scope="module")
def run(cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for seconds."""
    folder = tmp_path_factory.mktemp("trained")
    return simulate(resolve(read_config([], short_training(chains(folder / "text")))), folder / "run", quiet=True).path


@pytest.fixture(scope="module")
def record(run: Path) -> dict:
    """What `gossamer eval` has written of it."""
    assert main(["eval", str(run), "--limit", "60"]) == 0
    return json.loads((run / "eval.json").read_text())


@pytest.mark.parametrize("name", embedded.NAMES)
def test_the_embedded_suite_is_a_function_of_text_and_seed(name: str, documents: list[str]) -> None:
    items = embedded.make(name, documents, seed=3, count=60)
    assert items == embedded.make(name, documents, seed=3, count=80)[:60] != embedded.make(name, documents, seed=4, count=60)
    whole = [" ".join(text.split()) for text in documents]
    for item in items:
        assert any(item.contexts[0] + item.choices[item.gold] in text for text in whole)  # the right answer stands there
        assert len(set(item.choices)) == item.ways and item.chance == {"word_order": 0.5, "cloze": 0.25}[name]
        if name == "word_order":
            right, wrong = (choice.split() for choice in (item.choices[item.gold], item.choices[1 - item.gold]))
            assert sorted(right) == sorted(wrong) and sum(a != b for a, b in zip(right, wrong, strict=True)) == 2
        else:
            assert all(any(choice.strip() in text for text in whole) for choice in item.choices)
    golds = [item.gold for item in items]
    assert all(golds.count(k) > 0 for k in range(items[0].ways))
    assert len({item.contexts[0] for item in items}) == len(items)  # blocks do not overlap


def test_too_little_text_is_said() -> None:
    with pytest.raises(BadInput, match=r"has 2 stretches of 24 words.*needs 20"):
        embedded.make("cloze", ["a b c " * 20], 0)


@pytest.mark.parametrize("name", PUBLIC)
def test_records_of_the_hub_and_plain_ones_are_the_same_item(name: str, tmp_path: Path) -> None:
    native, plain = (PUBLIC[name].records.item(r) for r in RECORDS[name])
    assert native == plain if name != "hellaswag" else native.choices[1:] == plain.choices[1:]
    folder = write_items(tmp_path, [name], plain=False)
    assert sources.read_file(PUBLIC[name], folder / f"{name}.jsonl", limit=3) == [native] * 3


def test_prompts_are_those_of_lm_eval() -> None:
    """The requests of its own task files, of the same records."""
    import lm_eval.tasks
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    files = {
        "arc_easy": "arc/arc_easy", "hellaswag": "hellaswag/hellaswag", "mmlu": "mmlu/default/mmlu_abstract_algebra", "piqa": "piqa/piqa",
        "winogrande": "winogrande/default", "openbookqa": "openbookqa/openbookqa", "lambada_openai": "lambada/lambada_openai",
    }  # fmt: skip
    for name, file in files.items():
        native = RECORDS[name][0]
        config = load_yaml(Path(lm_eval.tasks.__file__).parent / f"{file}.yaml")
        splits = [config[k] for k in ("training_split", "validation_split", "test_split", "fewshot_split") if config.get(k)]
        data = dict.fromkeys(splits, Dataset.from_list([native]))
        config |= {"custom_dataset": lambda data=data, **_: data, "num_fewshot": 0}
        for key in ("tag", "group", "include", "dataset_kwargs"):
            config.pop(key, None)
        with harness._quiet():
            theirs = ConfigurableTask(config=config)
            ours = harness.as_lm_eval(TASKS[name], [PUBLIC[name].records.item(native)])
            asked = []
            for task in (theirs, ours):
                task.build_all_requests()
                asked.append([request.args for request in task.instances])
        assert asked[0] == asked[1], name


def test_a_short_training_is_seen(run: Path, record: dict) -> None:
    """Above chance by more than two standard errors, which the same model before its training is not."""
    order = record["tasks"]["word_order"]
    assert order["verdict"] == "above chance" and order["accuracy"] > 0.5 + 4 * order["standard_error"]
    assert set(record["tasks"]) == set(EMBEDDED) and order["items"] == 60 == len(order["correct"])
    assert order["accuracy"] == order["correct"].count("1") / 60
    before = subject.load(run)
    before = subject.Subject(
        run, resolve(read_config([run / "config.toml"])).model().eval(), before.tokenizer, 48, before.run, before.about
    )
    untrained = evaluation.evaluate(before, evaluation.Request(tasks=("word_order",), limit=60))["tasks"]["word_order"]
    assert untrained["items_sha256"] == order["items_sha256"] and untrained["verdict"] == "at chance"
    assert order["accuracy"] - untrained["accuracy"] > 0.2


def test_answers_are_those_of_the_logits(run: Path, record: dict) -> None:
    """Computed by hand: the choice with the highest sum of log-probabilities; cloze: per character."""
    about = subject.load(run)
    model, tokenizer = about.model, about.tokenizer
    for name in EMBEDDED:
        items = embedded.make(name, list(subject.held_out(about, None)), 0, 60)
        assert digest(items) == record["tasks"][name]["items_sha256"]
        said = ""
        for item in items[:6]:
            scores = []
            for choice in item.choices:
                context, whole = (tokenizer(text).input_ids for text in (item.contexts[0], item.contexts[0] + choice))
                asked, n = torch.tensor([whole[-49:]]), len(whole) - len(context)
                with torch.no_grad():
                    logits = model(input_ids=asked[:, :-1]).logits.log_softmax(-1)[0, -n:]
                total = float(logits.gather(1, asked[0, -n:, None]).sum())
                scores.append(total / len(choice) if name == "cloze" else total)
            said += "01"[scores.index(max(scores)) == item.gold]
        assert record["tasks"][name]["correct"][:6] == said


def test_an_export_answers_as_its_run_does(run: Path, record: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = export(run, tmp_path / "model"), tmp_path / "found.json"
    text = read_config([run / "config.toml"]).data.source
    data = write_items(tmp_path / "data", ["arc_easy", "winogrande", "lambada_openai"])
    (data / "arc_easy.jsonl").rename(data / "ARC-Easy.jsonl")
    again = ["eval", str(model), "--limit", "60", "--length", "48", "--text", text, "--data", str(data), "--out", str(out)]
    assert main(again) == 0
    found = json.loads(out.read_text())
    assert list(found["tasks"]) == [*EMBEDDED, "arc_easy", "winogrande", "lambada_openai"]
    for name in EMBEDDED:
        assert found["tasks"][name]["correct"] == record["tasks"][name]["correct"]
    assert [found["tasks"][name]["chance"] for name in ("arc_easy", "winogrande", "lambada_openai")] == [1 / 3, 0.5, 0.0]
    said = capsys.readouterr().out
    assert "word order" in said and not (model / "eval.json").exists()
    assert f"Whether the model has been trained on the text of {text} is not known" in said, "nobody says that it is held out"
    assert {found["tasks"][name]["source"] for name in EMBEDDED} == {f"text of {text}, seed 0"}
    assert {record["tasks"][name]["source"] for name in EMBEDDED} == {"the run's held-out text, seed 0"}
    assert main(["eval", str(model), "--tasks", "embedded"]) == 2  # it does not say what it was trained on
    assert "--text" in capsys.readouterr().err
    assert main(["eval", str(model), "--text", "no/such/text"]) == 2
    assert "'no/such/text' does not exist; expected 'stdlib', a folder or a file: correct --text" in capsys.readouterr().err


def test_the_record_keeps_what_is_known_of_the_same_model(run: Path, record: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(record))
    about = subject.load(run)
    monkeypatch.setattr(harness, "score", lambda *_, **__: pytest.fail("asked again"))
    known = evaluation.evaluate(about, evaluation.Request(tasks=("cloze",), limit=60), known=file)
    assert known["tasks"] == {"cloze": record["tasks"]["cloze"]}
    evaluation.kept(file, known)
    assert set(json.loads(file.read_text())["tasks"]) == set(EMBEDDED)
    evaluation.kept(file, known | {"model_sha256": "another"})
    assert set(json.loads(file.read_text())["tasks"]) == {"cloze"}


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["eval", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_evaluated_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_items(tmp_path / "data", ["arc_easy", "piqa"])
    assert "no task 'hellaswog'; did you mean hellaswag?" in told(capsys, run, "--tasks", "hellaswog")
    assert "has no mmlu.jsonl; it has items of arc_easy, piqa" in told(capsys, run, "--tasks", "mmlu", "--data", data)
    assert "is no folder" in told(capsys, run, "--data", tmp_path / "nothing")
    assert "has none of arc_easy.jsonl" in told(capsys, run, "--data", run)
    assert "has neither config.toml nor config.json" in told(capsys, data)
    assert "is for run folders" in told(capsys, data, "--round", 2)
    assert "there is no folder" in told(capsys, run, "--out", tmp_path / "a" / "b.json")
    hub = told(capsys, run, "--tasks", "piqa")
    assert "cannot be reached" in hub and "--data DIR with a file piqa.jsonl" in hub
    (data / "piqa.jsonl").write_text('{"goal": "x", "sol1": "a", "label": 0}\n')
    assert "piqa.jsonl, line 1, is no record of this task: it has no 'sol2'" in told(capsys, run, "--tasks", "piqa", "--data", data)
    (data / "piqa.jsonl").write_text('{"query": "x", "choices": ["a", "b"], "gold": 2}\n')
    assert "the right answer is number 2" in told(capsys, run, "--tasks", "piqa", "--data", data)
    (data / "piqa.jsonl").write_text("{\n")
    assert "line 1, is no JSON" in told(capsys, run, "--tasks", "piqa", "--data", data)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'gossamer[eval]'" in told(capsys, run)


def test_text_that_has_changed_is_not_held_out_any_more(run: Path, record: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = subject.load(run)
    monkeypatch.setattr(type(about.run), "facts", lambda self: {"corpus_sha256": "another"})
    with pytest.raises(BadInput, match="have changed since it ran"):
        subject.held_out(about, None)


def test_what_goes_on_is_told(run: Path) -> None:
    told: list[str] = []
    evaluation.evaluate(subject.load(run), evaluation.Request(("word_order",), limit=20), now=told.append)
    assert told[:2] == ["the items are made", "the model is asked: 40 texts"]
    assert told[-1] == "the model is asked: 40 of 40 texts" and len(told) > 3


def test_text_is_what_training_reads(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And of it what a run on it would hold out, whichever loader that has."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [" ".join(f"{word}{k}" for word in WORDS * 6) for k in range(60)]
    file = tmp_path / "rows" / "some.parquet"
    file.parent.mkdir()
    pq.write_table(pa.table({"content": texts, "n": list(range(60))}), file)
    lines, plain = tmp_path / "lines.jsonl", tmp_path / "plain.jsonl"
    lines.write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    plain.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    about = subject.load(run)
    for source, column in ((file, "content"), (file.parent, "content"), (lines, "content"), (plain, None)):
        named = [f'data.source="{source}"', 'data.tokenizer="bytes"', *([f"data.text={column}"] if column else [])]
        job = resolve(read_config([], [*named, "plan.sequence=16"]))
        held = bytes(t for t in job.corpus().valid if t < 256).decode()
        found = list(subject.held_out(about, str(source), column))
        assert "".join(found) == held and 0 < len(found) < 60
    ask = evaluation.Request(("cloze",), text=str(file), column="content", limit=4)
    ((items, source),) = evaluation.items_of(ask, ["cloze"], about).values()
    assert len(items) == 4 and source == f"text of {file}, seed 0"

    said = told(capsys, run, "--text", file)
    options = "--text is read as data.source is, and --column is its data.text: "
    assert options in said and "has no column 'text', but: content, n. Set data.text to the one to train on" in said
    said = told(capsys, run, "--text", lines)
    assert options in said and "or set data.text to the field that holds the text: content" in said
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows" / "more.jsonl").write_text('{"content": "a"}\n')
    for wrong, words in ((tmp_path / "empty", "Point data.source at some"), (file.parent, "point data.source at those of one kind")):
        said = told(capsys, run, "--text", wrong)
        assert options in said and words in said
    assert "none is named" in told(capsys, run, "--column", "content")


def test_text_that_no_task_asks_about_is_refused(tmp_path: Path) -> None:
    ask = evaluation.Request(tasks=("piqa",), text="stdlib")
    with pytest.raises(BadInput, match="--text stdlib: it is for word_order and cloze"):
        evaluation.run(tmp_path, ask, None, Console())


def test_a_model_that_has_diverged_is_not_evaluated(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = subject.trained.load(run)
    with torch.no_grad():
        next(found.model.parameters())[0] = float("nan")
    monkeypatch.setattr(subject.trained, "load", lambda *_: found)
    with pytest.raises(RunFailed, match="has diverged"):
        subject.load(run)


def test_one_item_tells_nothing_and_a_model_has_its_limits(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    about = subject.load(run)
    about.tokenizer.model_max_length = 4
    logging.getLogger("transformers").addHandler(caplog.handler)
    item = Item(("a",), (" b", " c"), 0)
    with pytest.raises(BadInput, match="1 item"):
        harness.score(about.model, about.tokenizer, [(EMBEDDED["cloze"], [item])], longest=48)
    about.model.config.max_position_embeddings = 4
    with pytest.raises(BadInput, match="and the model takes 4"):
        harness.score(about.model, about.tokenizer, [(EMBEDDED["cloze"], [Item(("a",), (" q w z x j", " c"), 0)] * 2)], longest=48)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not caplog.records and about.tokenizer.model_max_length == 4, "transformers has nothing to remark on what is refused or cut here"
