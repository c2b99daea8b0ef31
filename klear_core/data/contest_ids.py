"""Name the contest problem that a row holds, if the row says so; a problem has one name in all sources."""

from __future__ import annotations

import re

from klear_core.data.fields import Fields

_URLS = (
    (
        re.compile(r"codeforces\.com/(?:problemset/problem|contest)/(\d+)/(?:problem/)?([A-Za-z]\d?)\b"),
        "codeforces/{}{}",
    ),
    (re.compile(r"atcoder\.jp/contests/\w+/tasks/(\w+)"), "atcoder/{}"),
    (re.compile(r"leetcode\.com/problems/([\w-]+)"), "leetcode/{}"),
)
_ATCODER_ID = re.compile(r"a[brgh]c\d{3}_\w{1,2}")
_CODEFORCES_ID = re.compile(r"(\d{1,4})[_/]([A-Za-z]\d?)")


def contest_id(fields: Fields) -> str:
    """Return a name such as `atcoder/abc365_b`, `codeforces/1873a` or `leetcode/two-sum`; empty if the row has none.

    LeetCode problems are named by their slug: LeetCode numbers them in two ways, and sources use either.
    """
    for key in ("url", "link", "problem_url"):
        found = _from_url(str(fields.get(key, "")))
        if found:
            return found
    for key in ("question_id", "id", "problem_id"):
        found = _from_id(str(fields.get(key, "")))
        if found:
            return found
    return _leetcode_slug(fields)


def _from_url(url: str) -> str:
    for pattern, name in _URLS:
        match = pattern.search(url)
        if match:
            return name.format(*match.groups()).lower()
    return ""


def _from_id(text: str) -> str:
    if _ATCODER_ID.fullmatch(text):
        return f"atcoder/{text}"
    match = _CODEFORCES_ID.fullmatch(text)
    return f"codeforces/{match[1]}{match[2]}".lower() if match else ""


def _leetcode_slug(fields: Fields) -> str:
    """Return the slug of a LiveCodeBench row (its title) or of a LeetCodeDataset row (its task id)."""
    is_leetcode = fields.get("platform") == "leetcode" or str(fields.get("entry_point", "")).startswith("Solution()")
    if not is_leetcode:
        return ""
    name = str(fields.get("question_title") or fields.get("task_id") or "")
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"leetcode/{slug}" if slug else ""
