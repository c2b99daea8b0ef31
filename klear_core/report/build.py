"""Write the report: one self-contained HTML file that shows what a run did and where each number comes from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from klear_core.artifacts.ledger import StageSummary
from klear_core.report import charts, lineage
from klear_core.report.claims import Headline, headline
from klear_core.report.config_view import Setting, changed_settings
from klear_core.report.curves import StageCurves, stage_curves
from klear_core.report.examples import Examples, pick_examples
from klear_core.report.facts import Facts
from klear_core.report.inputs import ReportInputs
from klear_core.report.ledger_view import StageLedger, stage_ledgers
from klear_core.report.notices import Notice, notices
from klear_core.report.product import Product, product_of
from klear_core.report.read import read_facts
from klear_core.report.scores_view import BenchmarkView, SideBySide, benchmark_views, overview
from klear_core.report.text import duration, number, percent

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All data that the template shows."""

    facts: Facts
    headline: Headline
    notices: list[Notice]
    overview: list[SideBySide]
    benchmarks: list[BenchmarkView]
    curves: list[StageCurves]
    examples: Examples | None
    ledgers: list[StageLedger]
    settings: list[Setting]
    config_json: str
    graph: lineage.Graph
    product: Product | None
    versions: dict[str, str]

    @property
    def models(self) -> tuple[tuple[int, str], ...]:
        """Tone and label of every evaluated model."""
        return tuple((m.tone, m.maker.label) for m in self.facts.models)


def build_report(inputs: ReportInputs, out: Path, *, home: Path | None = None) -> StageSummary:
    """Write the report to the file `out` atomically, creating its parents.

    Its links start at the folder `home`, where it will be read if it is published from `out` to elsewhere.
    Raise ArtifactError if a stage's folder cannot be read.
    """
    page = _page(read_facts(inputs), home=out.parent if home is None else home)
    html = page_template("report.html.j2").render(
        page=page,
        started=_readable(page.facts.run.started_at),
        css=stylesheet(),
        charts=charts,
        lineage=lineage,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(html, encoding="utf-8")
    temporary.replace(out)
    return StageSummary(
        counts={
            "stages": len(page.facts.stages),
            "missing_stages": len(page.facts.missing),
            "bytes": out.stat().st_size,
        },
        seeds={"run": inputs.config.seed},
    )


def _page(facts: Facts, *, home: Path) -> Page:
    return Page(
        facts=facts,
        headline=headline(facts),
        notices=notices(facts),
        overview=overview(facts),
        benchmarks=benchmark_views(facts),
        curves=stage_curves([*facts.stages, *facts.missing]),
        examples=pick_examples(facts),
        ledgers=stage_ledgers(facts.stages, home=home),
        settings=changed_settings(facts.config),
        config_json=json.dumps(facts.config.model_dump(mode="json"), indent=2, ensure_ascii=False),
        graph=lineage.lineage_graph(facts.stages),
        product=product_of(facts),
        versions=_versions(facts),
    )


def _readable(moment: str) -> str:
    """Format an ISO 8601 time to the second, with its time zone."""
    return f"{datetime.fromisoformat(moment):%Y-%m-%d %H:%M:%S %Z}"


def _versions(facts: Facts) -> dict[str, str]:
    """Return versions by library; if stages differ, all versions in stage order, separated by commas."""
    met: dict[str, dict[str, None]] = {}  # the inner dict is an ordered set
    for stage in facts.stages:
        for library, version in stage.manifest.versions.items():
            met.setdefault(library, {})[version] = None
    return {library: ", ".join(versions) for library, versions in met.items()}


def stylesheet() -> str:
    """Return the CSS that all pages share."""
    return (HERE / "report.css").read_text()


@cache
def page_template(name: str) -> Template:
    """Return a template of this folder with our filters."""
    environment = Environment(
        # StrictUndefined: a misspelt name in a template fails, where it would leave an empty place on the page.
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "number": number,
        "duration": duration,
        "python": repr,
    }
    return environment.get_template(name)
