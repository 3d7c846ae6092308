"""The pretrained uncertainty head as a score: an aleatoric u(x) from the feature alone.

    u(x) = softplus(MLP(z)) + 1e-6,   trained so that images with higher task losses get higher u

Kirchhof et al., Pretrained Visual Uncertainties (2024). The network is in `heads.module`, its losses in `heads.losses`,
the training in `heads.loop`. Once trained, it needs no labels, no classes and no classifier, and transfers to other
data sets. Its values are an order, not probabilities: compare those of one head only.
"""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dubito.cache.manifest import model_identity
from dubito.errors import ArtefactError, DubitoWarning, ModelError, TableError, ValueRangeError
from dubito.heads.checkpoint import DiskType, HeadConfig, PretrainedHead, read_head, write_head
from dubito.heads.joint import WithUncertainty
from dubito.heads.loop import Trained, train_head
from dubito.heads.module import HeadModule
from dubito.heads.recipe import Recipe, as_recipe
from dubito.heads.shelf import entry_for, find_head
from dubito.heads.targets import NEEDS
from dubito.table import Table
from dubito.types import Classifier, Json, Score


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
        self.check_fitted()
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

    def train(self, table: Table, **options: Any) -> Trained:
        """Train with the options `held_out`, `folder` and `progress` of `train_head`; returns its result."""
        size: Any = {"width": self.width, "depth": self.depth, "seed": self.seed}
        trained = train_head(table, recipe=self.recipe, **size, **options)
        self._put(trained.module)
        self.trained_: Json = {
            "recipe": self.recipe.to_json(),
            "seed": self.seed,
            "table_rows": len(table),
            "rows_seen": trained.rows,
            "steps": trained.steps,
            "end": trained.history[-1],
        }
        self.provenance_ = table.provenance
        return trained

    def check_provenance(self, table: Table) -> None:
        """Raise TableError for a table of another model, with the part that differs: weights, layer or transform."""
        if self.provenance_ is None and table.provenance is not None:
            warnings.warn(
                f"head.score: the head does not record its model, so whether it fits {table.name}, made by "
                f"{table.provenance.model or 'a model without a name'}, cannot be checked.",
                DubitoWarning,
                stacklevel=3,
            )
        if self.provenance_ is None or table.provenance is None:
            super().check_provenance(table)
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

    def save_pretrained(self, to: str | Path, *, dtype: DiskType = "float32", **about: Any) -> Path:
        """Write model.safetensors, config.json and a model card into a folder.

        Args:
            to: The folder.
            dtype: Type of the weights on disk; float16 halves the size and keeps three digits.
            about: Further entries of the config: measured={...}, licence="...", trained={"corpus": "..."}.
        """
        return write_head(to, self.pretrained(dtype=dtype, **about))

    def push_to_hub(self, repo_id: str, *, dtype: DiskType = "float32", about: Json | None = None, **hub: Any) -> str:
        """Upload the same files to the Hugging Face hub; `hub` holds the options of its own push_to_hub."""
        from dubito.heads.hub import push_to_hub  # noqa: PLC0415 (the hub's client is slow to import)

        return push_to_hub(self.pretrained(dtype=dtype, **(about or {})), repo_id, **hub)

    @classmethod
    def from_pretrained(cls, name: str | Path, **hub: Any) -> "UncertaintyHead":
        """A head by name (`dubito list heads`), folder, authors' file, or id on the Hugging Face hub."""
        return cls.of(find_head(name, **hub))

    @classmethod
    def for_model(cls, model: Classifier, *, shipped_only: bool = False) -> "UncertaintyHead":
        """The head for exactly this model, one of your own or one that ships with dubito.

        Its backbone must have the same weights to the last bit. Of several heads your own come first, of those the
        training that ended last (its median seed) where that was recorded, then the first by name.

        Args:
            model: A model from dubito.load or dubito.wrap.
            shipped_only: Whether to ignore your own heads, so that the result is the same on every machine.
        """
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
