"""Labelled images: folders, their mistakes, shards, batches."""

import gzip

import numpy as np
import pytest
import torch
from idx_files import NAMES, idx, write_images

from farflung.errors import UserError
from farflung.train import images
from farflung.train.images import Images, read_images


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "images", num_train=23, num_held_out=11)
    return tmp_path / "images"


def numbered(num_images: int) -> Images:
    """Images whose pixels and labels say which one it is."""
    labels_N = torch.arange(num_images)
    return Images(labels_N[:, None, None].expand(-1, 8, 8).to(torch.uint8), labels_N)


def test_a_folder_gives_images_to_train_on_and_held_out_ones(folder):
    train, held_out = read_images(str(folder))
    assert (train.pixels_NHW.shape, held_out.pixels_NHW.shape) == ((23, 16, 16), (11, 16, 16))
    assert train.pixels_NHW.dtype == torch.uint8
    assert sorted(train.labels_N.tolist()) == sorted(n % 10 for n in range(23))


def test_the_package_of_the_default_images_is_named_when_it_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(images, "FASHION_MNIST", tmp_path / "nowhere")
    with pytest.raises(UserError, match="apt install dataset-fashion-mnist, or set data"):
        read_images()
    write_images(tmp_path / "nowhere")
    assert len(read_images()[0]) == 240


def test_a_place_without_the_four_files_is_named(folder):
    with pytest.raises(UserError, match=r"nowhere': no such folder: give one with the four files"):
        read_images(str(folder / "nowhere"))
    (folder / f"{NAMES['held-out labels']}.gz").unlink()
    with pytest.raises(UserError, match=r"there is no t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz"):
        read_images(str(folder))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("images", np.zeros((22, 16, 16)), "ubyte.gz: 23 labels for the 22 images of train-images"),
        ("held-out labels", np.zeros(12), "ubyte: 12 labels for the 11 images of t10k-images"),
        ("held-out images", np.zeros((11, 16, 17)), "have 16 x 16 pixels, the held-out ones 16 x 17"),
        ("images", np.zeros((23, 16, 7)), "holds 23 x 16 x 7 pixels: give images of at least 8 x 8"),
        ("labels", np.full(23, 10), "has label 10: labels must be from 0 to 9"),
        ("labels", np.zeros((23, 1)), "an IDX file of 2 dimensions, 1 are expected"),
    ],
)
def test_files_that_disagree_are_told_by_name(folder, name, values, message):
    (folder / NAMES[name]).write_bytes(idx(values))  # a plain file is taken before a compressed one
    with pytest.raises(UserError) as error:
        read_images(str(folder))
    assert str(folder) in str(error.value)
    assert message in str(error.value)


def test_empty_files_are_refused(folder):
    (folder / NAMES["images"]).write_bytes(idx(np.zeros((0, 16, 16))))
    (folder / f"{NAMES['labels']}.gz").write_bytes(gzip.compress(idx(np.zeros(0))))
    with pytest.raises(UserError, match="holds 0 x 16 x 16 pixels"):
        read_images(str(folder))


@pytest.mark.parametrize("num_learners", [1, 2, 3, 7])
def test_shards_cover_all_images_do_not_overlap_and_hold_every_class(num_learners):
    shards = [numbered(103).shard(m, num_learners) for m in range(num_learners)]
    assert sorted(torch.cat([s.labels_N for s in shards]).tolist()) == list(range(103))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert max(int(s.labels_N.diff().max()) for s in shards) == num_learners  # evenly spread over the file


def test_a_shard_that_would_be_empty_is_refused():
    with pytest.raises(UserError, match="shard of learner 3 is empty: 3 images for 4 learners"):
        numbered(3).shard(3, 4)
    with pytest.raises(UserError, match="learner_index = 2 of num_learners = 2"):
        numbered(3).shard(2, 2)


def test_batches_hold_images_of_the_shard_with_their_labels():
    pixels_BHW, labels_B = next(numbered(100).shard(1, 3).batches(8, seed=0, learner_index=1))
    assert pixels_BHW.shape == (8, 8, 8)
    assert torch.equal(pixels_BHW[:, 0, 0].long(), labels_B)
    assert (labels_B % 3 == 1).all()


def test_seeking_gives_exactly_the_batches_that_would_have_come():
    whole, resumed = (numbered(100).batches(4, seed=7, learner_index=2) for _ in range(2))
    expected = [next(whole)[1] for _ in range(5)]
    resumed.seek(3)
    assert torch.equal(next(resumed)[1], expected[3])
    assert resumed.cursor == 4
    resumed.load_state_dict({"position": 1})
    assert torch.equal(next(resumed)[1], expected[1])


def test_seed_learner_and_position_each_change_the_batch():
    def batches(seed, learner_index):
        return numbered(200).batches(8, seed, learner_index)

    first = batches(0, 0)
    drawn = [next(first)[1], next(first)[1], next(batches(1, 0))[1], next(batches(0, 1))[1]]
    for i, one in enumerate(drawn):
        assert not any(torch.equal(one, other) for other in drawn[i + 1 :])


def test_the_stream_is_pinned_so_that_old_runs_resume():
    assert next(numbered(200).batches(4, seed=7, learner_index=2))[1].tolist() == [125, 26, 182, 110]


def test_a_part_is_spread_evenly_and_holds_each_image_once():
    assert numbered(101).spread(5).labels_N.tolist() == [0, 25, 50, 75, 100]
    assert len(numbered(10).spread(500)) == 10
