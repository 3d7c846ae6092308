"""The demo's page: its pictures as cards, and the means by deterioration above them."""

from pathlib import Path

from dubito.report.demo_job import CLEAN, SCORES, SEVERITIES, Demo, Group, Picture
from dubito.report.page import Card, Cell, Summary, write_page

_ABOUT = {
    "entropy": "How spread out the predicted probabilities are, in nats: 0 is all on one class, 6.9 even over 1000.",
    "max_probability": "Minus the probability of the predicted class.",
    "margin": "Minus the gap between the two most probable classes: near zero, a second class comes close.",
    "energy": "Minus the log-sum-exp of the logits: high when no class gets a large logit.",
    "head": "A small network on the model's features that has learned which photographs are hard, without classes.",
}


def write_demo_page(demo: Demo, path: str | Path) -> Path:
    """Write the page of a demo and return its path."""
    photos = len({picture.photo for picture in demo.pictures})
    kinds = [group.kind for group in demo.groups]
    cards = sorted(demo.pictures, key=lambda picture: kinds.index(picture.kind))  # the order of the filter's kinds
    return write_page(
        path,
        f"How sure is {demo.model.rpartition(':')[2]}, picture by picture?",
        [_card(picture, demo.folder / "pictures") for picture in cards],
        lead=f"{photos} real photographs and their blurred, boxed, zoomed and noisy copies, as an ImageNet model sees "
        f"them. The most uncertain come first, judged by {SCORES[0]}. Some photographs show nothing that ImageNet "
        f"knows: there every answer is wrong.",
        facts=(f"model {demo.model}", f"{len(demo.pictures)} pictures", "no true labels used"),
        about={name: _ABOUT[name] for name in demo.pictures[0].scores},
        summary=_summary(demo),
    )


def _card(picture: Picture, folder: Path) -> Card:
    return Card(
        image=folder / picture.id,
        title=picture.answer,
        detail=f"{picture.probability:.0%}",
        caption=f"{picture.photo}, {picture.made_worse}",
        group=picture.kind,
        scores=picture.scores,
        mark="" if picture.kept else "answer changed",
    )


def _summary(demo: Demo) -> Summary:
    clean, *worse = demo.groups
    means = [group.uncertainty for group in demo.groups]
    low, high = min(means), max(means)

    def cell(group: Group) -> Cell:
        share = (group.uncertainty - low) / (high - low) if high > low else 0.0
        kept = "" if group is clean else f"{group.kept}/{group.pictures} kept"
        return Cell(f"{group.uncertainty:.2f}", kept, share)

    return Summary(
        title=f"Mean {SCORES[0]} as pictures get worse, and how many answers stay those of the clean photographs",
        header=("", CLEAN, *(f"severity {severity}" for severity in SEVERITIES)),
        rows={
            kind: [cell(group) for group in (clean, *worse) if group.kind in (CLEAN, kind)]
            for kind in dict.fromkeys(group.kind for group in worse)
        },
        remarks=demo.findings(),
    )
