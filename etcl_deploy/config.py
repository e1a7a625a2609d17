"""Settings of an experiment: frozen dataclasses, checked whenever one is made.

Every default stands here and nowhere else. A recipe says only where it differs.
Annotations are evaluated here, not postponed: the limit of a field is code, and stands in its type.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from etcl_deploy.errors import ConfigError


@dataclass(frozen=True)
class Limit:
    """Where a value must lie; `words` end the sentence "must be"."""

    holds: Callable[[Any], bool]
    words: str


AtLeastOne = Annotated[int, Limit(lambda v: v >= 1, "at least 1")]
AtLeastTwo = Annotated[int, Limit(lambda v: v >= 2, "at least 2")]
Seed = Annotated[int, Limit(lambda v: 0 <= v < 1 << 32, "0 up to 2**32")]
Positive = Annotated[float, Limit(lambda v: 0 < v < inf, "above 0")]
ZeroOrMore = Annotated[float, Limit(lambda v: 0 <= v < inf, "0 or more")]
BelowOne = Annotated[float, Limit(lambda v: 0 <= v < 1, "0 up to 1")]
ZeroToOne = Annotated[float, Limit(lambda v: 0 <= v <= 1, "0 to 1")]
Share = Annotated[float, Limit(lambda v: 0 < v <= 1, "above 0, at most 1")]


# The fields of `Learning` in which methods that are compared must be equal: the budget of each.
SHARED = (
    *("epochs", "batch_size", "validation_share", "patience", "keep", "rotation", "zoom", "shift", "precision"),
    "weights",
)


class ConfigSection:
    """Settings that belong together; a value of the wrong type or out of its limits is refused."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for name in (f.name for f in fields(self)):  # type: ignore[arg-type]
            object.__setattr__(self, name, _checked(name, getattr(self, name), hints[name]))


