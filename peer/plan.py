"""The plan: what a federation agrees on, and nothing that a device decides for itself.

A plan names methods, models and data sets from what is installed. It can carry neither code nor an
import path, so that taking a stranger's plan is no more than taking numbers.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from peer.errors import UserError

MAX_PEERS = 100_000
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]


class _Table(BaseModel):
    """A table of the plan: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MatchingPlan(_Table):
    """Numbers of the method, in the papers' symbols."""

    l: int = Field(default=6, ge=1, le=MAX_PEERS, description="candidate list size")  # noqa: E741
    k: int = Field(default=3, ge=1, le=MAX_PEERS, description="aggregation list size")
    t1: int | None = Field(
        default=None, ge=1, description="rounds of stage 1 (T1); half of the rounds if not given"
    )
    tau: int = Field(default=5, ge=1, description="NAEM interval")
    alpha: float = Field(
        default=0.5, ge=0, le=1, description="weight of cos(g_i, g_j) against cos(h_i, h_j)"
    )
    fade: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="alpha counts in full while ||g_i|| is at least this share of ||h_i||, and "
        "less in proportion below; 0: always, as in the paper",
    )
    evidence: Literal["sketch", "exact"] = Field(
        default="sketch", description="what gradient-based similarity is computed from"
    )
    sketch_buckets: int | None = Field(
        default=None,
        ge=16,
        le=65_536,
        description="CountSketch length; min(4096, e // 16), at least 64, if not given",
    )
    loss_samples: int = Field(
        default=100, ge=1, description="training samples that loss-based similarity is computed on"
    )
    weighting: Literal["uniform", "samples"] = Field(
        default="uniform", description="average models equally or by their sample counts"
    )


class PartitionPlan(_Table):
    """How the named data set is dealt to the peers."""

    kind: Literal["none", "rotation", "label-swap", "label-permutation", "natural"] = Field(
        default="none", description="how clusters differ; none: all peers share one distribution"
    )
    clusters: int = Field(default=1, ge=1, le=1000, description="number of true clusters, K")
    skew: Literal["none", "dirichlet", "quantity"] = Field(
        default="none", description="how shares differ beside their clusters"
    )
    concentration: float = Field(
        default=0.5,
        gt=0,
        le=1e6,
        description="of the Dirichlet draw of a skew; smaller: more uneven",
    )
    train_per_peer: int | None = Field(
        default=None,
        ge=1,
        description="class-balanced training samples a peer; an equal share if not given",
    )
    test_per_peer: int = Field(
        default=1000,
        ge=1,
        description="test samples a peer, from its cluster's pool (all when fewer)",
    )

    @model_validator(mode="after")
    def _clusters_fit(self) -> Self:
        allowed = {"none": (1,), "rotation": (1, 2, 4), "label-swap": (1, 2, 4)}
        if self.kind in allowed and self.clusters not in allowed[self.kind]:
            known = " or ".join(", ".join(map(str, allowed[self.kind])).rsplit(", ", 1))
            raise ValueError(f"{self.kind} knows clusters = {known}")
        return self

    @property
    def label(self) -> str:
        """How summaries call it: rotation-4, or none-1+dirichlet-0.1."""
        skew = "" if self.skew == "none" else f"+{self.skew}-{self.concentration:g}"
        return f"{self.kind}-{self.clusters}{skew}"


class CentralPlan(_Table):
    """Numbers of the methods that a coordinator runs."""

    clusters: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="number of models, c (ifca); that of true clusters if not given",
    )
    fraction: float = Field(
        default=1.0, gt=0, le=1, description="share of the peers that take part in a round"
    )
    redraws: int = Field(
        default=20,
        ge=0,
        le=10_000,
        description="times that initial models are drawn anew until each is somebody's best",
    )
    quorum: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="share of those asked whose answers suffice at a live round's deadline",
    )


