"""Serve a page of all runs of a workspace, with their reports and logs; `klear ui` starts it beside the other servers.

python -m flows.runs_page ROOT --host 127.0.0.1 --port 5001
"""

from __future__ import annotations

import html
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer

from flows.runs import ShownRun, list_runs
from klear_core.artifacts.run_history import LOG, RunHistory
from klear_core.config.stage import ReportJob
from klear_core.errors import KlearError
from klear_core.scores import percent

_REFRESH_S = 10
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222 }
table { border-collapse: collapse } th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #999 } small { color: #666 } .failed, .killed { color: #b00 } .running { color: #06c }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""For the list and the logs: no script, and nothing from elsewhere. A report is a page of ours with its own script."""


def page(runs: list[ShownRun], root: Path) -> str:
    """Return the page of all runs."""
    head = "".join(f"<th>{name}" for name in ("run", "state", "progress", "score", "GPUs busy", "cost", "started", ""))
    rows = "".join("<tr>" + "".join(f"<td>{cell}" for cell in _cells(run)) for run in runs)
    return (
        f"<!doctype html><meta charset=utf-8><meta http-equiv=refresh content={_REFRESH_S}>"
        f"<title>Runs</title><style>{_STYLE}</style><h1>Runs</h1><p><small>{html.escape(str(root))}</small>"
        f"<table><tr>{head}{rows}</table>"
    )


def _cells(run: ShownRun) -> tuple[str, ...]:
    r = run.record
    label = f"<br><small>{html.escape(run.label)}</small>" if run.label else ""
    pinned = f"<br><small>pinned: {html.escape(run.pin)}</small>" if run.pin else ""
    why = f"<br><small>{html.escape(r.why)}</small>" if r.why else ""
    links = [f'<a href="/log/{r.run_id}">log</a>']
    if r.report:
        links.append(f'<a href="/report/{r.run_id}">report</a>')
    if r.run_url:
        links.append(f'<a href="{html.escape(r.run_url)}">Prefect</a>')
    score = "<br>".join(html.escape(part) for part in run.score.split("; "))
    gpu_busy = "" if r.gpu_busy is None else percent(r.gpu_busy, 0)
    return (
        f"<b>{html.escape(r.name)}</b> <small>{html.escape(r.run_id[:8])}</small>{label}{pinned}",
        f'<span class="{r.state}">{r.state}</span>',
        html.escape(run.progress) + why,
        score,
        gpu_busy,
        html.escape(run.cost),
        f"{r.started_at.astimezone():%Y-%m-%d %H:%M}",
        " ".join(links),
    )


def answer(path: str, root: Path) -> tuple[HTTPStatus, str, str]:
    """Return status, content type and text of the reply to a GET. Only files that a run's record names are read."""
    if path == "/health":
        return HTTPStatus.OK, "text/plain", "ok"
    if path == "/":
        return HTTPStatus.OK, "text/html", page(list_runs(root), root)
    page_name, _, run_id = path.strip("/").partition("/")
    found = [run.record for run in list_runs(root) if run.record.run_id == run_id]
    if found and f"{page_name}.html" == ReportJob.page and Path(found[0].report).is_file():
        return HTTPStatus.OK, "text/html", Path(found[0].report).read_text(encoding="utf-8")
    log = RunHistory.of(root).folder(run_id) / LOG
    if found and page_name == LOG and log.is_file():
        return HTTPStatus.OK, "text/plain", log.read_text(encoding="utf-8", errors="replace")
    return HTTPStatus.NOT_FOUND, "text/plain", "not here: the run is on another machine, or has none yet"


def serve(
    root: Path,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 5001,
) -> None:
    """Serve the page until the process is ended."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                status, kind, text = answer(self.path.partition("?")[0], root)
            except KlearError as e:  # the shared store does not answer
                status, kind, text = HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(e)
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            if not self.path.startswith("/report/"):
                self.send_header("Content-Security-Policy", _POLICY)
            self.end_headers()
            self.wfile.write(content)

    ThreadingHTTPServer((host, port), Handler).serve_forever()


if __name__ == "__main__":
    typer.run(serve)
