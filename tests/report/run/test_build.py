"""Facts about the page: its numbers are those of the artifacts, it loads nothing, it runs nothing, it hides nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from report_runs import WHEN, Made, config, laptop_run, publish, samples, stage_folder, with_stage, write_evaluation
from snapshot import Snapshots

from klear_core.artifacts.store import LocalStore
from klear_core.config.pipeline import PromoteConfig
from klear_core.config.stage import PromoteJob
from klear_core.errors import ArtifactError
from klear_core.evaluate.compare.promotion import DECISION_FILE, Check, Contender, Decision, SharedProblems
from klear_core.pipeline.graph import stages_of
from klear_core.report.run.build import build_report
from klear_core.report.run.facts import ReportInputs, StageFolder
from klear_core.scores import NBSP, TemplateScore, read_reports, write_reports
from klear_core.types import EvalSample
from klear_core.waits import TRACE_FILE, Trace

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)></pre></style>\"'&{{ 7*7 }}"


class Elements(HTMLParser):
    """All tags with their attributes, and all text outside of style sheets."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._is_style = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._is_style = False

    def handle_data(self, data: str) -> None:
        if not self._is_style:
            self.text += data


class Lines(Elements):
    """The text of a page in lines, one for each block of it and each row of a table."""

    BLOCKS = frozenset(
        [
            "h1",
            "h2",
            "h3",
            "h4",
            "p",
            "li",
            "tr",
            "dt",
            "summary",
            "pre",
            "div",
            "section",
            "nav",
            "text",
            "title",
            "span",
        ]
    )

    def __init__(self, html: str) -> None:
        self.lines: list[str] = [""]
        super().__init__(html)
        self.lines = [line for text in self.lines if (line := " ".join(text.split()))]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        if tag in self.BLOCKS:
            self.lines.append("")
        elif tag in ("td", "th"):
            self.lines[-1] += " | "

    def handle_data(self, data: str) -> None:
        if not self._is_style:
            self.lines[-1] += data


def page_of(inputs: ReportInputs, tmp_path: Path) -> str:
    build_report(inputs, tmp_path / "out" / "report.html")
    return (tmp_path / "out" / "report.html").read_text()


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", Elements(html).text.replace("\u00a0", " "))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    return laptop_run(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def html(run: ReportInputs, tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(run, tmp_path_factory.mktemp("page"))


def test_what_the_page_says(html: str, snapshot: Snapshots) -> None:
    """Without the settings and the lineage, which a test below compares with the run's own, and the numbers at axes."""
    lines = [line for line in Lines(html).lines if not re.fullmatch(r"[+\u2212]?[\d.,]+(\s%)?", line)]
    settings = next(i for i, line in enumerate(lines) if line.startswith("Settings"))
    text = "\n".join(lines[:settings]).replace("\u00a0", " ")
    snapshot("report", re.sub(r"\b(?=\w*\d)[0-9a-f]{8,20}\b", "ID", text))


def test_scores_in_other_templates_and_their_spread_are_on_the_page(tmp_path: Path) -> None:
    run = laptop_run(tmp_path)
    for stage in run.stages:
        if stage.stage.scored_model_stage:
            (report,) = read_reports(stage.folder)
            boxed = TemplateScore(
                name="boxed",
                text=r"{question} <b>\boxed{}</b>",
                avg=report.avg.model_copy(update={"value": report.avg.value / 2}),
                truncated_frac=0,
                no_answer_frac=0,
                unscored={},
            )
            stage.folder.joinpath("report.json").chmod(0o644)
            write_reports(stage.folder, (report.model_copy(update={"templates": (boxed,)}),))
    text = text_of(page_of(run, tmp_path))
    # RL: 97.8 and half of it, whose standard deviation is their difference over the root of 2
    assert "48.9 to 97.8, standard deviation 34.6 points" in text
    assert r"boxed: {question} <b>\boxed{}</b>" in text


def test_the_page_loads_nothing_and_runs_nothing(html: str) -> None:
    elements = Elements(html)
    for tag, attrs in elements.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed", "img", "base", "form"}
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert attrs.get(name) is None or str(attrs[name]).startswith("#")
    assert "url(" not in html
    assert "@import" not in html