class CflPlan(_Table):
    """When CFL splits a cluster, in the paper's symbols, and whether updates are permuted."""

    rule: Literal["contrast", "paper"] = Field(
        default="contrast",
        description="what makes a cut sound: cosines inside its halves against those across, "
        "or the paper's gate alone",
    )
    eps1: float | None = Field(
        default=None,
        gt=0,
        description="the mean update is small below it; 0.6 (contrast) or 0.1 (paper) of the "
        "largest seen if not given",
    )
    eps2: float | None = Field(
        default=None,
        gt=0,
        description="a member's update is large above it; 0.1 (contrast) or 0.3 (paper) of the "
        "largest mean seen if not given",
    )
    scale: Literal["relative", "absolute"] = Field(
        default="relative",
        description="whether eps1 and eps2 are shares of the largest mean update seen",
    )
    gamma: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="gamma_max, the members' largest relative error, for the gate (paper); "
        "estimated from the cosines if not given",
    )
    contrast: float = Field(
        default=0.7,
        ge=0,
        description="a half of m members is coherent when its mean cosine inside exceeds that "
        "across by contrast / sqrt(m) (contrast)",
    )
    level: float = Field(
        default=1e-3,
        gt=0,
        le=1,
        description="largest chance, by a t test, of a coherent half (contrast)",
    )
    level_both: float = Field(
        default=1e-12,
        ge=0,
        le=1,
        description="largest chance, by a t test, of two halves that need no contrast (contrast)",
    )
    patience: int = Field(
        default=3, ge=1, le=1000, description="sound cuts running that must agree (contrast)"
    )
    min_half: int = Field(
        default=2, ge=2, le=MAX_PEERS, description="members of the smaller half (contrast)"
    )
    permute: bool = Field(
        default=False,
        description="peers permute their updates by a secret that the coordinator does not have",
    )

    @model_validator(mode="after")
    def _scaled(self) -> Self:
        if self.scale == "absolute" and (self.eps1 is None or self.eps2 is None):
            raise ValueError("scale = absolute needs both eps1 and eps2")
        return self


class DefencePlan(_Table):
    """What a peer, or a coordinator, does against models that were meant to harm.

    Lengths are in norms of one's own update of the round; at a coordinator, in the median norm of
    the updates that came from a cluster.
    """

    gate: bool = Field(
        default=False,
        description="take a model only if its loss on one's own held-out samples is at most "
        "gate_ratio times that of one's own model, plus gate_margin",
    )
    gate_samples: int = Field(
        default=60,
        ge=1,
        description="training samples that are held out for the gate, a quarter at most",
    )
    gate_ratio: float = Field(default=1.1, ge=0, description="see gate")
    gate_margin: float = Field(default=0.02, ge=0, description="see gate, in nats")
    clip: float | None = Field(
        default=None,
        gt=0,
        description="a model's difference from one's own, or at a coordinator from the cluster's, "
        "is shortened to so many lengths; as long as it is if not given",
    )
    rule: Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "centred-clipping"] = (
        Field(
            default="mean",
            description="what is made of one's own model and those taken, or at a coordinator of "
            "those that came from a cluster",
        )
    )
    byzantine: int = Field(
        default=1,
        ge=0,
        le=MAX_PEERS,
        description="f, how many of them may be attackers' (trimmed-mean, krum, multi-krum)",
    )
    radius: float = Field(
        default=1.0,
        gt=0,
        description="of centred-clipping, in lengths",
    )
    steps: int = Field(default=3, ge=1, le=1000, description="iterations of centred-clipping")

    @property
    def acts(self) -> bool:
        """Whether models are mixed in any other way than by their mean."""
        return self.gate or self.clip is not None or self.rule != "mean"

    @property
    def measures(self) -> bool:
        """Whether lengths of updates count."""
        return self.clip is not None or self.rule == "centred-clipping"

    @property
    def needs(self) -> int:
        """How many models the rule's guarantee asks for, with f attackers' among them.

        Krum: 2 f + 3 (Blanchard et al. 2017); the trimmed mean: 2 f + 1 (Yin et al. 2018).
        """
        match self.rule:
            case "krum" | "multi-krum":
                return 2 * self.byzantine + 3
            case "trimmed-mean":
                return 2 * self.byzantine + 1
        return 1


