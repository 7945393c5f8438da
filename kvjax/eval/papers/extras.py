"""Results of the papers beyond a benchmark's answers: kept positions, watershed layers, retrieval heads, rounds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvjax.calibrate.curve import kl_curve
from kvjax.checkpoints.digest import weights_digest
from kvjax.checkpoints.load import LanguageModel
from kvjax.documents import NotADocument, parse_json
from kvjax.errors import KvjaxError
from kvjax.eval import round_report
from kvjax.eval.dialogues import history_capacity, long_dialogues
from kvjax.eval.papers import round_attention
from kvjax.eval.positions import documentation, positions_figure, retained_positions
from kvjax.eval.round_questions import Answer, RoundComparison, Settings, read_answers
from kvjax.eval.suites.data import DataFolder
from kvjax.figures import png
from kvjax.files import file_digest, write_atomically
from kvjax.policies.head_choice import protected_heads
from kvjax.policies.profile import HeadProfile, WatershedProfile
from kvjax.policies.profile_files import packaged
from kvjax.tables import Column, Heading, Picture, Table

_KEEPING = ("h2o:recent=32,ratio=0.25", "ahakv:recent=32,ratio=0.25")
_POSITIONS, _CURVE = "ahakv-positions.png", "round-watershed.png"


@dataclasses.dataclass(frozen=True)
class Extra:
    """Parts of a paper's section, the files of its pictures, and its numbers."""

    parts: tuple[Heading | Table | Picture | str, ...]
    images: dict[str, bytes]
    data: Any


def positions(lm: LanguageModel, folder: Path, quick: bool, say: Callable[[str], None]) -> Extra:
    """AhaKV's figures of retained indices; drawn once, and read back from the folder then."""
    numbers, image = folder / "positions.json", folder / _POSITIONS
    tokens = 300 if quick else 700
    asked = {"model": lm.name, "numbers": lm.params.number_format, "tokens": tokens}
    asked |= {"weights": weights_digest(lm.params)}
    held = _read(numbers)
    if held is None or held.get("asked") != asked or not _are_numbers(held.get("mean position")) or not image.is_file():
        ids, found = lm.tokenizer.encode(documentation())[:tokens], []
        for policy in _KEEPING:
            say(f"{policy} reads {len(ids)} tokens")
            found.append(retained_positions(lm, ids, policy))
        folder.mkdir(parents=True, exist_ok=True)
        means = {one.name: one.mean_position for one in found}
        held = {"asked": asked, "mean position": means}
        write_atomically(image, png(positions_figure(found)))
        write_atomically(numbers, json.dumps(held) + "\n")
    means = "; ".join(f"{name} {value:.0%}" for name, value in held["mean position"].items())
    text = (
        f"Figures 2, 5 and 6: the positions kept of {tokens} tokens of Python's reference, a quarter of them. Mean "
        f"position, 50% for none preferred: {means}. The paper's pictures, of 7B models, have H2O's crowded at the "
        "beginning and AhaKV's spread evenly."
    )
    return Extra((text, Picture("Positions kept, by layer", _POSITIONS)), {_POSITIONS: image.read_bytes()}, held)


def _read(path: Path) -> Any:
    """A JSON object of an earlier run, or None."""
    try:
        found = parse_json(path.read_bytes()) if path.exists() else None
    except (OSError, NotADocument):
        return None
    return found if isinstance(found, dict) else None


def _are_numbers(value: Any) -> bool:
    """Whether this is an object of numbers, and not what somebody else wrote."""
    return isinstance(value, dict) and bool(value) and all(type(x) is float for x in value.values())


def retrieval_heads(lm: LanguageModel) -> Extra:
    """The heads that RazorAttention protects in this model."""
    profile = packaged(HeadProfile, lm.config)
    if profile is None:
        text = "No retrieval heads are known of this model: `kvjax calibrate retrieval-heads` finds them."
        return Extra((text,), {}, None)
    shares = {share: protected_heads(profile, share, 0.01, "query") for share in (0.05, 0.14)}
    layers, heads = lm.config.num_layers, lm.config.num_kv_heads
    counts = {f"{share:.0%}": sum(map(len, found)) for share, found in shares.items()}
    said = " and ".join(f"{count} at {share} of query heads by induction" for share, count in counts.items())
    text = (
        f"Of {layers * heads} KV heads {said} and 1% by echo score are protected: a KV head is, if any of its query "
        "heads is, so that grouped queries protect more than the paper's 15%."
    )
    return Extra((text,), {}, {"protected KV heads": counts, "KV heads": layers * heads})


def watershed(lm: LanguageModel) -> Extra:
    """Table 5's line of this model, and its curve."""
    profile = packaged(WatershedProfile, lm.config)
    if profile is None:
        text = "No watershed is known of this model: `kvjax calibrate watershed` finds it in dialogues."
        return Extra((text,), {}, None)
    layers, below = lm.config.num_layers, profile.watershed
    row = {"model": lm.name, "L": layers, "Lw": below, "save ratio": f"{1 - below / layers:.0%}"}
    columns = [Column(name, name, right=name != "model") for name in row]
    published = round_attention.PAPER.table("Table 5").value(lm.name, "watershed", "Lw")
    if published is not None:
        row["paper"] = published
        columns.append(Column("Lw of the paper", "paper", right=True))
    picture = Picture("How much each layer's attention over rounds differs from later layers'", _CURVE)
    table = Table(columns, [row], title="Table 5: the watershed layer (of the profile that comes with kvjax)")
    return Extra((table, picture), {_CURVE: kl_curve(profile)}, row)


def rounds(
    lm: LanguageModel,
    data: DataFolder,
    folder: Path,
    quick: bool,
    machine: dict[str, Any],
    say: Callable[[str], None],
) -> Extra:
    """Tables 1 and 4 on dialogues of the data folder; resumed, as compare-rounds is."""
    path = data.find(*round_attention.PLACES)
    if path is None:
        places = ", ".join(round_attention.PLACES)
        return Extra((f"Tables 1, 3 and 4 need dialogues: give --data DIR with one of {places}.",), {}, None)
    labels = round_attention.QUICK if quick else tuple(round_attention.POLICIES)
    names = [round_attention.POLICIES[label] for label in labels]
    room = min(1024 if quick else 3000, history_capacity(lm, None))
    numbers, digests = lm.params.number_format, (file_digest(path), weights_digest(lm.params))
    settings = Settings(lm.name, numbers, path.name, room, 4 if quick else 12, 1, *digests)
    out = folder / "rounds"

    def save(answers: Sequence[Answer]) -> None:
        round_report.save(out, round_report.report(settings, answers, machine))

    try:
        asked = long_dialogues(lm, path, most=1 if quick else 5, least_rounds=2, tokens=room)
        answers = read_answers(out / "answers.json", settings)
        comparison = RoundComparison(lm, names, settings, answers=answers, save=save, say=say)
        comparison.run(asked)
    except KvjaxError as error:
        return Extra((f"Tables 1, 3 and 4: not measured. {error}",), {}, None)
    found = round_report.report(settings, comparison.answers, machine)
    table, *others = found.parts
    assert isinstance(table, Table)
    title = f"Tables 1, 3 and 4: strategies and granularities on {path.name}"
    parts = (round_attention.DIFFERS, dataclasses.replace(table, title=title), *others)
    return Extra(parts, {}, round_report.summary(comparison.answers))