def test_links_within_the_page_lead_somewhere(html: str) -> None:
    tags = Elements(html).tags
    ids = {attrs["id"] for _, attrs in tags if "id" in attrs}
    assert {str(attrs["href"])[1:] for _, attrs in tags if "href" in attrs} <= ids


def test_the_page_is_small(html: str) -> None:
    assert len(html.encode()) < 300_000


def test_tags_are_balanced(html: str) -> None:
    void = {"meta", "br", "hr", "rect", "circle", "line", "path"}
    opened = [t for t, _ in Elements(html).tags if t not in void]
    assert {t: opened.count(t) for t in set(opened)} == {t: html.count(f"</{t}>") for t in set(opened)}


def with_text(row: EvalSample, text: str) -> EvalSample:
    return replace(row, response=text, question=text)


def test_hostile_model_output_is_text(tmp_path: Path) -> None:
    run = laptop_run(tmp_path)
    poisoned = publish(
        LocalStore(tmp_path),
        "evaluate_rl",
        Made(kind="evaluate_again", settings=config().evaluate),
        lambda folder: write_evaluation("rl", folder, [with_text(s, HOSTILE) for s in samples("rl")]),
    )
    html = page_of(with_stage(run, stage_folder("evaluate_rl", poisoned.path)), tmp_path)
    assert "<script" not in html
    assert not [attrs for tag, attrs in Elements(html).tags if tag == "img" or "onerror" in attrs]
    assert HOSTILE in unescape(html)


def test_control_characters_are_spelled_out(html: str) -> None:
    assert "\x00" not in html
    assert "\u202e" not in html
    assert "\\x00\\u202e9~~q" in html


def test_an_answer_of_a_megabyte_is_cut_and_says_so(tmp_path: Path) -> None:
    run = laptop_run(tmp_path)
    rows = [with_text(s, "x" * 999_999 + "\u202e") for s in samples("rl")]
    long = publish(
        LocalStore(tmp_path),
        "evaluate_rl",
        Made(kind="evaluate_again", settings=config().evaluate),
        lambda folder: write_evaluation("rl", folder, rows),
    )
    html = page_of(with_stage(run, stage_folder("evaluate_rl", long.path)), tmp_path)
    assert "992,005 characters left out of this report" in html
    assert len(html) < 2_000_000


def test_a_stage_that_failed_is_named_with_its_error(run: ReportInputs, tmp_path: Path) -> None:
    text = text_of(
        page_of(with_stage(run, stage_folder("rl", None, trouble="TrainingError: 6 non-finite steps")), tmp_path)
    )
    assert "rlThis stage failed: TrainingError: 6 non-finite steps" in text
    assert "8 of 9" in text


def test_a_run_without_a_final_evaluation_does_not_claim_it(run: ReportInputs, tmp_path: Path) -> None:
    without = with_stage(run, stage_folder("evaluate_rl", None))
    kept = tuple(d for d in run.differences if d.after != "rl")
    text = text_of(page_of(replace(without, differences=kept), tmp_path))
    assert "RL was not evaluated." in text
    assert "GPPO improved" not in text
    assert "SFT improved held-out avg@4 from 0.0 % to 67.1 %" in text


def test_a_run_that_only_failed_still_has_a_report(run: ReportInputs, tmp_path: Path) -> None:
    nothing = replace(run, stages=(stage_folder("curate", None, trouble="DataError: row 3"),), differences=())
    text = text_of(page_of(nothing, tmp_path))
    assert "No model was evaluated, so this run claims nothing." in text
    assert "DataError: row 3" in text


def test_a_stages_warning_is_shown_before_the_scores(html: str) -> None:
    warning = html.index("Judged with less isolation than the default")
    assert warning < html.index("From base to final score")


def test_the_recipe_is_on_the_page(html: str, run: ReportInputs) -> None:
    text = text_of(html)
    for stage in run.stages:
        assert stage.stage.name in text
        assert stage.folder is not None
        assert stage.folder.name in text  # the fingerprint
    for fact in (
        "4f2a9c1d7be0",
        "laptop",
        "0f5d8f7e-7c1b-4d0e-9a55-2f6f0c1d9b3a",
        f"{WHEN:%Y-%m-%d}",
        "2.13.0",
        "evaluate.sampling.max_new_tokens",
    ):
        assert fact in text
    assert run.config.model_dump_json(indent=2).splitlines()[1].strip() in unescape(html)