UNDEFENDED = DefencePlan()
"""No defence: models are mixed by their mean."""


class PrivacyPlan(_Table):
    """Local training by DP-SGD, in the paper's symbols (Abadi et al. 2016)."""

    noise: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="noise multiplier, sigma; without it training is not private",
    )
    clip: float = Field(
        default=1.0, gt=0, description="norm that each sample's gradient is clipped to, C"
    )
    delta: float = Field(
        default=1e-5, gt=0, lt=1, description="far below 1 / (a peer's training samples)"
    )
    epsilon: float = Field(
        default=8.0, gt=0, description="budget of each peer, at which it stops to train"
    )
    repeatable: bool = Field(
        default=False,
        description="noise and batches from the seed, for experiments: then nothing is private",
    )

    @property
    def acts(self) -> bool:
        """Whether training is by DP-SGD."""
        return self.noise is not None


class TrainingPlan(_Table):
    """Local training: momentum SGD, a fresh optimiser every round."""

    epochs: int = Field(default=2, ge=1, le=1000, description="local epochs, E")
    batch: int = Field(default=50, ge=1, description="batch size")
    lr: float = Field(default=0.05, gt=0, description="learning rate of round 1")
    lr_decay: float = Field(default=0.99, gt=0, le=1, description="factor a round")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty")
    statistics: Literal["average", "local"] = Field(
        default="average",
        description="running statistics (of BatchNorm): averaged with the neighbours' as weights "
        "are, or each peer's own",
    )


class NetworkPlan(_Table):
    """How models and evidence travel."""

    staleness: Annotated[int, Field(ge=0, le=1000)] | Literal["async"] = Field(
        default=0, description="0: lockstep; s: a snapshot at most s rounds old; async: the newest"
    )
    precision: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32", description="of models and exact evidence on the wire"
    )
    history: int = Field(default=4, ge=2, le=64, description="snapshots a peer keeps")
    request_timeout: float = Field(
        default=10.0, gt=0, le=600, description="seconds until an unanswered request is given up"
    )
    round_timeout: float = Field(
        default=600.0,
        gt=0,
        description="seconds after which even lockstep goes on without the late",
    )
    probe_interval: float = Field(
        default=1.0, gt=0, le=60, description="seconds between failure-detection probes"
    )
    probe_timeout: float = Field(
        default=0.5, gt=0, le=60, description="seconds until a probe counts as failed"
    )
    suspicion: float = Field(
        default=4.0,
        gt=0,
        le=600,
        description="seconds a suspect has to refute, times max(1, log10 n)",
    )
    linger: float = Field(
        default=60.0, ge=0, description="seconds a finished peer serves on for those that have not"
    )
    norm_limit: float = Field(
        default=1e6, gt=0, description="a received model of a larger Euclidean norm is dropped"
    )
    ban_score: float = Field(
        default=100.0,
        gt=0,
        description="points of offences from which a peer is left out of exchanges for a while",
    )


