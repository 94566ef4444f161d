"""The named edits: each matches exactly once or nothing is written (cases A1, A2, A3)."""

from pathlib import Path

import pytest

from hvdkit.errors import BuildError
from hvdkit.horovod_build import edits
from hvdkit.horovod_build.edits import EDITS, Situation

BOTH = Situation(torch_standard=17, tensorflow_standard=17, xla_headers=False)
FUTURE = Situation(torch_standard=20, tensorflow_standard=23, xla_headers=True)


def make_tree(root: Path, table: tuple[edits.Edit, ...] = EDITS) -> dict[str, str]:
    """A source tree that holds the old text of every edit once, between other lines."""
    texts: dict[str, str] = {}
    for edit in table:
        texts[edit.file] = texts.get(edit.file, "# first line\n") + edit.old + "\n# next\n"
    for file, text in texts.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return texts


def names(situation: Situation) -> set[str]:
    return {edit.name for edit in edits.situation_edits(situation)}


def test_every_edit_says_what_why_and_for_which_versions() -> None:
    assert len({edit.name for edit in EDITS}) == len(EDITS)
    for edit in EDITS:
        assert edit.why and edit.versions and edit.old.strip() and edit.old != edit.new


def test_all_edits_apply_once(tmp_path: Path) -> None:
    make_tree(tmp_path)
    chosen = edits.situation_edits(BOTH)
    edits.apply(tmp_path, chosen)
    for edit in chosen:
        text = (tmp_path / edit.file).read_text()
        assert edit.new in text
        assert "# first line" in text
    assert not any("@" in edit.new.replace("@ONLY", "") for edit in chosen)


def test_a1_a2_each_extension_follows_its_own_framework() -> None:
    new = {edit.name: edit.new for edit in edits.situation_edits(FUTURE)}
    assert "STANDARD 20)" in new["cxx-standard-torch"]
    assert "STANDARD 23)" in new["cxx-standard-tensorflow"]
    assert "STANDARD 23)" in new["cxx-standard-root"]
    only_torch = {edit.name: edit.new for edit in edits.situation_edits(Situation(torch_standard=17))}
    assert "STANDARD 17)" in only_torch["cxx-standard-root"]


def test_edits_follow_the_situation() -> None:
    assert "cxx-standard-torch" not in names(Situation(torch_standard=14))
    assert "cxx-standard-torch" not in names(Situation(tensorflow_standard=17))
    assert "cxx-standard-tensorflow" not in names(BOTH)
    assert "tensorflow-without-xla" in names(BOTH)
    assert "tensorflow-without-xla" not in names(FUTURE)
    assert "tensorflow-without-xla" not in names(Situation(torch_standard=17, xla_headers=False))


def test_a3_gloo_is_edited_whatever_the_cmake() -> None:
    assert {"gloo-cmake-minimum", "cstdint"} <= names(Situation(torch_standard=17)) & names(
        Situation(tensorflow_standard=17)
    )


@pytest.mark.parametrize("count", [0, 2])
def test_an_edit_that_does_not_match_once_stops_before_anything_is_written(tmp_path: Path, count: int) -> None:
    before = make_tree(tmp_path)
    broken = next(edit for edit in EDITS if edit.name == "horovodrun-open-mpi-5")
    changed = before[broken.file].replace(broken.old, broken.old * count if count else "something else")
    (tmp_path / broken.file).write_text(changed)
    with pytest.raises(BuildError, match=rf"{broken.name} must match {broken.file} exactly once.*{count} times"):
        edits.apply(tmp_path, edits.situation_edits(BOTH))
    before[broken.file] = changed
    assert {file: (tmp_path / file).read_text() for file in before} == before


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    make_tree(tmp_path)
    (tmp_path / "setup.py").unlink()
    with pytest.raises(BuildError, match=r"setup\.py exactly once.*0 times"):
        edits.apply(tmp_path, edits.situation_edits(BOTH))


def test_the_digest_sees_every_change() -> None:
    digests = {edits.digest(edits.situation_edits(s)) for s in (BOTH, FUTURE, Situation(torch_standard=17))}
    assert len(digests) == 3
    assert edits.digest(edits.situation_edits(BOTH)) == edits.digest(edits.situation_edits(BOTH))
