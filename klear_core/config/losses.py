"""Define the settings of the policy losses of RL: a closed set, told apart by `kind`.

"Paper" is Klear-Reasoner (arXiv 2508.07629); "scripts" are the training scripts published with it. Losses of other
papers cite theirs, and "its code" is the code published with them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from klear_core.config.settings import Settings

GPPO_PRESETS: dict[str, dict[str, float]] = {
    "paper": {"beta_low": 1.0, "beta_high": 1.0},
    "ce_gppo": {"beta_low": 0.5, "beta_high": 1.0, "eps_low": 0.2, "eps_high": 0.2},
    "high_only": {"beta_low": 0.0, "beta_high": 1.0},
}
"""Settings by preset name: Klear-Reasoner equation 11, CE-GPPO section 5.1 (with its own clip range), and gradients
kept for positive tokens only.
"""


class BetaSchedule(Settings):
    """Linear change of the betas, from the loss's at `start_step` to these at `end_step`.

    RL steps are counted from 0 here. With equal steps that step is the first with these betas.
    """

    start_step: int = Field(ge=0)
    """The last RL step with the loss's own betas."""
    end_step: int = Field(ge=0)
    """The first RL step with these betas."""
    beta_low: float = Field(ge=0)
    """Weight of negative tokens below the range from `end_step` on (CE-GPPO: 0.5)."""
    beta_high: float = Field(ge=0)
    """Weight of positive tokens above the range from `end_step` on (CE-GPPO: 1)."""

    @model_validator(mode="after")
    def _ordered(self) -> BetaSchedule:
        if self.end_step < self.start_step:
            raise ValueError(f"end_step {self.end_step} lies before start_step {self.start_step}")
        return self


class GppoConfig(Settings):
    """Gradient-preserving clipping in its general form (Klear-Reasoner equations 11 and 17, CE-GPPO equation 8)."""

    kind: Literal["gppo"] = "gppo"
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios below 1 - eps_low are out of range. Paper section 4.1."""
    eps_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 + eps_high are out of range. Paper section 4.1; CE-GPPO has 0.2."""
    beta_low: float = Field(default=1.0, ge=0)
    """Weight of negative tokens below the range; the paper has 1, the authors' later advice 0.25 to 0.5."""
    beta_high: float = Field(default=1.0, ge=0)
    """Weight of positive tokens above the range."""
    # After range and betas, because its validator reads them. The default is validated too, so that the preset's name
    # follows from betas that were set alone.
    preset: Literal["paper", "ce_gppo", "high_only", "custom"] = Field(default="paper", validate_default=True)
    """Name of a pair of betas (for `ce_gppo` also of their clip range), to set instead of them. If it is not set, it is
    derived from them."""
    schedule: BetaSchedule | None = None
    """Change of the betas during the run (CE-GPPO shows (0, 1), then (0.5, 1) from step 585)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Cap on the loss of negative tokens, in multiples of |advantage|; capped ones have no gradient. Not in the paper;
    its scripts have 10."""

    @model_validator(mode="before")
    @classmethod
    def _preset_gives_settings(cls, values: Any) -> Any:
        known = _settings_of(values.get("preset")) if isinstance(values, dict) else {}
        for key, value in known.items():
            if values.get(key, value) != value:
                raise ValueError(
                    f"{key}={values[key]} contradicts preset {values['preset']!r}, where it is {value}; "
                    "use preset 'custom'"
                )
        return values | known if known else values

    @field_validator("preset")
    @classmethod
    def _settings_give_preset(cls, preset: str, info: ValidationInfo) -> str:
        """Derive the preset's name from the settings; a preset that was set has those that belong to it.

        A derived name does not count as set, so that settings which override these later do not contradict it.
        """
        given = info.data
        if preset == "custom" or not given.keys() >= GPPO_PRESETS["ce_gppo"].keys():
            return preset  # the user's choice, or settings that failed their own validation
        for name, known in GPPO_PRESETS.items():
            if all(given[key] == value for key, value in known.items()):
                return name
        return "custom"


