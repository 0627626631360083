"""Real processes and sockets: the bytes that passed are those of the payloads' formula, and a header each."""

import json
from pathlib import Path

import pytest
from test_run import finish, start

from farflung import tape
from farflung.units import FRAME_BYTES

RECIPE = """
method = "{method}"
scale = "micro"
num_learners = 3
steps = 16
evals = 0
eval_batches = 1

[policy]
sync_every_steps = 4
lease_s = 20.0
codec = "{codec}"
{more}
"""
CHUNKS, SENT, BITS = 9, 512, 16 + 12  # of 34,976 parameters; of 4096 each; bf16 and a 12-bit position
PAYLOAD = CHUNKS * SENT * BITS // 8
DENSE = 4 * 34_976


def run(folder: Path, method: str, codec: str, more: str = "") -> dict:
    (folder / "r.toml").write_text(RECIPE.format(method=method, codec=codec, more=more))
    code, out, err = finish(start(folder, "r.toml", "--out", "run", "--json"))
    assert code == 0, err
    return json.loads(out)


def total(summary: dict, kind: str, way: str) -> int:
    return sum(row[way] for row in summary["bytes_by"] if row["kind"] == kind)


def test_contributions_to_a_hub_are_payloads_with_a_header_each(tmp_path: Path) -> None:
    summary = run(tmp_path, "sparseloco", "top512-bf16-12bit")
    records = list(tape.read_run(tmp_path / "run"))
    heard = [r.data["message"] for r in records if r.type == "MessageArrived" and r.node == "syncer"]
    ours = [r for r in records if r.data.get("object", "").startswith("contribution.") and r.node != "syncer"]
    sent, cut = (len([r for r in ours if r.type == kind]) for kind in ("Uploaded", "CancelUpload"))
    donated = sum(m["num_bytes"] + FRAME_BYTES for m in heard if m["type"] == "StateReady")
    assert {m["num_bytes"] for m in heard if m["type"] == "Contribute"} == {PAYLOAD} and PAYLOAD >= 16_000
    up = total(summary, "contribution", "up")
    assert sent > 6 and cut <= 3  # rounds that the end of the run cut short
    assert sent * (PAYLOAD + FRAME_BYTES) <= up <= (sent + cut) * (PAYLOAD + FRAME_BYTES)
    assert cut or up == sent * (PAYLOAD + FRAME_BYTES)
    assert summary["bytes_up"] == up + donated + DENSE + FRAME_BYTES  # and the first parameters
    assert FRAME_BYTES / PAYLOAD < 0.03
    fetched = sum(r.type == "Fetched" for r in records)
    assert total(summary, "version", "down") == fetched * (DENSE + FRAME_BYTES)


@pytest.mark.slow
def test_vectors_for_partners_are_payloads_with_a_header_each(tmp_path: Path) -> None:
    """What an offer that came too early had sent counts too; without one the equality has no other part."""
    summary = run(tmp_path, "dct_momentum", "dct-top512-bf16-12bit", "gathers = 1")
    records = list(tape.read_run(tmp_path / "run"))
    offers = [r for r in records if r.data.get("object", "").startswith("offer.")]
    arrived = [r.data["sent_bytes"] for r in offers if r.type == "Uploaded"]
    refused = [r.data["sent_bytes"] for r in offers if r.type == "UploadFailed"]
    assert PAYLOAD >= 16_000 and len(arrived) > 6
    assert total(summary, "offer", "up") == sum(arrived) + sum(refused)
    assert len(arrived) * (PAYLOAD + FRAME_BYTES) <= sum(arrived) + sum(refused)
    if not refused:
        assert sum(arrived) == len(arrived) * (PAYLOAD + FRAME_BYTES)
