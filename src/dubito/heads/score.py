"""The pretrained uncertainty head as a score, an aleatoric u(x) from the feature alone, and how several are trained.

    u(x) = softplus(MLP(z)) + 1e-6,   trained so that images with higher task losses get higher u

Kirchhof et al., Pretrained Visual Uncertainties (2024). Once trained, it needs no labels, no classes and no classifier,
and transfers to other data sets. Its values are an order, not probabilities: compare those of one head only.

`train` writes a folder that can be loaded or shared:

    heads/mine/
      seed-1/   model.safetensors, config.json, README.md: the finished head; state.safetensors: the training's state
      seed-2/
      training.json       the results of all seeds, and when they were finished
      .lock               held while a training writes here, as in each seed's folder; left over, it means nothing
"""

import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dubito.cache.disk import model_identity
from dubito.errors import ArtefactError, DubitoWarning, ModelError, TableError, ValueRangeError
from dubito.heads.checkpoint import DiskType, HeadConfig, PretrainedHead, read_head, write_head
from dubito.heads.distributed import Processes, follow
from dubito.heads.held_out import beside_softmax, split
from dubito.heads.joint import WithUncertainty
from dubito.heads.linear_probe import with_probe_losses
from dubito.heads.loop import STATE, Run
from dubito.heads.module import HeadModule
from dubito.heads.recipe import NEEDS, Recipe, as_recipe
from dubito.heads.shelf import TRAINING, entry_for, find_head
from dubito.heads.workers import joined, leading
from dubito.metrics import MedianSpread, RankedScore, median_spread
from dubito.models.load import as_classifier
from dubito.result import Axes, Result, axes, plain
from dubito.storage import Place, locked, parse_json, to_place, write_json
from dubito.table import Table, check_table
from dubito.types import Classifier, Json, Score
from dubito.validate import check_choice, check_seed

FIGURES = {"loss": "training loss", "r_auroc": "held-out R-AUROC", "order": "held-out order"}
"""What is measured during a training."""
_PURPOSES = {"r_auroc": ("R-AUROC", "bad neighbours"), "error_auroc": ("error AUROC", "wrong predictions")}
"""By metric of the comparison with softmax scores: its title, and what is to be found."""
_PROBED = "linear classifiers on its features, each fitted on half of the images and read on the other"
"""Whose losses a head for a backbone learns."""


