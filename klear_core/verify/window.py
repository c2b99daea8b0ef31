"""Find the part of a response in which an answer counts."""

from __future__ import annotations

from dataclasses import dataclass

from klear_core.config.verify import VerifyConfig

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
NO_CLOSE_TAG = "no </think>"
NO_OPEN_TAG = "no <think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer:
    """The reason why a response has no answer to judge."""

    reason: str


def find_answer_text(response: str, cfg: VerifyConfig) -> str | NoAnswer:
    """Return the text to search for an answer, or the required tag that is missing."""
    has_close = CLOSE_TAG in response
    if cfg.tags != "none" and not has_close:
        return NoAnswer(reason=NO_CLOSE_TAG)
    if cfg.tags == "both" and OPEN_TAG not in response:
        return NoAnswer(reason=NO_OPEN_TAG)
    if cfg.window == "whole" or not has_close:
        return response
    return response.rsplit(CLOSE_TAG, 1)[1]