def _settings_of(preset: object) -> dict[str, float]:
    """Return what the preset sets; empty for `custom` and unknown names."""
    return GPPO_PRESETS.get(preset, {}) if isinstance(preset, str) else {}


class ClipConfig(Settings):
    """PPO's clipped objective; eps_high above eps_low is DAPO's clip-higher."""

    kind: Literal["clip"] = "clip"
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios below 1 - eps_low are clipped (PPO, DAPO)."""
    eps_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 + eps_high are clipped (DAPO: 0.28; PPO: 0.2 for both)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Cap on the loss of negative tokens, in multiples of |advantage|; capped ones have no gradient (DAPO's code:
    10)."""


class CispoConfig(Settings):
    """Clipped importance weights times log-probability (MiniMax-M1; if two-sided, Klear-Reasoner equation 16)."""

    kind: Literal["cispo"] = "cispo"
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Weights are at least 1 - eps_low if two_sided; otherwise unused."""
    eps_high: float = Field(default=0.28, ge=0)
    """Weights are at most 1 + eps_high. In some codebases this name means the bound itself."""
    two_sided: bool = False
    """Also bound weights below, at 1 - eps_low; MiniMax and ScaleRL bound only above."""


class GspoConfig(Settings):
    """PPO's clipped objective on length-normalised sequence ratios (GSPO, arXiv 2507.18071).

    GSPO also needs `normalise = "sample"`.
    """

    kind: Literal["gspo"] = "gspo"
    eps_low: float = Field(default=3e-4, ge=0, lt=1)
    """Sequences with a ratio below 1 - eps_low are clipped; GSPO section 5.1. Far narrower than for token ratios."""
    eps_high: float = Field(default=4e-4, ge=0)
    """Sequences with a ratio above 1 + eps_high are clipped; GSPO section 5.1."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Cap on the loss of negative sequences, in multiples of |advantage|; capped ones have no gradient. Not in GSPO."""


class DgpoConfig(Settings):
    """Decoupled decay of the weights of out-of-range tokens (DGPO, arXiv 2603.14389).

    The weight, r inside the range, falls continuously to 0 below it (A < 0) and grows more slowly above it (A > 0).
    """

    kind: Literal["dgpo"] = "dgpo"
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios below 1 - eps_low are out of range. DGPO's code."""
    eps_high: float = Field(default=0.2, ge=0)
    """Ratios above 1 + eps_high are out of range. DGPO's code."""
    low_power: float = Field(default=1.0, ge=0, le=16)
    """n: below the range the weight is r (r / (1 - eps_low))^n. DGPO's code, which recommends 1, 2 or 3; 0 is r."""
    high_root: float = Field(default=2.0, ge=1, le=16)
    """m: above the range the weight is r ((1 + eps_high) / r)^(1/m). DGPO's code, which recommends 1, 2 or 3; 1 is the
    bound itself."""


class AspoConfig(Settings):
    """Weights of positive tokens turned upside down, 1/r instead of r (ASPO, arXiv 2510.06062)."""

    kind: Literal["aspo"] = "aspo"
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Negative tokens with a ratio below 1 - eps_low have no gradient. ASPO's scripts, where it is 0.2 or 0.4 by the
    token's entropy; here all tokens have the same range."""
    eps_high: float = Field(default=0.2, ge=0)
    """Positive tokens with a ratio above 1 + eps_high have no gradient. ASPO's scripts; see eps_low."""
    max_weight: float = Field(default=3.0, gt=1)
    """Cap on the weight of both signs, 1/r and r; capped tokens keep their gradient (soft dual clip). ASPO's code."""


class SapoConfig(Settings):
    """A smooth gate in place of clipping: weight 4 r s (1 - s), s = sigmoid(tau (r - 1)) (SAPO, arXiv 2511.20347).

    SAPO also needs `normalise = "sample"`.
    """

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0, le=100)
    """tau of positive tokens: the larger, the faster the weight falls as r leaves 1. SAPO's default."""
    tau_negative: float = Field(default=1.05, gt=0, le=100)
    """tau of negative tokens. SAPO's default."""
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios below 1 - eps_low are counted in the metrics, and change nothing."""
    eps_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 + eps_high are counted in the metrics, and change nothing."""


