"""`dubito imagenet-variants`: the same table as the library, as text, JSON and CSV."""

from pathlib import Path

import dubito

from .conftest import MODEL, Run, write_images


def test_table_json_and_csv(run: Run, weights: Path, tmp_path: Path) -> None:
    """Two classes of ImageNet-A, stingray and black widow, and two of ImageNet-V2."""
    for place in ("a/n01498041", "a/n01774750", "v2/0", "v2/17"):
        write_images(tmp_path / place, 3, seed=len(place))
    folders = {"imagenet-a": tmp_path / "a", "imagenet-v2": tmp_path / "v2"}
    roots = [part for name, folder in folders.items() for part in ("--root", f"{name}={folder}")]
    call = ["imagenet-variants", MODEL, *roots, "--weights", weights, "--workers", 0, "--to", tmp_path / "caches"]
    answer = run(*call, "-s", "entropy", "-s", "energy", "--csv", tmp_path / "rows.csv", "--json")
    assert answer.code == 0, answer.err
    same = dubito.protocols.imagenet_variants(
        dubito.load(MODEL, weights=weights), folders, scores=["entropy", "energy"], workers=0, progress=False
    )
    assert answer.json["images"] == same.images == {"imagenet-a": 6, "imagenet-v2": 6}
    assert answer.json["scores"]["imagenet-a"].keys() == {"entropy", "energy"}
    assert answer.json["accuracy"] == same.to_dict()["accuracy"]
    assert (tmp_path / "rows.csv").read_text().startswith("variant,score,images,accuracy")
    shown = run(*call)
    assert "Variants of ImageNet" in shown.out
    assert "max_probability" in shown.out
    assert sorted(place.name for place in (tmp_path / "caches").iterdir()) == ["imagenet-a", "imagenet-v2"]


def test_errors_speak_of_options(run: Run, weights: Path, tmp_path: Path) -> None:
    call = ["imagenet-variants", MODEL, "--weights", weights]
    answer = run(*call, "--root", tmp_path)
    assert (answer.code, "--root must be NAME=DIR, such as imagenet-a=" in answer.err) == (2, True)
    answer = run(*call, "--root", f"imagenet-a={tmp_path}", "-s", "energy", "--set", "energy.temperature=-1")
    assert (answer.code, "temperature must be" in answer.err) == (1, True), answer.err
    answer = run(*call, "--root", f"imagenet-b={tmp_path}")
    assert (answer.code, "must be one of imagenet-a, imagenet-r" in answer.err) == (1, True)