def test_the_same_run_gives_the_same_bytes(run: ReportInputs, html: str, tmp_path: Path) -> None:
    assert page_of(run, tmp_path) == html


def test_the_summary_counts_stages_and_bytes(run: ReportInputs, tmp_path: Path) -> None:
    summary = build_report(run, tmp_path / "report.html")
    assert summary.counts == {"stages": 9, "missing_stages": 0, "bytes": (tmp_path / "report.html").stat().st_size}


def test_an_altered_manifest_is_named(tmp_path: Path) -> None:
    run = laptop_run(tmp_path)
    folder = run.stages[0].folder
    assert folder is not None
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        build_report(run, tmp_path / "report.html")


@pytest.mark.parametrize("home", ["out", "artifacts/report/1f", "failed/run 7"])
def test_the_curations_page_of_leaks_is_linked_from_where_the_report_is_read(tmp_path: Path, home: str) -> None:
    run = laptop_run(tmp_path / "a store")
    (curate,) = [stage.folder for stage in run.stages if stage.stage.name == "curate"]
    assert curate is not None
    (curate / "leaks.html").write_text("shown")
    build_report(run, tmp_path / ".building" / "report.html", home=tmp_path / home)
    html = (tmp_path / ".building" / "report.html").read_text()
    (link,) = [attrs["href"] or "" for tag, attrs in Elements(html).tags if tag == "a" and "leaks" in str(attrs)]
    assert ":" not in link
    assert (tmp_path / home / unquote(link)).resolve() == curate / "leaks.html"


def test_without_such_a_page_there_is_no_link(html: str) -> None:
    assert "leaks.html" not in html


def test_the_decision_on_the_champion_is_on_the_page_with_every_check(run: ReportInputs, tmp_path: Path) -> None:
    decision = Decision(
        is_passed=False,
        sentence="rl b does not become champion",
        candidate=Contender(model="rl/b", evaluation="evaluate/b", run="r2"),
        rival=Contender(model="rl/a", evaluation="evaluate/a", run="r1", version=1),
        rival_is="champion",
        rule=PromoteConfig(),
        checks=(
            Check(rule="non-inferior", benchmark="heldout", is_passed=True, text="+1.0 points (-2.0 to +4.0)"),
            Check(rule="better", is_passed=False, text="no gain is shown: heldout +1.0 points, p = 0.30"),
        ),
        comparisons=(),
        shared=(SharedProblems(benchmark="heldout", num_shared=256, num_only_new=0, num_only_old=0),),
    )

    def write(folder: Path) -> None:
        (folder / DECISION_FILE).write_text(decision.model_dump_json())

    rule = config().model_copy(update={"promote": PromoteConfig()})
    made = Made(kind="promote", settings=PromoteJob.of(rule))
    folder = publish(LocalStore(tmp_path / "store"), "promote", made, write).path
    (stage,) = [stage for stage in stages_of(rule) if stage.job.asks_registry]
    with_decision = replace(run, stages=(*run.stages, StageFolder(stage=stage, folder=folder)))
    text = text_of(page_of(with_decision, tmp_path))
    assert "rl b does not become champion." in text
    # cells of a row follow one another without a space
    assert "betterallnono gain is shown: heldout +1.0 points, p = 0.30" in text
    assert "non-inferiorheldoutyes+1.0 points (-2.0 to +4.0)" in text
    assert "heldout: 256 problems shared." in text


def test_without_a_decision_the_page_has_no_champion(html: str) -> None:
    assert 'id="promotion"' not in html


def test_the_page_shows_who_worked_in_the_last_steps_of_rl(tmp_path: Path) -> None:
    run = laptop_run(tmp_path)
    (rl,) = [stage for stage in run.stages if stage.stage.name == "rl"]
    assert rl.folder is not None
    trace = Trace(rl.folder / TRACE_FILE)
    for name, end in (("sample", 6.0), ("learn", 10.0)):
        trace.add("driver", name, 0.0 if name == "sample" else 6.0, end)
    trace.add("rollout actor 0", "sample", 0.0, 6.0)
    trace.close()
    build_report(run, tmp_path / "report.html")
    text = Elements((tmp_path / "report.html").read_text()).text
    assert f"Who worked in the last 1 step (10{NBSP}s)" in text
    assert re.search(rf"rollout actor 0\s*60\.0{NBSP}%", text)