class TrmConfig(Settings):
    """Masking of sequences by their largest token divergence (Trust Region Masking, arXiv 2512.23075).

    Tokens of other sequences have the weight r. With `old_logps = "sampler"`, as in TRM, the divergence includes the
    mismatch between sampler and learner.
    """

    kind: Literal["trm"] = "trm"
    max_divergence: float = Field(default=2.5, gt=0)
    """Sequences are masked if (log r)^2 / 2 of any of their tokens is above this. 2.5, from the example scripts of
    verl's implementation, allows ratios from 0.107 to 9.36."""

    @property
    def eps_low(self) -> float:
        """Lower end of the token range that `max_divergence` allows, as distance from a ratio of 1."""
        return -math.expm1(-math.sqrt(2 * self.max_divergence))

    @property
    def eps_high(self) -> float:
        """Upper end of the token range that `max_divergence` allows, as distance from a ratio of 1."""
        return math.expm1(math.sqrt(2 * self.max_divergence))


class M2poConfig(Settings):
    """Masking of the tokens with the largest second moment of the log-ratio (M2PO, arXiv 2510.01161, algorithm 1).

    Only tokens whose update leads away from the old policy (A > 0 and r > 1, or A < 0 and r < 1) are masked, the
    largest (log r)^2 first, until its mean over the rest of them in the mini-batch is at most `max_second_moment`. All
    other tokens have the weight r. AReaL's version masks regardless of A, within a micro-batch. Costs a forward pass
    per update.
    """

    kind: Literal["m2po"] = "m2po"
    max_second_moment: float = Field(default=0.04, gt=0)
    """tau, the largest mean of (log r)^2; the paper has 0.04 for all models."""
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios below 1 - eps_low are counted in the metrics, and change nothing."""
    eps_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 + eps_high are counted in the metrics, and change nothing."""


class DppoConfig(Settings):
    """Masking by the divergence of the token's distribution, sampled token or not (DPPO, arXiv 2602.04879, eq. 12-14).

    A token is masked if its update leads away from the old policy (A > 0 and r > 1, or A < 0 and r < 1) and the
    divergence is above the bound; all others have the weight r. The paper measures from the policy that sampled, and
    collapses otherwise: set `old_logps = "sampler"`.
    """

    kind: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Total variation |p_old - p|, or KL divergence of old from new, both between {sampled token, any other}."""
    max_divergence: float | None = Field(default=None, gt=0)
    """The bound; None is its scripts' 0.15 for `tv` and 0.05 for `kl`. prime-rl's default loss is `tv` with 0.2."""
    eps_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios below 1 - eps_low are counted in the metrics, and change nothing."""
    eps_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 + eps_high are counted in the metrics, and change nothing."""

    @property
    def bound(self) -> float:
        """Return the largest divergence of a token that is not masked."""
        if self.max_divergence is not None:
            return self.max_divergence
        return 0.15 if self.divergence == "tv" else 0.05


LossConfig = Annotated[
    GppoConfig
    | ClipConfig
    | CispoConfig
    | GspoConfig
    | DgpoConfig
    | AspoConfig
    | SapoConfig
    | TrmConfig
    | M2poConfig
    | DppoConfig,
    Field(discriminator="kind"),
]

LOSS_KINDS = get_args(get_args(LossConfig)[0])
"""The settings classes of all losses."""


class ErcConfig(Settings):
    """Entropy-ratio clipping (ERC, arXiv 2512.05591).

    Tokens whose ratio of new to old entropy is outside (low, high) keep their loss value but lose their gradient.
    """

    low: float = Field(default=0.95, gt=0, lt=1)
    """Lower bound of the ratio; from ERC's scripts (its code defaults to 0.8)."""
    high: float = Field(default=1.05, gt=1)
    """Upper bound of the ratio; from ERC's scripts (its code defaults to 1.2, its logs have 1.05 to 1.25)."""
