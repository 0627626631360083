"""Bad input: one clear line on standard error, exit code 2, no traceback, nothing started, lost or created."""

import socket
import sys

import pytest

from farflung import cli
from farflung.runtime import processes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with all sorts of files; starting a process in it is a failure."""

    async def start(name, *args, **options):
        pytest.fail(f"{name} was started")

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("FARFLUNG_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no.toml").write_text("a = = b")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "good.toml").write_text('scale = "micro"\n')
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('two\\nlines')\n")
    (tmp_path / "fine_module.py").write_text("def number(config):\n    return 3\n")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def farflung(folder, monkeypatch, capsys):
    """Run a command line; returns what it said once it was refused as it should be."""

    def refused(*args):
        before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
        monkeypatch.setattr(sys, "argv", ["farflung", *args])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        assert exit.value.code == 2, (out, err)
        assert out == ""
        assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before
        return err

    return refused


def one_line(err):
    assert err.startswith("farflung: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err


# ---- recipes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["run", "serve"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.toml", "missing.toml: No such file or directory: give the path of a TOML file"),
        ("there", "there: Is a directory"),
        ("no.toml", "no.toml: not TOML: Invalid value (at line 1, column 5)"),
        ("bytes.toml", "bytes.toml: not TOML"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_one_line(farflung, verb, name, message):
    assert message in one_line(farflung(verb, name))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("methd=diloco", "unknown key 'methd' (did you mean 'method'?)"),
        ("data.paht=x", "[data]: unknown key 'paht' (did you mean 'path'?)"),
        ("serve.prot=1", "[serve]: unknown key 'prot' (did you mean 'port'?)"),
        ("a..b=3", "unknown key 'a' (known: batch_size, budget_tokens,"),
        ("seed", "--set seed: write NAME=VALUE"),
        ("=3", "--set =3: write NAME=VALUE"),
        ("scale.x=3", "--set scale.x=3: scale is not a table"),
        ("seed=x", "seed: expected int, got str"),
        ("num_learners=true", "num_learners: expected int, got bool"),
        ("policy=3", "policy: expected table, got int"),
        ("faults=3", "faults: expected array, got int"),
        ("faults=[3]", "faults[0]: expected table, got int"),
        ("faults=missing.toml", "missing.toml: No such file"),
        (
            'faults=[{kind="kil",target="learner-0",at_s=1}]',
            "invalid enum value 'kil' (known: clock_jump, corrupt, delay, disconnect, disk_full, duplicate, ",
        ),
        (
            'faults=[{kind="kill",targt="learner-0",at_s=1}]',
            "fault 1: unknown key 'targt' (did you mean 'target'?)",
        ),
        ("num_learners=0", "num_learners = 0: must be at least 1"),
        ("pace_s=nan", "pace_s = nan: must be at least 0"),
        ("restart_s=inf", "restart_s = inf: must be at least 0"),
        ("seed=9223372036854775808", "seed = 9223372036854775808: must be below 2^63"),
        ("budget_tokens=0", "budget_tokens = 0: must be at least 1"),
        ("lr=-1", "lr = -1.0: give a peak learning rate above 0"),
        ("scale=mikro", "unknown scale 'mikro' (did you mean 'micro'?)"),
    ],
)
def test_a_wrong_key_or_value_is_one_line(farflung, setting, message):
    assert message in one_line(farflung("run", "good.toml", "--set", setting))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("method=dilco", "method = 'dilco' is unknown (did you mean 'diloco'?)"),
        ("policy.qourum=2", "no option 'qourum' (did you mean 'quorum'?)"),
        ("policy.quorum=many", "quorum: invalid enum value 'many' (known: all)"),
        ("policy.quorum=0", "quorum = 0: must be at least 1, or 'all'"),
        ("policy.quorum=5", "policy.quorum = 5: there are only 4 learners"),
        ("policy.num_fragments=25", "P = 25: must be at most H = 24"),
        ("policy.overlap_steps=24", "tau = 24: must be less than H = 24"),
        ("policy.codec=int9", "codec = 'int9' is unknown (did you mean 'int8'?)"),
        ("policy.outer=nestrov", "outer = 'nestrov' is unknown (did you mean 'nesterov'?)"),
        ("policy.outer_lr=nan", "outer lr = nan must be a positive finite number"),
        ("policy.fragment_plan=balance", "fragment_plan = 'balance' is unknown (did you mean 'balanced'?)"),
        ("policy.adoption=none", "adoption: invalid enum value 'none' (known: mix, overwrite, rebase)"),
        ("policy={topology='gossip',num_fragments=1}", "topology = 'gossip' is unknown (known: hub)"),
        ("policy.lease_s=inf", "lease_s = inf: must be above 0, in seconds"),
        ("policy={fragment_plan='strided',num_fragments=9}", "num_fragments = 9: 'strided' can fill 1 to"),
    ],
)
def test_a_method_that_cannot_be_is_one_line(farflung, setting, message):
    assert message in one_line(farflung("run", "good.toml", "--set", setting))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("matching=rings", "matching = 'rings' is unknown (did you mean 'ring'?)"),
        ("matching=hypercube", "matching = 'hypercube' with 6 members: their number must be a power of two"),
        ("mixing=1.5", "diverges in disagreement for 6 learners"),
        ("momentum_on=both", "momentum_on: invalid enum value 'both' (known: local, mixed)"),
        ("local_steps.learner-9=30", "local_steps.learner-9: no such learner (did you mean 'learner-5'?)"),
        ("local_steps.learner-1=0", "local_steps.learner-1 = 0: must be at least 1"),
        ("overlap_steps=25", "overlap_steps = 25: must be in 0..24, the steps of a round"),
        ("num_fragments=2", "num_fragments = 2: must be 1 with topology = 'gossip'"),
        ("throttle=true", "throttle has no effect with method = 'gasloc': there is no hub that merges"),
    ],
)
def test_a_gossip_setting_that_cannot_be_is_one_line(farflung, setting, message):
    args = ("--set", "method=gasloc", "--set", "num_learners=6", "--set", f"policy.{setting}")
    assert message in one_line(farflung("run", "good.toml", *args))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("task=txt", "task = 'txt': unknown (did you mean 'text'?)"),
        ("task=no_such_module:task", "importing 'no_such_module' failed"),
        ("task=broken_module:task", "importing 'broken_module' failed (RuntimeError: two lines)"),
        ("task=fine_module:numbr", "fine_module has no function 'numbr' (did you mean 'number'?)"),
        ("task=fine_module:number", "the function returned int"),
        ("data.path=missing.txt", "data.path = 'missing.txt': no such file or directory"),
        ("data.path=short.txt", "one window needs 65"),
    ],
)
def test_a_task_or_text_that_is_not_there_is_one_line(farflung, setting, message):
    assert message in one_line(farflung("run", "good.toml", "--set", setting))


# ---- addresses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["run", "serve"])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("serve.host=0.0.0.0", "listening on 0.0.0.0 without TLS"),
        ("serve.host=256.1.1.1.invalid", "listening on 256.1.1.1.invalid without TLS"),
        ("serve.port=65536", "serve.port = 65536: must be in 0..65535"),
        ("serve.cert=missing.pem", "TLS certificate missing.pem"),
        ("serve.key=missing.pem", "serve.key and serve.client_ca need serve.cert"),
        ("serve.ca=missing.pem", "TLS authority missing.pem"),
    ],
)
def test_an_address_that_cannot_be_served_is_one_line(farflung, verb, setting, message):
    assert message in one_line(farflung(verb, "good.toml", "--set", setting))


@pytest.mark.parametrize("verb", ["run", "serve"])
def test_an_occupied_port_is_one_line(farflung, verb):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = one_line(farflung(verb, "good.toml", "--set", f"serve.port={port}"))
    assert f"address 127.0.0.1:{port} is taken; choose another port, or 0 for any" in said


@pytest.mark.parametrize(
    ("args", "token", "message"),
    [
        (["--connect", "http://127.0.0.1:1"], "", "no join token: give token=..., or set FARFLUNG_TOKEN"),
        (["--connect", "http://127.0.0.1:1"], "two words", "join token: expected one word"),
        (["--connect", "http://127.0.0.1:1", "--name", "a b"], "t", "name = 'a b': use letters, digits"),
        (["--connect", "127.0.0.1:7070"], "t", "connect = '127.0.0.1:7070': write http://HOST:PORT"),
        (["--connect", "http://host:port"], "t", "connect = 'http://host:port': write http://HOST:PORT"),
        (["--connect", "https://127.0.0.1:1", "--ca", "no.pem"], "t", "TLS authority no.pem"),
        (["--connect", "https://127.0.0.1:1", "--cert", "no.pem"], "t", "certificate and its key belong together"),
    ],
)  # fmt: skip
def test_a_learner_that_cannot_dial_is_told_before_it_tries(farflung, monkeypatch, args, token, message):
    monkeypatch.setenv("FARFLUNG_TOKEN", token)
    assert message in one_line(farflung("join", "good.toml", *args))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gasloc", ["--listen", "nowhere"], "listening on nowhere without TLS"),
        ("gasloc", ["--listen", "127.0.0.1:x"], "listen = '127.0.0.1:x': write HOST:PORT"),
        ("gasloc", ["--advertise", "example.org"], "has no effect without listen"),
        ("decoupled", ["--listen", "127.0.0.1:0"], "no effect on decoupled: it has no partners"),
    ],
)
def test_where_nobody_can_listen_is_told_at_once(farflung, monkeypatch, method, options, message):
    monkeypatch.setenv("FARFLUNG_TOKEN", "t")
    words = ["join", "good.toml", "--set", f"method={method}", "--connect", "http://127.0.0.1:1", *options]
    assert message in one_line(farflung(*words))


def test_a_learner_gives_up_when_nobody_answers(farflung, monkeypatch):
    monkeypatch.setenv("FARFLUNG_TOKEN", "t")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    said = one_line(farflung("join", "good.toml", "--connect", f"http://127.0.0.1:{port}", "--wait", "0"))
    assert f"nobody answered within 0 s: http://127.0.0.1:{port}: " in said


# ---- run folders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["run", "serve"])
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("there", "there: already exists; choose another --out, or --resume it"),
        ("short.txt", "short.txt: already exists"),
        ("short.txt/run", "short.txt/run: cannot be created: Not a directory"),
    ],
)
def test_a_run_folder_that_is_taken_is_one_line(farflung, verb, out, message):
    assert message in one_line(farflung(verb, "good.toml", "--out", out))


def test_what_was_not_stopped_in_order_cannot_be_resumed(farflung):
    assert "missing: not a run folder: there is no config.json" in one_line(
        farflung("run", "--resume", "missing")
    )
    assert "there/config.json: not a run's configuration" in one_line(farflung("run", "--resume", "there"))


def test_a_run_that_finished_cannot_be_resumed(farflung, folder):
    from farflung.config import resolve, write_config
    from farflung.recipe import make_recipe

    write_config(resolve(make_recipe({"budget_tokens": 9}), "run", trains=False), folder / "there")
    assert "there: nothing to resume: only a run stopped in order" in one_line(
        farflung("run", "--resume", "there")
    )


@pytest.mark.parametrize("damage", ["cut off", "half", "of another kind"])
def test_a_checkpoint_that_is_damaged_is_not_one_that_is_missing(farflung, folder, damage):
    import safetensors.torch
    import torch

    from farflung.config import resolve, write_config
    from farflung.recipe import make_recipe

    write_config(resolve(make_recipe({"budget_tokens": 9}), "run", trains=False), folder / "there")
    path = folder / "there" / "checkpoints" / "syncer.safetensors"
    path.parent.mkdir()
    whole = safetensors.torch.save({"x": torch.ones(9)}, {"elapsed_s": "1"})
    other = safetensors.torch.save({"x": torch.ones(9)})
    path.write_bytes(
        {"cut off": b"cut off", "half": whole[: len(whole) // 2], "of another kind": other}[damage]
    )
    said = one_line(farflung("run", "--resume", "there"))
    assert "checkpoints/syncer.safetensors: damaged, nothing can be resumed from it: " in said
    assert not said.endswith(": \n") and "nothing to resume" not in said


@pytest.mark.parametrize("more", [["good.toml"], ["--set", "seed=1"], ["--out", "other"]])
def test_a_resumed_run_takes_nothing_else(farflung, more):
    assert "--resume takes the run as it is" in one_line(farflung("run", "--resume", "there", *more))


@pytest.mark.parametrize(
    "args", [["there"], ["missing"], ["short.txt"], ["--json", "there"], ["there", "missing"]]
)
def test_a_report_of_what_is_no_run_is_one_line(farflung, args):
    assert "not a run folder" in one_line(farflung("report", *args))


# ---- typer's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rnu"], "No such command 'rnu'"),
        (["run", "--seed", "1"], "No such option: --seed"),
        (["join"], "Missing option '--connect'"),
        (["report"], "Missing argument"),
    ],
)
def test_an_unknown_verb_or_option_says_how_to_get_help(farflung, args, message):
    said = farflung(*args)
    assert message in said and "--help' for help" in said and "Traceback" not in said


@pytest.mark.parametrize("verb", ["run", "serve", "join", "report", "bench"])
def test_every_verb_explains_itself_and_its_options(verb, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["farflung", verb, "--help"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out = capsys.readouterr().out
    assert exit.value.code == 0
    assert f"Usage: farflung {verb}" in out
    assert max(map(len, out.splitlines())) <= 80
