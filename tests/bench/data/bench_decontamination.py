"""Recall and precision of decontamination rules on leaks in published sets that are known by id or by equal text.

Known leaks: the rows of NeMo's competition set that are AIME 2024, AIME 2025 and HMMT February 2025 by id; the problems of
LeetCodeDataset that are in LiveCodeBench by their slug, and rLLM's copies of them; and every prompt that equals a benchmark
question after normalisation. Precision is a lower bound: variants of a question (other numbers) count as wrong drops.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from klear_core.config.curate import DecontaminateConfig, DecontaminationRule
from klear_core.config.data import FileSource
from klear_core.data.candidates import Candidate
from klear_core.data.curation.decontaminate import Decontaminator, Protected
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.sources import read_contest_questions, read_source

DATA = Path(__file__).parents[4] / "shared" / "data"
RECOMMENDED: tuple[DecontaminationRule, ...] = ("share", "near", "contest")
_NEMO_LEAK = re.compile(r"aime2[45]-|hmmt_F_2025_(?:algebra|geometry|combinatorics)_")

Found = set[int]
"""Indices of prompts."""


def measure() -> list[dict[str, object]]:
    """Return recall, precision and number of drops of each rule, and the CPU time of ours."""
    if not DATA.is_dir():
        raise SystemExit(f"the published sets are not beside the checkout ({DATA})")
    prompts = [*_prompts("math"), *_prompts("code")]
    protected = list(_protected())
    known = _known_leaks(prompts, protected)
    started = time.process_time()
    rules_of = _matches(prompts, protected)
    cpu_s = time.process_time() - started
    found: dict[str, Found] = {"paper_ngram": _with_any(rules_of, ("any_ngram",))}
    found |= {rule: _with_any(rules_of, (rule,)) for rule in ("ngram", "share", "near", "contest")}
    found["recommended"] = _with_any(rules_of, RECOMMENDED)
    found["script_8gram"] = _plain_overlap(prompts, [q.question for q in protected], length=8)
    found["datatrove_12gram_query"] = _plain_overlap(prompts, [q.question for q in protected], length=12)
    found["datatrove_12gram_default"] = _datatrove_default(prompts)
    entries: list[tuple[str, float, str, str, bool]] = []
    for name, indices in found.items():
        num_right = len(indices & known)
        needed = {"ngram": 1.0, "recommended": 0.95}.get(name, 0.0)
        recall = num_right / len(known)
        entries.append((f"decontamination/{name}/recall", recall, "of all", f">= {needed}", recall >= needed))
        entries.append((f"decontamination/{name}/precision", num_right / max(1, len(indices)), "at least", "-", True))
        entries.append((f"decontamination/{name}/drops", len(indices), "prompts", "-", True))
    entries.append(("decontamination/all_rules/cpu_s", cpu_s, "s", "-", True))
    versions = {"prompts": len(prompts), "questions": len(protected), "known leaks": len(known)}
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


def _files(kind: str) -> Iterator[Path]:
    for folder in sorted(DATA.glob(f"{kind}-*")):
        yield from sorted(path for path in folder.iterdir() if path.suffix != ".md")


def _prompts(kind: str) -> Iterator[Candidate]:
    for path in _files(kind):
        rows = read_source(FileSource(path=str(path), name=path.parent.name), seed=0)
        yield from (row for row in rows if isinstance(row, Candidate))


def _protected() -> Iterator[Protected]:
    for path in _files("bench"):
        for number, question in enumerate(read_contest_questions(FileSource(path=str(path))), 1):
            assert isinstance(question, tuple), (path, number)
            text, contest = question
            name = path.parent.name
            yield Protected(benchmark=name, question_id=str(number), question=text, contest_id=contest)


def _known_leaks(prompts: list[Candidate], protected: Iterable[Protected]) -> Found:
    equal = {_key(question.question) for question in protected}
    slugs = {row["question_title"] for row in _json_lines("bench-lcb-v6-questions") if row["platform"] == "leetcode"}
    is_leak: dict[str, Callable[[dict[str, str]], bool]] = {
        "math-nemo-comp-24-25": lambda row: bool(_NEMO_LEAK.match(row["id"])),
        "code-leetcodedataset": lambda row: row["task_id"] in slugs,
        "code-leetcodedataset-2024h2": lambda row: row["task_id"] in slugs,
    }
    known: Found = set()
    for source, is_leaked in is_leak.items():
        indices = [i for i, prompt in enumerate(prompts) if prompt.source == source]
        rows = _json_lines(source)
        assert len(rows) == len(indices), (source, len(rows), len(indices))
        known |= {i for i, row in zip(indices, rows, strict=True) if is_leaked(row)}
    equal |= {_key(prompts[i].question) for i in known}  # rLLM has no slugs
    return known | {i for i, prompt in enumerate(prompts) if _key(prompt.question) in equal}


def _matches(prompts: Iterable[Candidate], protected: Iterable[Protected]) -> dict[int, set[str]]:
    """Return the rules that match, by index of the prompt."""
    guard = Decontaminator(DecontaminateConfig(), protected)
    rules_of: dict[int, set[str]] = {}
    for index, prompt in enumerate(prompts):
        (leak,) = guard.leaks_in([prompt], [tokens_of(prompt.question)])
        if leak is not None:
            rules_of[index] = set(leak.rules.split())
    return rules_of


def _with_any(rules_of: dict[int, set[str]], rules: tuple[str, ...]) -> Found:
    return {index for index, matching in rules_of.items() if not matching.isdisjoint(rules)}


def _plain_overlap(prompts: list[Candidate], questions: Iterable[str], *, length: int) -> Found:
    """Return the prompts that share a run of lower-cased words with a question; LaTeX is not understood.

    With 12 words it is datatrove's `NGramsDecontFilter` with `find_query_ngrams=True`.
    """
    grams = {gram for question in questions for gram in _plain_grams(question, length)}
    return {i for i, prompt in enumerate(prompts) if not grams.isdisjoint(_plain_grams(prompt.question, length))}


def _datatrove_default(prompts: list[Candidate]) -> Found:
    """Return what datatrove drops by default: 12-grams of the answer, and those that run from the question into it."""
    grams: set[str] = set()
    for row in _prompts("bench"):
        answer = " ".join(getattr(row.reference, "answers", ()))
        num_answer_words = len(_plain_words(answer))
        both = _plain_words(f"{row.question} {answer}")
        first = max(0, len(both) - num_answer_words - 11)
        if num_answer_words:
            grams |= set(_plain_grams(" ".join(both[first:]), 12))
    return {i for i, prompt in enumerate(prompts) if not grams.isdisjoint(_plain_grams(prompt.question, 12))}


def _plain_words(text: str) -> list[str]:
    return re.sub(r"[^\w\s]", " ", text.lower()).split()


def _plain_grams(text: str, length: int) -> set[str]:
    words = _plain_words(text)
    return {" ".join(words[i : i + length]) for i in range(len(words) - length + 1)}


def _key(question: str) -> str:
    return " ".join(tokens_of(question))


def _json_lines(folder: str) -> list[dict[str, str]]:
    (path,) = (path for path in (DATA / folder).iterdir() if path.suffix != ".md")
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]
