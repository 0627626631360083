from pathlib import Path

import fake_gossip
import fake_run
import pytest

from farflung.report.folder import Folder, read_folder


@pytest.fixture(scope="session")
def decoupled_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run.folder(tmp_path_factory.mktemp("runs") / "a", fake_run.decoupled)


@pytest.fixture(scope="session")
def diloco_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run.folder(tmp_path_factory.mktemp("runs") / "b", fake_run.diloco)


@pytest.fixture(scope="session")
def decoupled(decoupled_dir: Path) -> Folder:
    return read_folder(decoupled_dir)


@pytest.fixture(scope="session")
def diloco(diloco_dir: Path) -> Folder:
    return read_folder(diloco_dir)


@pytest.fixture(scope="session")
def gossip_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_gossip.folder(tmp_path_factory.mktemp("runs") / "g")


@pytest.fixture(scope="session")
def gossip(gossip_dir: Path) -> Folder:
    return read_folder(gossip_dir)
