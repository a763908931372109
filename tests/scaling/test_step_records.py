"""Each step is recorded: by a function, by a logger, and in a file that is complete even after a kill."""

import contextlib
import json
import logging
import math
import time

import pytest
import torch

from amp_plugin import GradScaler, OptionError, Spike, SpikeError, StepRecord, read_records
from amp_plugin.scaling import step_records
from tests.scaling.runs import Run, scaler_of
from tests.warm_processes import WarmProcess


def train(log, *, scale=2.0**10, factors=(1.0, 1.0, math.inf, 1.0, math.nan), clip=None, **options):
    training = Run("sgd", scaler=scaler_of(scale, log=log, **options))
    named = {f"weight{place}": param for place, param in enumerate(training.params)}
    training.scaler.register(training.optimizer, names=named)
    for seed, factor in enumerate(factors):
        training.backward(seed, factor)
        if clip is None:
            training.scaler.step(training.optimizer)
        else:
            training.scaler.clip_and_step(training.optimizer, clip)
        training.scaler.update()
    return training


@pytest.fixture(autouse=True)
def _close_files():
    yield
    for handler in step_records._open_files.values():
        handler.close()
    step_records._open_files.clear()


@pytest.mark.filterwarnings("ignore:.*nothing is scaled")
@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_a_line_says_what_a_step_came_to(scale, tmp_path):
    train(tmp_path / "run.jsonl", scale=scale, clip=1.0)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["verdict"] for line in lines] == ["landed", "landed", "overflow", "landed", "nan"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert {line["optimizer"] for line in lines} == {"0: SGD"}
    scales = [None] * 5 if scale is None else [scale, scale, scale, scale / 2, scale / 2]
    assert [line["loss_scale"] for line in lines] == scales
    assert lines[0]["norm"] > 2
    assert lines[0]["clipped_norm"] == pytest.approx(1.0, rel=1e-4)
    assert lines[2]["norm"] is None
    assert lines[2]["parameters"] == ["weight2", "weight1", "weight0"]
    assert all(line["seconds"] >= 0 for line in lines)
    assert read_records(tmp_path / "run.jsonl") == lines


@pytest.mark.filterwarnings("ignore:.*nothing is scaled")
def test_the_numbers_are_those_of_the_results():
    got = []
    training = Run("sgd", scaler=scaler_of(8.0, log=got.append))
    for seed in range(4):
        training.backward(seed)
        training.scaler.clip_grad_norm_(training.optimizer, 3.0)
        training.scaler.clip_and_step(training.optimizer, 2.0)
        training.scaler.update()
        last = training.scaler.last_step(training.optimizer)
        assert isinstance(got[-1], StepRecord)
        assert got[-1].norm == pytest.approx(last.norm.item())
        assert got[-1].clipped_norm == pytest.approx(last.clipped_norm.item(), rel=1e-5)
        assert (got[-1].verdict, got[-1].skipped) == (last.verdict, last.skipped)
        assert set(got[-1].numbers("amp/")) == {
            "amp/loss_scale", "amp/norm", "amp/clipped_norm", "amp/seconds", "amp/skipped"
        }  # fmt: skip


def test_spikes_are_told_with_value_and_limit_and_the_one_that_raises_is_in_the_file(tmp_path, caplog):
    caplog.set_level(logging.INFO, "amp_plugin")
    rule = {"window": 8, "warmup": 4}
    factors = [1.0] * 6 + [50.0]
    for action, skipped in (("skip", True), ("clip", False), ("raise", True)):
        got = []
        with pytest.raises(SpikeError) if action == "raise" else contextlib.nullcontext():
            train(got.append, scale=None, factors=factors, on_spike=Spike(action=action, **rule))
        assert len(got) == 7
        assert (got[-1].verdict, got[-1].skipped) == ("spike", skipped)
        assert got[-1].value > 200 > got[-1].limit
        assert got[3].limit is None, "in the warm-up there is no limit yet"
        assert f"was {'skipped' if skipped else 'clipped'}: a spike" in caplog.records[-1].getMessage()


def test_the_logger_hears_of_skipped_steps_without_a_log(caplog):
    caplog.set_level(logging.INFO, "amp_plugin")
    train(None, factors=(1.0, math.nan))
    (record,) = caplog.records
    assert record.name == "amp_plugin"
    assert "step 2 of 0: SGD was skipped: a gradient is nan (weight2" in record.getMessage()
    assert "at a loss scale of 1024" in record.getMessage()


def test_a_log_changes_no_bit(tmp_path):
    watched, other = train(tmp_path / "run.jsonl"), train(None)
    assert all(map(torch.equal, watched.params, other.params))


def train_until_killed(path):
    train(path, factors=[1.0] * 100_000)


def test_every_line_is_whole_after_a_kill_and_a_resumed_run_goes_on_behind_it(tmp_path):
    path = tmp_path / "run.jsonl"
    program, deadline = WarmProcess(train_until_killed, path, frameworks=True), time.monotonic() + 200
    while not (path.is_file() and path.stat().st_size > 20_000):
        assert time.monotonic() < deadline, program.errors()
        time.sleep(0.01)
    program.kill()
    text = path.read_text()
    assert text.endswith("\n")
    count = len([json.loads(line) for line in text.splitlines()])
    path.write_text(text + '{"step": 17, "torn')  # the result of a full disk
    train(path)
    assert len(read_records(path)) == count + 5


def test_a_large_file_is_continued_in_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(step_records, "_FILE_BYTES", 2_000)
    path = tmp_path / "run.jsonl"
    train(path, factors=[1.0] * 30)
    assert len(list(tmp_path.iterdir())) > 2
    assert all(file.stat().st_size <= 2_000 for file in tmp_path.iterdir())
    assert [record["step"] for record in read_records(path)] == list(range(1, 31))


def test_what_fails_in_a_log_is_one_warning_and_the_run_goes_on(tmp_path):
    def fail(record):
        msg = "the tracker is away"
        raise OSError(msg)

    for log in (fail, tmp_path):  # a folder cannot be written as a file
        with pytest.warns(UserWarning, match="the log .* has ended") as caught:
            training = train(log, factors=[1.0] * 4)
        assert len(caught) == 1
        assert not torch.equal(training.params[0], Run("sgd").params[0])


def test_two_scalers_share_a_file_and_other_ranks_write_none(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    train(path)
    train(str(path))
    assert len(read_records(path)) == 10
    monkeypatch.setenv("RANK", "1")
    train(path)
    assert len(read_records(path)) == 10


def test_a_relative_path_stays_when_the_program_changes_its_folder(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    training = Run("sgd", scaler=scaler_of(8.0, log="run.jsonl"))
    for seed, folder in enumerate((tmp_path / "other", tmp_path)):
        monkeypatch.chdir(folder)
        training.backward(seed)
        training.scaler.step(training.optimizer)
        training.scaler.update()
    assert len(read_records(tmp_path / "run.jsonl")) == 2


def test_something_else_than_a_path_or_a_function_is_refused():
    with pytest.raises(OptionError, match="log=3"):
        GradScaler("cpu", log=3)


def test_an_optimizer_made_where_another_was_has_a_name_of_its_own():
    records = []
    scaler = GradScaler("cpu", init_scale=2.0, log=records.append)
    for _ in range(20):  # Python makes some of them in the memory, and so with the id, of an earlier one
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        del optimizer
    assert [record.optimizer for record in records] == [f"{place}: SGD" for place in range(20)]
    assert {record.step for record in records} == {1}


def test_a_step_is_counted_from_the_start_of_the_run_whatever_is_loaded():
    records = []
    training = train(records.append, factors=(1.0, 1.0))
    training.scaler.load_state_dict(training.scaler.state_dict())
    training.backward(0, 1.0)
    training.scaler.step(training.optimizer)
    assert [record.step for record in records] == [1, 2, 3]