class Plan(_Table):
    """What a federation agrees on. Equal plans have equal digests; others are refused."""

    name: Name = Field(default="panmesh", description="name of the federation")
    n: int = Field(ge=2, le=MAX_PEERS, description="number of peers (indices 0 to n - 1)")
    min_peers: int | None = Field(
        default=None, ge=2, description="start when so many are present; all n if not given"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="of every random draw")
    rounds: int = Field(default=40, ge=1, le=1_000_000, description="T, rounds to run")
    method: Name = Field(default="panm-grad", description="how peers choose whom to learn with")
    model: Name = Field(
        default="mlp", description="a built-in model, or custom: every peer names its own factory"
    )
    model_digest: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{32}$", description="digest of the model's layout and w_0"
    )
    data: Name = Field(
        default="digits", description="a built-in data set, or own: every peer names its own"
    )
    classes: int | None = Field(
        default=None,
        ge=2,
        le=100_000,
        description="number of classes, where own data may lack some",
    )
    matching: MatchingPlan = MatchingPlan()
    partition: PartitionPlan = PartitionPlan()
    central: CentralPlan = CentralPlan()
    cfl: CflPlan = CflPlan()
    defence: DefencePlan = DefencePlan()
    training: TrainingPlan = TrainingPlan()
    privacy: PrivacyPlan = PrivacyPlan()
    network: NetworkPlan = NetworkPlan()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_peers is not None and self.min_peers > self.n:
            raise ValueError(f"min_peers = {self.min_peers} is more than n = {self.n}")
        if self.matching.t1 is not None and self.matching.t1 > self.rounds:
            raise ValueError(
                f"matching.t1 = {self.matching.t1} is more than rounds = {self.rounds}"
            )
        if self.defence.rule != "mean" and self.matching.weighting != "uniform":
            raise ValueError(
                f"defence.rule = {self.defence.rule} counts all models equally: "
                f"matching.weighting = {self.matching.weighting} goes with mean only"
            )
        return self

    @property
    def t1(self) -> int:
        """T1: rounds of stage 1; half of the rounds unless the plan says otherwise."""
        return self.matching.t1 or max(1, self.rounds // 2)

    @property
    def c(self) -> int:
        """Number of models that IFCA keeps: the partition's clusters unless the plan says."""
        return self.central.clusters or self.partition.clusters

    @property
    def permutes(self) -> bool:
        """Whether peers permute what they send to the coordinator."""
        return self.method == "cfl" and self.cfl.permute

    @property
    def quorum(self) -> int:
        """How many peers must be present before round 1."""
        return self.min_peers or self.n

    @property
    def lockstep(self) -> bool:
        """Whether every exchange of round t uses exactly the snapshots of round t."""
        return self.network.staleness == 0

    def held_out(self, samples: int) -> int:
        """How many of a peer's training samples are held out for the gate.

        [choice] A quarter of them at most, so that a peer with few samples still trains; of fewer
        than about 60 the gate's answer is mostly chance.
        """
        gated = self.defence.gate and self.method != "local"
        return min(self.defence.gate_samples, samples // 4) if gated else 0

    def cluster_of(self, index: int) -> int:
        """True cluster of a peer: index mod K, so that any first m peers are balanced [choice]."""
        return index % self.partition.clusters

    def sketch_buckets(self, trainable: int) -> int:
        """CountSketch length for a model of `trainable` values.

        [choice] min(4096, e // 16), at least 64: g's and h's sketch together then cost an eighth of
        a model or less, and hidden label swaps, whose clusters differ by little, are still seen.
        """
        return self.matching.sketch_buckets or max(64, min(4096, trainable // 16))

    @property
    def digest(self) -> str:
        """32 hex digits; equal iff the plans are."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    def to_toml(self) -> str:
        """Return the plan as TOML that `from_toml` reads back."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def from_toml(cls, text: str, *, source: str = "the plan") -> Self:
        """Parse a plan. Raises UserError that names the key and what is wrong with it."""
        try:
            table: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{source} is not valid TOML: {error}") from None
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            raise UserError(
                f"{source}: {describe(error)}", "docs/plans.md lists every key"
            ) from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan file. Raises UserError when it cannot be read or is not a plan."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot read the plan {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"cannot read the plan {path}: it is no text") from None
        return cls.from_toml(text, source=str(path))


def describe(error: ValidationError) -> str:
    """Return one line that names each wrong key and why, for people."""
    parts = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "plan"
        message = item["msg"].removeprefix("Value error, ")
        parts.append(
            "unknown key " + key if item["type"] == "extra_forbidden" else f"{key}: {message}"
        )
    return "; ".join(parts)