@final
@dataclass
class UncertaintyHead(Score):
    """A small network on the model's feature that has learned which images are hard.

    Attributes:
        width: Width of the hidden layers.
        depth: Number of hidden layers.
        seed: Seed of the initial weights and of the order of rows.
        recipe: Settings of the training; by default the paper's.
        features_: Width of the features that it reads.
        weights_: (p), all its weights.
        trained_: How it was trained, as JSON.
    """

    width: int = 512
    depth: int = 2
    seed: int = 1
    recipe: Recipe = field(default_factory=Recipe)

    name = "head"
    kind = "aleatoric"
    needs = ("feature",)
    learns_from: tuple[str, ...] = field(default=("feature", "loss"), init=False, repr=False, compare=False)
    learned = ("features_", "weights_", "trained_")

    def __post_init__(self) -> None:
        check_seed(self.seed, by="head")
        self.recipe = as_recipe(self.recipe)
        self.learns_from = ("feature", *NEEDS[self.recipe.target])
        self._module: HeadModule | None = None

    def learn(self, table: Table) -> None:
        """Train on features and losses; `dubito.train` adds a progress bar, several seeds and a folder."""
        self.train(table)

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The network's output for the features."""
        return self(batch.feature)

    @torch.no_grad()
    def __call__(self, features: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
        """The uncertainty of features that the model computes: `head(model.features(x))`."""
        u: Tensor = self.module(features.float())
        return u

    @property
    def module(self) -> HeadModule:
        """The network."""
        self.check_fitted()
        if self._module is None:
            module = HeadModule(self.features_, width=self.width, depth=self.depth)
            count = sum(parameter.numel() for parameter in module.parameters())
            if self.weights_.shape != (count,):
                raise ArtefactError(
                    f"head: {self.features_} features, width {self.width} and depth {self.depth} make {count} weights; "
                    f"got {self.weights_.numel()}. Save the head again."
                )
            vector_to_parameters(self.weights_.float(), module.parameters())
            self._module = module.requires_grad_(False).eval()
        return self._module

    def train(
        self,
        table: Table,
        *,
        held_out: Table | None = None,
        folder: Place | None = None,
        progress: bool = False,
        processes: Processes | None = None,
    ) -> "Training":
        """Train on features and losses; called again with the same folder after a kill, it continues.

        Args:
            table: Has the column `feature` and those of the recipe's target, in memory or in a cache.
            held_out: Other images of the same model, on which the head is measured but not trained.
            folder: Where the state of the training is saved; None saves nothing.
            progress: Whether to show a progress bar on a terminal.
            processes: Those that share the training, of which this one leads; None trains in this one alone.
        """
        table.require("feature", by="head.fit")
        features, init = table.shape("feature")[1], self.recipe.init
        module = HeadModule(features, width=self.width, depth=self.depth, init=init, seed=self.seed)
        run = Run(table, self.recipe, module, self.seed, held_out, folder, processes)
        updates = run.go(progress=progress)
        self._put(module)
        self.trained_: Json = {
            "recipe": self.recipe.to_json(),
            "seed": self.seed,
            "table_rows": len(table),
            "rows_seen": run.stream.rows_until(run.step),
            "steps": run.step,
            "end": run.history[-1],
        }
        self.provenance_ = table.provenance
        return Training((self,), (run.history,), () if folder is None else (folder,), updates)

    def check_provenance(self, table: Table) -> None:
        """Raise TableError for a table of another model, with the part that differs: weights, layer or transform."""
        if table.provenance is None or not table.provenance.names_model:
            return
        if self.provenance_ is None or not self.provenance_.names_model:
            warnings.warn(
                f"head.score: the head does not record its model, so whether it fits {table.name}, made by "
                f"{table.provenance.model or 'a model without a name'}, cannot be checked.",
                DubitoWarning,
                stacklevel=3,
            )
        elif reason := self.provenance_.difference(table.provenance):
            raise TableError(
                f"head.score: {table.name} was made by another model than the head was trained on: {reason}. "
                f"Train a head on a table of this model, or extract with the model that the head belongs to."
            )

    def check_model(self, model: Classifier) -> None:
        """Raise ModelError if the model is not the one that the head was trained on, such as after fine-tuning."""
        reason = self.provenance_.difference(model_identity(model)) if self.provenance_ is not None else None
        if reason:
            raise ModelError(
                f"head: {model.name} is not the model that the head was trained on: {reason}. "
                f"Extract with {model.name} and train a head on that, or load the weights that the head belongs to."
            )

    def save_pretrained(self, to: str | Place, *, dtype: DiskType = "float32", **about: Any) -> Place:
        """Write model.safetensors, config.json and a model card into a folder.

        Args:
            to: The folder, or its address.
            dtype: Type of the weights on disk; float16 halves the size and keeps three digits.
            about: Further entries of the config: measured={...}, licence="...", trained={"corpus": "..."}.
        """
        return write_head(to, self.pretrained(dtype=dtype, **about))

    def push_to_hub(self, repo_id: str, *, dtype: DiskType = "float32", about: Json | None = None, **hub: Any) -> str:
        """Upload the same files to the Hugging Face hub; `hub` holds the options of its own push_to_hub."""
        from dubito.heads.hub import push_to_hub  # noqa: PLC0415 (the hub's client is slow to import)

        return push_to_hub(self.pretrained(dtype=dtype, **(about or {})), repo_id, **hub)

    @classmethod
    def from_pretrained(cls, name: str | Place, **hub: Any) -> "UncertaintyHead":
        """A head by name (`dubito list heads`), folder, authors' file, or id on the Hugging Face hub."""
        return cls.of(find_head(name, **hub))

    @classmethod
    def for_model(cls, model: Classifier | str, *, shipped_only: bool = False) -> "UncertaintyHead":
        """The head for exactly this model, one of your own or one that ships with dubito.

        Its backbone must have the same weights to the last bit. Of several heads your own come first, of those the
        training that ended last (its median seed) where that was recorded, then the first by name.

        Args:
            model: A model from dubito.load or dubito.wrap, or a name, which is loaded.
            shipped_only: Whether to ignore your own heads, so that the result is the same on every machine.
        """
        model = as_classifier(model, by="head")
        entry = entry_for(model_identity(model), shipped_only=shipped_only)
        if entry is None:
            raise ModelError(
                f"head: no head for {model.name} among "
                f"{'those that ship' if shipped_only else '`dubito list heads`'}. Extract images and train one: "
                f"dubito.train(table), or `dubito train`."
            )
        return cls.of(read_head(entry.path))

    @classmethod
    def from_joint(
        cls, model: WithUncertainty, classifier: Classifier, example: Tensor | None = None
    ) -> "UncertaintyHead":
        """The head of a model that was trained together with it, once the training is over (`with_uncertainty`).

        Args:
            model: The module that `with_uncertainty` returned.
            classifier: `dubito.wrap` of the trained module, as it will be used: the head fits it alone.
            example: A batch of inputs, to check that both read the same features; by default noise.
        """
        return cls.of(model.pretrained(classifier, example))

    @classmethod
    def of(cls, head: PretrainedHead) -> "UncertaintyHead":
        """The score around a pretrained head."""
        config = head.config
        try:
            recipe, seed = as_recipe(config.trained.get("recipe", Recipe())), int(config.trained.get("seed", 1))
        except (OverflowError, TypeError, ValueError, ValueRangeError) as error:
            raise ArtefactError(
                f"head: the entry 'trained' of its config.json cannot be used ({error}). Save the head again."
            ) from error
        score = cls(width=config.width, depth=config.depth, seed=seed, recipe=recipe)
        score._put(head.module)
        score.trained_, score.provenance_ = dict(config.trained), config.provenance
        return score

    def pretrained(self, *, dtype: DiskType = "float32", **about: Any) -> PretrainedHead:
        """The network with its config, as it is saved and uploaded."""
        config = HeadConfig.of(
            self.module,
            model=self.provenance_.model if self.provenance_ else None,
            provenance=self.provenance_,
            dtype=dtype,
            trained=self.trained_ | about.pop("trained", {}),
            **about,
        )
        return PretrainedHead(self.module, config)

    def _put(self, module: HeadModule) -> None:
        self._module = None
        self.features_ = module.features
        self.weights_ = parameters_to_vector(module.parameters()).detach().clone()


@final
@dataclass(frozen=True)
class Training(Result):
    """One trained head per seed; `plot` draws their learning curves.

    Attributes:
        heads: One head per seed, in the order of the seeds.
        histories: The measurements of each, from first to last.
        folders: Where each is saved; empty without a folder.
        updates: Number of updates that this call made: 0 if all heads were trained before.
        beside: By metric and score, the median head beside max_probability and entropy, on the same held-out images;
            empty without held-out images that have labels and logits.
        losses: Whose losses were learned, if they are not the model's own.
    """

    heads: tuple[UncertaintyHead, ...]
    histories: tuple[list[Json], ...]
    folders: tuple[Place, ...] = ()
    updates: int = 0
    beside: dict[str, dict[str, RankedScore]] = field(default_factory=dict)
    losses: str = ""

    titles = FIGURES

    @property
    def head(self) -> UncertaintyHead:
        """The head with the median held-out R-AUROC (of an even number, the better of the middle two).

        Without held-out images, it is the first one. It is not the best one: how good that is, only yet another set of
        images could show.
        """
        key = next((name for name in ("r_auroc", "order") if name in self.histories[0][-1]), None)
        if key is None:
            return self.heads[0]
        order = sorted(range(len(self.heads)), key=lambda number: float(self.histories[number][-1][key]))
        return self.heads[order[len(order) // 2]]

    def summary(self) -> dict[str, MedianSpread]:
        """By figure: the median over seeds, and its distance to the farther of minimum and maximum (section 4.1)."""
        last = [history[-1] for history in self.histories]
        return {name: median_spread([one[name] for one in last]) for name in FIGURES if name in last[0]}

    def title(self) -> str:
        """How many heads there are."""
        return f"{len(self.heads)} head{'s' if len(self.heads) > 1 else ''}"

    def facts(self) -> dict[str, str]:
        """The summary, with distances if there are several seeds."""
        several = len(self.heads) > 1
        return {
            FIGURES[name]: f"{median:.4f}" + (f" ± {distance:.4f}" if several else "")
            for name, (median, distance) in self.summary().items()
        }

    def records(self) -> list[dict[str, Any]]:
        """One row per seed: the figures at the end of its training."""
        return [
            {"seed": head.seed, **{name: history[-1][name] for name in ("step", *FIGURES) if name in history[-1]}}
            for head, history in zip(self.heads, self.histories, strict=True)
        ]

    def findings(self) -> list[str]:
        """Whether the head is better than scores that need no training, on held-out images."""
        if self.losses:
            return [f"The model has no logits: the head has learned the losses of {self.losses}."]
        if not any(name in self.histories[0][-1] for name in ("r_auroc", "order")):
            return [
                "No images were held out, so whether the head is better than max_probability or entropy, which need no "
                "training, is not known. Hold a tenth of the images out to see it."
            ]
        return [self._finding(metric, ranked) for metric, ranked in self.beside.items()]

    def _finding(self, metric: str, ranked: dict[str, RankedScore]) -> str:
        """One metric, and the advice that follows from it."""
        (title, purpose), (best, *others) = _PURPOSES[metric], ranked
        values = ", ".join(
            f"{name} {one.value.value:.3f} [{one.value.low:.3f}, {one.value.high:.3f}]" for name, one in ranked.items()
        )
        if ranked[UncertaintyHead.name].gap_to_best.surely:
            advice = f"The head is worse: to find {purpose}, use {best} instead."
        elif best == UncertaintyHead.name and all(ranked[name].gap_to_best.surely for name in others):
            advice = f"The head is better than both at finding {purpose}."
        else:
            rival = next(
                name for name in ranked if name != UncertaintyHead.name and not ranked[name].gap_to_best.surely
            )
            advice = f"On so few images, the head cannot be distinguished from {rival} at finding {purpose}."
        return f"Held-out {title}: {values}. {advice}"

    def to_dict(self) -> Json:
        """Seeds, folders, the summary, the comparison and all measurements; not the heads themselves."""
        seeds = {"seeds": [head.seed for head in self.heads], "median_seed": self.head.seed}
        measured = {"summary": self.summary(), "beside": self.beside, "histories": self.histories}
        values: Json = plain({**seeds, "folders": self.folders, **measured})
        return values

    def plot(self, ax: Axes | None = None, *, figure: str | None = None) -> Axes:
        """Learning curves of all seeds.

        Args:
            ax: Axes to draw on; None makes new ones.
            figure: "r_auroc", "order" or "loss"; None is the first of them that was measured.
        """
        measured = [name for name in ("r_auroc", "order", "loss") if name in self.histories[0][-1]]
        figure = figure or measured[0]
        check_choice(figure, measured, by="Training.plot", what="figure")
        ax = axes(ax)
        for head, history in zip(self.heads, self.histories, strict=True):
            ax.plot([one["step"] for one in history], [one[figure] for one in history], label=f"seed {head.seed}")
        ax.set(xlabel="step", ylabel=FIGURES[figure])
        if len(self.heads) > 1:
            ax.legend()
        return ax


def train(  # noqa: PLR0913 (one call that users type; everything after `to` is optional)
    table: Table,
    to: str | Place | None = None,
    *,
    seeds: Sequence[int] = (1,),
    recipe: Recipe | None = None,
    width: int = 512,
    depth: int = 2,
    held_out: Table | float | None = None,
    processes: int | None = None,
    progress: bool = True,
    trained: Json | None = None,
    measured: Json | None = None,
    licence: str | None = None,
    dtype: DiskType = "float32",
) -> Training:
    """Train one head per seed on a table's features and losses; called again after a kill, it continues.

    A backbone that does not classify has no losses: where there are labels, the head learns those of linear classifiers
    on its features, each fitted on half of the images and read on the other.

    Args:
        table: A table from `dubito.extract`, ideally of several augmented epochs, or from arrays; join several with
            `dubito.concat`.
        to: Folder of the heads and their states, or its address; None saves nothing.
        seeds: One head is trained for each; the paper uses 1 to 5.
        recipe: Settings of the training; by default the paper's, scaled to the table.
        width: Width of the hidden layers.
        depth: Number of hidden layers.
        held_out: Another table on which R-AUROC is measured, or a share of the table's images, such as 0.1.
        processes: How many processes of this machine share the training and its threads (`heads.distributed`). On
            several machines, run the same script under torchrun: by default, all processes that it has started train
            together, and otherwise this one alone.
        progress: Whether to show a progress bar on a terminal.
        trained: Facts about the training for the heads' config, such as {"corpus": "my images"}.
        measured: Figures by name for the heads' config.
        licence: Licence for the heads' config, such as "Apache-2.0".
        dtype: Type of the weights on disk.
    """
    check_table(table, by="train")
    seeds = list(seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueRangeError(
            f"train: seeds must be at least one whole number, all different; got {seeds}. Pass seeds=[1, 2, 3]."
        )
    if isinstance(held_out, int | float):
        table, held_out = split(table, float(held_out))
    about: Json = {"trained": trained or {}, "measured": measured or {}, "licence": licence, "dtype": dtype}
    table.require("feature", by="head.fit")
    group = joined(processes)
    if group is not None and group.rank:
        training: Training = follow(group, table.column("feature"), table.name)
        return training
    heads = [UncertaintyHead(width, depth, seed, recipe or Recipe()) for seed in seeds]
    place = None if to is None else to_place(to)
    with leading(processes, group, table) as together, nullcontext() if place is None else locked(place):
        training = _trained(heads, table, place, held_out, together, progress, about)
        if held_out is not None:
            training = replace(training, beside=beside_softmax(training.head, held_out))
        if place is not None:
            _write_report(place, training)
        if together is not None:
            together.finish(training)
    return training


def _trained(
    heads: Sequence[UncertaintyHead],
    table: Table,
    to: Place | None,
    held_out: Table | None,
    processes: Processes | None,
    progress: bool,
    about: Json,
) -> Training:
    """All heads, trained one after the other, and saved if there is a folder."""
    probed = "logit" not in table and "loss" not in table and "label" in table
    if probed:
        table, about = with_probe_losses(table), {**about, "trained": {"losses": _PROBED, **about["trained"]}}
    done = []
    for head in heads:
        folder = None if to is None else to / f"seed-{head.seed}"
        done.append(head.train(table, held_out=held_out, folder=folder, progress=progress, processes=processes))
        if folder is not None:
            head.save_pretrained(folder, **about)
    return Training(
        tuple(heads),
        tuple(one.histories[0] for one in done),
        tuple(folder for one in done for folder in one.folders),
        sum(one.updates for one in done),
        losses=_PROBED if probed else "",
    )


def _write_report(to: Place, training: Training) -> None:
    """Write training.json; its time `finished` changes if and only if this call trained a seed."""
    try:
        before = parse_json((to / TRAINING).read_bytes())
    except (OSError, ValueError):
        before = None
    finished = before.get("finished") if isinstance(before, dict) and not training.updates else None
    report = training.to_dict()
    report["folders"] = [folder.name for folder in training.folders]
    # A seed's state is written with its last step and never again.
    states = [folder / STATE for folder in training.folders]
    last = max(state.stat().st_mtime if isinstance(state, Path) else time.time() for state in states)
    report["finished"] = finished or datetime.fromtimestamp(last, timezone.utc).isoformat(timespec="seconds")
    if report != before:
        write_json(to / TRAINING, report)
