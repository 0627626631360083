"""The whole path of `farflung bench`, small. What comes out is checked for sense, never for speed."""

import itertools
import json
import math
import subprocess
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from farflung.bench import machines, suite
from farflung.bench.child import child
from farflung.bench.codecs import MEASURED, _dct_by_fft
from farflung.bench.measure import FULL, QUICK, Measurement, interleave, speed_of
from farflung.cli import app
from farflung.core.codecs import CODECS
from farflung.core.codecs.dct import dct
from farflung.errors import UserError
from farflung.methods import decoupled


def measurement(*ratios: float, aim: float | None = None) -> Measurement:
    return Measurement(ratios=ratios, reference=3.1, unit="GB/s", what="a thing", aim=aim, note="64 MiB")


def test_quick_json_holds_one_finite_positive_ratio_for_every_measurement():
    result = CliRunner().invoke(app, ["bench", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    meta = printed.pop("meta")
    assert list(printed) == list(suite.REGISTRY)
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in printed.values()), printed
    assert all(low <= printed[name] <= high for name, (low, high) in meta["spread"].items())
    assert meta["threads"] == 1 and meta["torch"] == torch.__version__


def test_there_is_a_measurement_for_everything_that_was_asked_for():
    assert {*CODECS, "top64-2bit-12bit", "dct-top32-int8-12bit"} <= set(MEASURED)
    codecs = {f"codec_{name}_{way}" for name in MEASURED for way in ("encode", "decode")}
    others = {"learner_throughput", "merge_avg", "merge_rda", "transport_put", "transport_get"}
    others |= {"lab_overhead", "lab_crowd", "machine_events", "dct", "codec_memory"}
    others |= {"simulate_table1", "simulate_chips"}
    assert set(suite.REGISTRY) == codecs | others


def test_the_peer_of_the_dct_makes_the_same_transform():
    x = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(_dct_by_fft(x), dct(x), rtol=0, atol=1e-5)


def test_an_unknown_name_is_refused_with_the_closest_one_before_anything_runs():
    with pytest.raises(UserError, match=r"'merge_avgg'.*did you mean 'merge_avg'"):
        suite.chosen(["merge_rda", "merge_avgg"])


def test_chosen_names_keep_the_order_of_the_registry():
    assert suite.chosen(["transport_put", "merge_avg"]) == ["merge_avg", "transport_put"]
    assert suite.chosen([]) == list(suite.REGISTRY)


def test_a_measurement_leaves_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    suite.measure("codec_fp32_encode", QUICK)
    assert torch.get_num_threads() == before


def test_each_speed_is_compared_with_the_mean_of_its_neighbours():
    references = iter([1.0, 3.0, 5.0])
    ratios, median = interleave(itertools.repeat(2.0).__next__, references.__next__, 2)
    assert ratios == (1.0, 0.5) and median == 3.0


def test_speed_is_amount_over_time():
    done = []
    assert speed_of(lambda: done.append(1), 2.0)() > 0
    assert done == [1]


def test_the_ratio_is_the_median_and_the_spread_its_ends():
    m = measurement(0.5, 0.2, 0.9)
    assert (m.low, m.ratio, m.high) == (0.2, 0.5, 0.9)


def test_the_table_shows_ratio_aim_spread_reference_and_meaning():
    console = Console(width=120)
    with console.capture() as shown:
        console.print(suite.table({"merge_avg": measurement(0.5, 0.2, 0.9, aim=0.6)}, FULL))
    for text in ("merge_avg", "0.500", "0.6", "0.20 .. 0.90", "3.10 GB/s", "a thing (64 MiB)"):
        assert text in shown.get()


def test_less_may_be_better():
    times = measurement(1.2, aim=1.1)
    assert not times.missed and replace(times, less_is_better=True).missed
    assert not replace(times, less_is_better=True, aim=1.3).missed
    console = Console(width=120)
    with console.capture() as shown:
        console.print(suite.table({"lab_overhead": replace(times, less_is_better=True)}, FULL))
    assert "≤ 1.1" in shown.get()


def test_machines_and_bare_loop_get_all_events_in_the_order_of_time():
    moments = machines.record(decoupled(num_fragments=24, sync_every_steps=24), budget_tokens=8 * 10 * 4)
    seen: list[tuple[float, str]] = []
    nodes = {node for _, node, _ in moments}
    handlers = {node: (lambda event, now, node=node: seen.append((now, node))) for node in nodes}
    machines._speed(moments, lambda: handlers)()
    assert seen == [(now, node) for now, node, _ in moments]
    assert nodes == {"syncer", *(f"learner-{i}" for i in range(8))}


def test_a_child_that_ends_at_once_is_one_clear_line():
    with (
        pytest.raises(UserError, match=r"farflung\.units: ended before it was ready"),
        child("farflung.units"),
    ):
        pass


def test_a_child_is_gone_after_the_block(monkeypatch):
    started: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def remember(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)
    with child("farflung.bench.far_side", "1024", FARFLUNG_TOKEN="t") as said:
        assert said["url"].startswith("http://127.0.0.1:")
    assert started[0].returncode is not None
