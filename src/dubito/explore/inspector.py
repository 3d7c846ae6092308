"""One image in detail: what the model predicts, how uncertain it is and why, and which images are like it.

Neighbours are the images with the largest cosine of features, found by reading all of them in blocks. Tiles and
corruptions need the model and the picture: the model is loaded when it is first needed, and must be the one that made
the table. A new image is predicted, judged and placed like those of the table.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from dubito.cache.disk import model_identity
from dubito.cache.runner import predict_table
from dubito.data import CORRUPTIONS, corrupt, open_images
from dubito.data.decode import decode
from dubito.data.thumbnails import read_pixels
from dubito.errors import BrokenImageError, ModelError
from dubito.explore.collection import GUARD, Collection
from dubito.explore.layout import Layouts
from dubito.explore.notes import Notes
from dubito.guard.verdict import Verdict, class_name, top_two
from dubito.metrics.information import entropy_of
from dubito.models import Preprocess
from dubito.probes import Tiles
from dubito.probes.registry import probes_for
from dubito.report.trust import ABSTAIN, ACCEPT, TrustVerdict, read_probabilities
from dubito.scores import Entropy
from dubito.table import Table
from dubito.threads import Lock
from dubito.types import Classifier, Json, Score

_TOP, _NEIGHBOURS = 5, 8
_RANKED = 200_000
"""Up to so many images, scores of all of them are computed to rank one."""
_SEVERITIES = range(6)


@final
class Inspector:
    """Details of images of a collection, and of new ones.

    Args:
        collection: The images.
        layouts: Where they lie.
        notes: What people noted about them.
        model: The model that made the table, or what loads it; None without one.
    """

    def __init__(
        self,
        collection: Collection,
        layouts: Layouts,
        notes: Notes,
        model: Classifier | Callable[[], Classifier] | None = None,
    ) -> None:
        self.collection, self.layouts, self.notes = collection, layouts, notes
        guard = collection.guard
        self._model = model or (guard.model if guard is not None else None)
        self._lock = Lock()

    @property
    def has_model(self) -> bool:
        """Whether there is a model to run."""
        return self._model is not None

    def rows(self, rows: Sequence[int]) -> list[Json]:
        """What a card of each image shows."""
        return [self._summary(row) for row in rows]

    def image(self, row: int) -> Json:
        """Everything about one image of the collection."""
        table = self.collection.row_table(row)
        return {
            **self._summary(row),
            **self._details(table, row),
            "unavailable": {
                "tiles": self._why_no_pass(row),
                "corruption": self._why_no_pass(row),
                "neighbours": None if "feature" in table else "There are no features to compare images by.",
            },
        }

    def new(self, data: bytes, name: str) -> Json:
        """Everything about an image that is not in the collection."""
        model = self._ready_model()
        opened = open_images([decode(data, name)])
        guard = self.collection.guard
        needs = () if guard is None else guard.needs
        provenance = self.collection.table.provenance
        table = predict_table(model, opened, probes_for(needs, provenance, by="explore"), provenance=provenance)
        predicted = self._predicted(table)
        unavailable = dict.fromkeys(("tiles", "corruption"), "Only for images of the table.")
        return {
            "row": None,
            "id": name,
            "set": "new image",
            "label": None,
            "label_name": None,
            "note": None,
            **predicted,
            **self._details(table, None),
            "positions": self.layouts.place(table.feature) if "feature" in self.collection.table else {},
            "unavailable": {**unavailable, "neighbours": None},
        }

    def picture(self, row: int) -> Image.Image:
        """The image itself; BrokenImageError where it is not at hand."""
        name, pictures = self.collection.ids([row])[0], self.collection.pictures
        if pictures.images is None:
            raise BrokenImageError(f"image '{name}': the explorer was opened without images. Open it with them.")
        if (place := pictures.place(name)) is None:
            raise BrokenImageError(
                f"image '{name}' is not in {pictures.images.name}. It may have been moved or renamed: open the "
                f"explorer with the folder that it is in."
            )
        return read_pixels(pictures.images, place, by="explore")

    def tiles(self, row: int) -> Json:
        """The entropy of what the model would predict from each tile of the image alone."""
        model, picture = self._ready_model(), self.picture(row)
        table = predict_table(model, open_images([picture]), [Tiles(keep="logits", dtype="float32")])
        finest = max(int(name.split("_")[1]) for name in table.columns if name.endswith("_logit"))
        logits = table.whole(f"tiles_{finest}_logit")[0]
        u = entropy_of(logits.double().softmax(-1)).view(finest, finest)
        return {
            "grid": [finest, finest],
            "values": u.tolist(),
            "low": 0.0,
            "high": math.log(logits.shape[-1]),
            "box": _covered(model.transform, picture.size),
            "about": f"Entropy of the prediction from each of {finest} x {finest} tiles alone, in nats.",
        }

    def corruption(self, row: int) -> Json:
        """The score of the image as it is blurred, covered, zoomed into and made noisy."""
        model, picture = self._ready_model(), self.picture(row)
        score = self._plain_score()
        levels = [(kind, severity) for kind in CORRUPTIONS for severity in _SEVERITIES if severity]
        corrupted = [picture, *(corrupt(picture, kind, severity) for kind, severity in levels)]
        table = predict_table(model, open_images(corrupted), provenance=self.collection.table.provenance)
        u, (probability, predicted) = score.score(table).tolist(), top_two(table.logit)
        curves = []
        for kind in CORRUPTIONS:
            places = [0, *(1 + place for place, level in enumerate(levels) if level[0] == kind)]
            curves.append(
                {
                    "kind": kind,
                    "u": [u[place] for place in places],
                    "predicted_name": [class_name(table.classes, int(predicted[place, 0])) for place in places],
                    "probability": [float(probability[place, 0]) for place in places],
                }
            )
        title = score.name.replace("_", " ")
        return {"severities": list(_SEVERITIES), "curves": curves, "score": score.name, "title": title}

    def _summary(self, row: int) -> Json:
        name, _, _ = self.collection.locate(row)
        table = self.collection.row_table(row)
        image = table.row_ids()[0] if "id" in table else self.collection.ids([row])[0]
        own = "label" in table and row < self.collection.rows
        label = int(table.label[0]) if own else None
        names = table.label_names
        known = label is not None and names is not None and 0 <= label < len(names)
        return {
            "row": row,
            "id": image.encode(errors="replace").decode(),
            "set": name,
            "label": label,
            "label_name": names[label] if known and names is not None and label is not None else label,
            "picture": self.collection.pictures.place(image) is not None,
            "note": self.notes.of(image),
            **self._predicted(table),
        }

    def _predicted(self, table: Table) -> Json:
        if "logit" not in table:
            return {"predicted": None, "predicted_name": None, "probability": None}
        probability, predicted = top_two(table.logit)
        name = class_name(table.classes, int(predicted[0, 0]))
        return {"predicted": int(predicted[0, 0]), "predicted_name": name, "probability": float(probability[0, 0])}

    def _details(self, table: Table, row: int | None) -> Json:
        scores = self._scores(table, row)
        verdict = None if self.collection.guard is None else self.collection.guard.decide(table)[0]
        return {
            "top": self._top(table),
            "scores": scores,
            "verdict": self._verdict(table, verdict, scores),
            "prediction_set": None
            if verdict is None or verdict.prediction_set is None
            else [class_name(table.classes, one) for one in verdict.prediction_set],
            "neighbours": self._neighbours(table.feature, row) if "feature" in table else [],
        }

    def _top(self, table: Table) -> list[Json]:
        if "logit" not in table:
            return []
        probability, classes = table.logit[0].double().softmax(-1).sort(descending=True, stable=True)
        return [
            {"index": index, "name": class_name(table.classes, index), "probability": p}
            for p, index in zip(probability[:_TOP].tolist(), classes[:_TOP].tolist(), strict=True)
        ]

    def _scores(self, table: Table, row: int | None) -> list[Json]:
        """Every score of the image with its rank; one that the image lacks a column for is left out."""
        ranked = len(self.collection) <= _RANKED
        own = row is not None and row < self.collection.rows
        shown = []
        for column in self.collection.columns.values():
            if column.kind != "score":
                continue
            value = self._value(column.name, table, row)
            if value is not None and not math.isnan(value):
                rank = self.collection.rank(column.name, value, among_them=own) if ranked else None
                finite = value if math.isfinite(value) else None
                shown.append({"name": column.name, "title": column.title, "value": finite, "rank": rank})
        return shown

    def _value(self, name: str, table: Table, row: int | None) -> float | None:
        """A score of one image; None where it cannot be computed."""
        score = self.collection.scores.get(name)
        if row is not None and (score is None or len(self.collection) <= _RANKED):
            return float(self.collection.values(name)[row])
        if name == GUARD and self.collection.guard is not None:
            return float(self.collection.guard.decide(table).compared[0])
        if score is None or any(column not in table for column in score.columns_in(table)):
            return None
        return float(score.score(table)[0])

    def _verdict(self, table: Table, verdict: Verdict | None, scores: Sequence[Mapping[str, Any]]) -> Json | None:
        if verdict is not None:
            reading = TrustVerdict(ACCEPT if verdict.accept else ABSTAIN, verdict.reason, verdict.rank)
        elif "logit" in table and table.shape("logit")[1] > 1 and scores:
            probability, predicted = (values[0].tolist() for values in top_two(table.logit))
            rank = next((one["rank"] for one in scores if one["name"] == self.collection.first_score), None) or 0.0
            reading = read_probabilities(probability, predicted, table.classes, rank=rank)
        else:
            return None
        return {"verdict": reading.verdict, "reason": reading.reason, "tone": reading.tone}

    def _neighbours(self, feature: Float[Tensor, "1 d"], row: int | None) -> list[Json]:
        """The most similar images, without the image itself."""
        query = torch.nn.functional.normalize(feature.float(), dim=-1)[0]
        best = torch.full((_NEIGHBOURS,), -math.inf), torch.full((_NEIGHBOURS,), -1)
        for start, batch in self.collection.blocks("feature"):
            cosine = torch.nn.functional.normalize(batch.feature.float(), dim=-1) @ query
            if row is not None and start <= row < start + len(batch):
                cosine[row - start] = -math.inf
            values = torch.cat([best[0], cosine]).topk(_NEIGHBOURS)
            rows = torch.cat([best[1], torch.arange(start, start + len(batch))])
            best = values.values, rows[values.indices]
        nearest = [(one, similar) for one, similar in zip(best[1].tolist(), best[0].tolist(), strict=True) if one >= 0]
        return [self._neighbour(one, similar) for one, similar in nearest if math.isfinite(similar)]

    def _neighbour(self, row: int, similarity: float) -> Json:
        shown, first = self._summary(row), self.collection.first_score
        known = first is not None and len(self.collection) <= _RANKED
        u = float(self.collection.values(first)[row]) if known and first is not None else math.nan
        rank = None
        if first is not None and not math.isnan(u):
            rank = self.collection.rank(first, u, among_them=row < self.collection.rows)
        correct = int(self.collection.values("correct")[row]) if "correct" in self.collection.columns else -1
        keys = ("row", "id", "set", "label_name", "predicted_name", "picture")
        right = {-1: None, 0: False, 1: True}[correct]
        return {**{key: shown[key] for key in keys}, "correct": right, "similarity": similarity, "rank": rank}

    def _plain_score(self) -> Score:
        """The first score, if features and logits suffice for it; else entropy."""
        first = self.collection.scores.get(self.collection.first_score or "")
        plain = first is not None and set(first.columns_in(self.collection.table)) <= {"feature", "logit"}
        return first if plain and first is not None else Entropy()

    def _why_no_pass(self, row: int) -> str | None:
        """Why the model cannot be run on an image; None where it can."""
        if self._model is None:
            return "This needs the model: open the explorer with it."
        if "logit" not in self.collection.table:
            return "This needs a model that classifies."
        name = self.collection.ids([row])[0]
        return None if self.collection.pictures.place(name) is not None else "This needs the picture."

    def _ready_model(self) -> Classifier:
        """The model, loaded when it is first needed; ModelError if it is not the one that made the table."""
        if self._model is None:
            raise ModelError("explore: this needs the model. Open the explorer with it.")
        with self._lock:
            if not isinstance(self._model, Classifier):
                self._model = self._checked(self._model())
            return self._model

    def _checked(self, model: Classifier) -> Classifier:
        provenance = self.collection.table.provenance
        if provenance and provenance.names_model and (reason := provenance.difference(model_identity(model))):
            raise ModelError(
                f"explore: {model.name} is not the model that made {self.collection.table.name}: {reason}. Open the "
                f"explorer with that model."
            )
        return model


def _covered(transform: Any, size: tuple[int, int]) -> list[float]:
    """The part of a picture that a centre crop keeps, as left, top, right and bottom in shares of its sides."""
    if not isinstance(transform, Preprocess) or not isinstance(transform.resize, int):
        return [0.0, 0.0, 1.0, 1.0]
    scale = transform.resize / min(size)
    sides = [min(1.0, crop / (side * scale)) for crop, side in zip(reversed(transform.size), size, strict=True)]
    (left, right), (top, bottom) = (((1 - share) / 2, (1 + share) / 2) for share in sides)
    return [left, top, right, bottom]