def _checked(key: str, value: Any, hint: Any) -> Any:
    """`value` if it is of the field's type (whole numbers do for fractions) and within its limits, else an error."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{key} must be one of {', '.join(get_args(hint))}, not {value!r}")
        return value
    allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    # The type itself: int of Annotated[int, ...], dict of dict[str, Any].
    types = [getattr(part, "__origin__", part) for part in allowed]
    if float in types and type(value) is int:
        value = float(value)
    if type(value) not in types:
        names = " or ".join("nothing" if t is type(None) else t.__name__ for t in types)
        raise ConfigError(f"{key} must be {names}, not {value!r}")
    limits = [limit for part in allowed for limit in getattr(part, "__metadata__", ())]
    for limit in limits if value is not None else ():
        if not limit.holds(value):
            raise ConfigError(f"{key} must be {limit.words}, not {value}")
    return value


@dataclass(frozen=True)
class Images(ConfigSection):
    """The size and scale every image is brought to before the network sees it."""

    size: Annotated[int, Limit(lambda v: 1 <= v <= 2048, "1 to 2048")] = 32  # height and width, in pixels
    channels: Annotated[int, Limit(lambda v: v in (1, 3), "1 or 3")] = 3  # 3 colour, 1 grey
    mean: Annotated[float, Limit(lambda v: -1000 <= v <= 1000, "-1000 to 1000")] = 0.5  # (x / 255 - mean) / std
    std: Annotated[float, Limit(lambda v: 0.001 <= v <= 1000, "0.001 to 1000")] = 0.5
    # held back for testing, per class, if the data has no test part
    test_share: Annotated[float, Limit(lambda v: 0 < v < 1, "between 0 and 1")] = 0.2


@dataclass(frozen=True)
class Network(ConfigSection):
    """The backbone all tasks share."""

    backbone: str = "resnet18"
    # hidden units (fcn3), or channels of the first convolution; None: as in the paper
    width: Annotated[int, Limit(lambda v: 1 <= v <= 65536, "1 to 65536")] | None = None
    density: Share = 0.5  # share of each layer's weights a task's mask selects


@dataclass(frozen=True)
class Similarity(ConfigSection):
    """Which earlier tasks count as similar to a new one."""

    similar: Literal["measured", "all", "none"] = "measured"  # or take all for similar, or none
    # What is compared: directions in which features vary (transport between the bases of centred features), normalized
    # by the rank of the features or not; the same without centring; entries of the bases (the paper to the letter);
    # entries of the features (the authors' code); mean features (the paper's ablation).
    distance: Literal[
        "normalized_transport", "centred_transport", "transport", "flat_bases", "flat_features", "euclidean"
    ] = "normalized_transport"
    # relative: the share of the original distance that learning removed; paper: Eq. SDM, normalized over earlier tasks.
    rule: Literal["relative", "paper"] = "relative"
    margin: ZeroToOne = 0.4  # how large the gap must be (delta of the paper, which the rule `paper` wants near 0)
    # An uncertain gap is enough if so many of its deviations (bootstrap over items) more would be; 0: not asked.
    doubt: ZeroOrMore = 2.0
    # Evidence by labels: an earlier task is similar only if its answers to the new items agree with their labels, at
    # least by this share of their agreement on its own items (Cohen's kappa); with other classes, only if a start from
    # it proves better (`probe_epochs`). 0: the gap alone decides (the paper).
    agreement: ZeroToOne = 0.7
    energy: Share = 0.99  # share of the squared norm of the features that the bases hold
    sample_share: Share = 0.05  # of a task's training items, to compare by; never more than 2,000 items
    sample_items: AtLeastTwo = 300  # but at least so many, if the task has them
    # Earlier tasks a new one is compared with; of more, the nearest ones in a network that never learned.
    candidates: AtLeastOne = 20


@dataclass(frozen=True)
class Transfer(ConfigSection):
    """How similar tasks help each other."""

    # Forwards. warm_start: begin with a similar task's mask, normalization and, for equal classes, head; once: one step
    # along the score gradients through both masks (the paper); every_step: a tenth of the negative score gradients
    # through the masks of all similar tasks, at every step (the authors' code; costs a pass for each).
    alignment: Literal["warm_start", "once", "every_step", "off"] = "warm_start"
    # The task to begin with or align to: the one whose answers to the new items agree most with their labels, the most
    # similar (the paper), or the latest similar one.
    model: Literal["proven", "most_similar", "latest"] = "proven"
    warm_rate: Share = 1.0  # share of the learning rate for a task that starts warm
    # A warm start is tried against a cold one for so many epochs, at most a tenth of all (below ten none); what has
    # learned more goes on. 0: no trial, and a warm start only from a task that is similar without one.
    probe_epochs: Annotated[int, Limit(lambda v: v >= 0, "0 or more")] = 2
    # Share of a label that is what similar tasks with equal classes say of the item, if very many are asked, in the
    # first epoch; less with fewer of them, and from epoch to epoch. 0: the label alone.
    advice: ZeroToOne = 0.5
    # Backwards. replay: when a task is learned, heads of similar tasks with equal classes learn from its items and from
    # draws from their own inputs, and what does harm is not kept; in_loop: they move at every step, by `pull` alone and
    # outside the space of their own data (the paper); off: no head of a finished task ever changes, and no new one is
    # drawn to them.
    backward: Literal["replay", "in_loop", "off"] = "replay"
    pull: ZeroOrMore = 1.0  # weight of `1 - cos(head, similar head)` in the loss of new heads (Eq. Lsim)
    head_epochs: AtLeastOne = 20  # replay: passes over the new task's features for an old head
    head_rate: Positive = 0.001  # replay: learning rate of old heads
    head_draws: Positive = 1.0  # replay: draws from an old head's own inputs for each new item
    head_energy: Share = 0.95  # in_loop: share of its data's squared norm that an old head's protected space holds


@dataclass(frozen=True)
class Baselines(ConfigSection):
    """Settings of the methods other than ETCL."""

    ewc_strength: ZeroOrMore = 100.0  # lambda of EWC: weight of its penalty
    ewc_items: AtLeastOne = 200  # items the importance of weights is estimated from
    gpm_energy: Share = 0.97  # share of a layer's input energy that GPM's protected space holds
    gpm_items: AtLeastTwo = 125  # items that space is taken from
    # s_max of HAT: how close to 0 or 1 its gates are at the end of an epoch
    hat_steepness: Annotated[float, Limit(lambda v: 1 <= v < inf, "at least 1")] = 400.0
    hat_rate: Positive = 30.0  # learning rate of its gates, as a multiple of the others'
    hat_thrift: ZeroOrMore = 0.75  # c of HAT: weight of the penalty on units no task has used yet


@dataclass(frozen=True)
class Learning(ConfigSection):
    """How one task is learned."""

    method: Literal["etcl", "wsn", "supsup", "piggyback", "hat", "gpm", "ewc", "naive", "one"] = "etcl"
    epochs: AtLeastOne = 20
    batch_size: AtLeastTwo = 32
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: Positive = 0.003
    schedule: Literal["cosine", "constant"] = "cosine"  # of the learning rate, over a task's epochs
    momentum: BelowOne = 0.9  # of sgd
    weight_decay: ZeroOrMore = 0.0  # of weights and heads; never of scores
    # The paper draws the scores once and carries them on; the authors' MNIST script draws them for each task.
    scores: Literal["carry", "fresh"] = "carry"
    validation_share: BelowOne = 0.1  # of a task's training items, held back to watch it and to check old heads by
    # stop after so many epochs without a better validation accuracy; 0: never
    patience: Annotated[int, Limit(lambda v: v >= 0, "0 or more")] = 0
    keep: Literal["last", "best"] = "last"  # the state after the last epoch, or after that with the best validation
    # turn each training image by up to so many degrees, anew in every epoch
    rotation: Annotated[float, Limit(lambda v: 0 <= v <= 180, "0 to 180 degrees")] = 0.0
    zoom: BelowOne = 0.0  # enlarge or shrink it by up to this share
    shift: BelowOne = 0.0  # move it by up to this share of its size
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast, for GPUs that have it
    seed: Seed = 0
    # A file to take the backbone's weights from, whatever the method; without one piggyback learns them with the first
    # task.
    weights: str | None = None
    similarity: Similarity = field(default_factory=Similarity)
    transfer: Transfer = field(default_factory=Transfer)
    others: Baselines = field(default_factory=Baselines)

    @property
    def augments(self) -> bool:
        """Whether training images are moved."""
        return any((self.rotation, self.zoom, self.shift))

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.patience or self.keep == "best") and not self.validation_share:
            raise ConfigError("patience and keep = best go by validation items: validation_share must be above 0")


@dataclass(frozen=True)
class Config(ConfigSection):
    """One experiment. `sequence` says where the tasks come from; `recipe` is the file it was read from.

    `preset` is the set of choices it was changed by (settings.py); the settings themselves stand in their fields.
    """

    recipe: str | None = None
    sequence: str | dict[str, Any] | None = None  # the tasks: see data/sequences.py
    tasks: AtLeastOne | None = None  # only the first so many
    # The state is written this often: a crash costs no more than that, but within a probe, which is done again.
    checkpoint_seconds: ZeroOrMore = 30.0
    memory_gb: ZeroOrMore = 4.0  # memory for images from files; if they need more, every epoch reads them from disk
    images: Images = field(default_factory=Images)
    network: Network = field(default_factory=Network)
    learning: Learning = field(default_factory=Learning)
    preset: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        method = self.learning.method
        if self.preset is not None and method != "etcl":
            raise ConfigError(f"the preset {self.preset!r} is for the method etcl, not {method}: leave out one of them")

    def as_json(self) -> dict[str, Any]:
        """The same as nested JSON objects; without a preset none is named."""
        values = asdict(self)
        if self.preset is None:
            del values["preset"]
        return values

    def budget(self) -> "Config":
        """The settings that methods must share to be compared: all but the tasks, and what each method may choose."""
        shared = {name: getattr(self.learning, name) for name in SHARED}
        return Config(images=self.images, network=replace(self.network, density=1.0), learning=Learning(**shared))

    def with_values(self, values: Mapping[str, Any]) -> "Config":
        """A copy with some fields changed, addressed by their bare names (`epochs`, `density`, ...)."""
        unknown = [key for key in values if key not in _names(self)]
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(_names(self))}")
        changed: Config = _changed(self, values)
        return changed


def _names(section: ConfigSection) -> list[str]:
    """The bare names of all fields, those of sections inside included."""
    names: list[str] = []
    for f in fields(section):  # type: ignore[arg-type]
        value = getattr(section, f.name)
        names += _names(value) if isinstance(value, ConfigSection) else [f.name]
    return names


def _changed(section: Any, values: Mapping[str, Any]) -> Any:
    changes = {}
    for f in fields(section):
        value = getattr(section, f.name)
        if isinstance(value, ConfigSection):
            changes[f.name] = _changed(value, values)
        elif f.name in values:
            changes[f.name] = values[f.name]
    return replace(section, **changes)
