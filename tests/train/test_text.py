"""Byte data: sources, split, shards, resumable batches."""

import pytest
import torch

from farflung.errors import UserError
from farflung.train.batches import ShardBatches
from farflung.train.text import TextData, read_text, window_batches


def data(num_bytes: int) -> TextData:
    return TextData((torch.arange(num_bytes) % 251).byte())


def batches(seed: int = 0, learner_index: int = 0) -> ShardBatches:
    return window_batches(data(5000).text_N, 4, 16, seed, learner_index)


def test_the_default_text_is_shakespeare():
    text = read_text()
    assert len(text) > 5_000_000
    assert b"Now, fair Hippolyta" in text


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'farflung\[data\]'"):
        read_text()


def test_a_single_text_file_is_read_as_bytes(tmp_path):
    (tmp_path / "own.bin").write_bytes(b"\xff\x00abc")
    assert read_text(str(tmp_path / "own.bin")) == b"\xff\x00abc"


def test_a_directory_is_read_recursively_in_sorted_order_text_files_only(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.md", "sub/c.TXT", "picture.png", ".hidden.txt"):
        (tmp_path / name).write_text(name)
    assert read_text(str(tmp_path)) == b"a.mdb.txtsub/c.TXT"


def test_a_directory_without_text_suffixes_is_read_whole(tmp_path):
    for name in ("b.log", "a"):
        (tmp_path / name).write_text(name)
    assert read_text(str(tmp_path)) == b"ab.log"


def test_missing_and_empty_places_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere': no such file or directory"):
        read_text(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="holds no files"):
        read_text(str(tmp_path))


def test_the_end_is_held_out_and_at_most_a_tenth_of_a_small_text():
    assert len(data(1000).held_out) == 100
    assert len(data(3_000_000).held_out) == 200_000
    assert data(1000).held_out[-1] == data(1000).text_N[-1]


@pytest.mark.parametrize("num_learners", [1, 2, 3, 7])
def test_shards_cover_the_training_part_and_do_not_overlap(num_learners):
    text = data(1003)
    shards = [text.shard(m, num_learners) for m in range(num_learners)]
    assert torch.equal(torch.cat(shards), text.text_N[: text.num_train])
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_eval_windows_are_fixed_and_span_the_held_out_part():
    text = data(20_000)
    windows = text.eval_windows(context=16, num_windows=10)
    assert windows.shape == (10, 17)
    assert torch.equal(windows[0], text.held_out[:17])
    assert torch.equal(windows[-1], text.held_out[-17:])
    assert torch.equal(windows, text.eval_windows(context=16, num_windows=10))


def test_a_short_held_out_part_gives_each_window_once():
    assert len(data(200).eval_windows(context=16, num_windows=640)) == 20 - 16


def test_texts_too_short_for_one_window_are_refused():
    with pytest.raises(
        UserError, match="held-out part of a text of 100 bytes has 10 bytes, one window needs 17"
    ):
        data(100).eval_windows(context=16, num_windows=1)
    with pytest.raises(UserError, match="shard of learner 3"):
        window_batches(data(100).shard(3, 9), 4, 16, seed=0, learner_index=3)
    with pytest.raises(UserError, match="learner_index = 2 of num_learners = 2"):
        data(100).shard(2, 2)
    with pytest.raises(UserError, match="0 bytes"):
        TextData.from_bytes(b"").eval_windows(context=16, num_windows=1)


def test_a_batch_holds_windows_of_the_shard():
    batch = next(batches())
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.int64
    steps = (batch[:, 1:] - batch[:, :-1]) % 251
    assert torch.equal(steps, torch.ones(4, 16, dtype=torch.int64))


def test_seeking_gives_exactly_the_batches_that_would_have_come():
    whole = batches()
    expected = [next(whole) for _ in range(6)]
    resumed = batches()
    resumed.seek(4)
    assert torch.equal(next(resumed), expected[4])
    resumed.load_state_dict({"position": 2})
    assert torch.equal(next(resumed), expected[2])
    assert resumed.cursor == 3
    assert resumed.state_dict() == {"position": 3}


def test_seed_learner_and_position_each_change_the_batch():
    first = batches()
    variants = [next(first), next(first), next(batches(seed=1)), next(batches(learner_index=1))]
    for i, a in enumerate(variants):
        assert not any(torch.equal(a, b) for b in variants[i + 1 :])


def test_the_stream_is_pinned_so_that_old_runs_resume():
    assert next(batches(seed=7, learner_index=2))[:, 0].tolist() == [125, 201, 146, 75]


def test_a_negative_cursor_is_refused():
    with pytest.raises(UserError, match="data cursor = -1"):
        batches().seek(-1)
