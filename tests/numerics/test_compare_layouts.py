"""One process is compared with several ranks. A healthy layout gives no message; a sharding bug is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from amp_plugin.numerics.compare import RunComparison, compare_runs, record_run
from amp_plugin.numerics.layouts import Layout, Piece
from amp_plugin.numerics.module_names import name_in_first
from amp_plugin.numerics.parts import Axis, part_of
from amp_plugin.numerics.values import fingerprint
from tests.commands import amp
from tests.numerics import parallel_by_hand, tiny_transformer
from tests.numerics.parallel_by_hand import BUGS
from tests.numerics.tiny_transformer import Case
from tests.warm_processes import call, call_on_ranks

SECONDS = 400

QUICK = {2: [Case("ddp", steps=1), Case("fsdp2", "bf16"), Case("sp", steps=1)]}
QUICK_BUG = "no all-reduce of a norm's gradient"

_PRECISIONS = ("fp32", "bf16")
_OPTIMIZERS = ("SGD", "AdamW")
MATRIX = {
    1: [Case("one", dtype, name, micro_batches=4) for dtype in _PRECISIONS for name in _OPTIMIZERS],
    2: [
        *(
            Case(layout, dtype, name)
            for layout in ("ddp", "fsdp2", "tp", "sp")
            for dtype in _PRECISIONS
            for name in _OPTIMIZERS
        ),
        *(Case("ddp", dtype, micro_batches=2) for dtype in _PRECISIONS),
    ],
    4: [
        *(
            Case(layout, dtype)
            for layout in ("ddp", "fsdp2", "hsdp", "tp", "sp", "fsdp_tp")
            for dtype in _PRECISIONS
        ),
        *(Case(layout, dtype, "AdamW") for layout in ("hsdp", "fsdp_tp") for dtype in _PRECISIONS),
        *(Case(layout, dtype, clip=True) for layout in ("ddp", "fsdp2", "hsdp") for dtype in _PRECISIONS),
    ],
}

# Other seeds, widths, depths, lengths and optimizers.
FRESH = {
    1: [
        Case("one", "bf16", "RMSprop", micro_batches=2, seed=19, depth=4),
        Case("one", "fp32", "NAdam", micro_batches=8, seed=20, width=32),
    ],
    2: [
        Case("ddp", "bf16", "RMSprop", seed=1, width=24, depth=3),
        Case("ddp", "fp32", "NAdam", seed=2, tokens=16),
        Case("ddp", "fp32", micro_batches=4, seed=9, depth=4),
        Case("fsdp2", "fp32", "Adagrad", seed=3, width=32),
        Case("fsdp2", "bf16", "AdamW", steps=4, seed=4, depth=4),
        Case("tp", "fp32", "AdamW", seed=5, width=32, depth=4, tokens=16),
        Case("tp", "bf16", seed=6, width=24),
        Case("sp", "fp32", "RMSprop", seed=7, depth=3),
        Case("sp", "bf16", "AdamW", seed=8, width=32, tokens=16),
    ],
    4: [
        Case("hsdp", "fp32", "NAdam", steps=4, seed=10, width=32),
        Case("hsdp", "bf16", "RMSprop", seed=11, depth=4),
        Case("fsdp_tp", "fp32", "Adagrad", seed=12, tokens=16),
        Case("fsdp_tp", "bf16", seed=13, width=32),
        Case("tp", "fp32", seed=14, width=32, depth=4),
        Case("sp", "bf16", "NAdam", seed=15, width=32, tokens=16),
        Case("ddp", "bf16", "AdamW", clip=True, steps=4, seed=16, depth=4),
        Case("ddp", "fp32", "Adagrad", clip=True, seed=18),
        Case("fsdp2", "fp32", "AdamW", clip=True, seed=17, width=32),
    ],
}

# The same once more. These were recorded after the limits had been set.
UNSEEN = {
    1: [Case("one", "bf16", "AdamW", micro_batches=4, seed=31)],
    2: [
        Case("ddp", "bf16", "NAdam", seed=32),
        Case("ddp", "bf16", "Adagrad", seed=33, width=24),
        Case("ddp", "bf16", clip=True, seed=40),
        Case("ddp", "fp32", "RMSprop", seed=39, tokens=16),
        Case("fsdp2", "bf16", "RMSprop", seed=34, depth=3),
        Case("fsdp2", "bf16", "AdamW", seed=35, width=32),
        Case("fsdp2", "fp32", "NAdam", seed=38),
        Case("tp", "bf16", "AdamW", seed=36),
        Case("tp", "fp32", "Adamax", seed=41, depth=3),
        Case("sp", "bf16", "RMSprop", seed=37),
    ],
}


def record_cases(folder: Path, cases: dict[int, list[Case]]) -> None:
    """Record the cases for each number of ranks, and the same cases on one process."""
    every = [case for of_ranks in cases.values() for case in of_ranks]
    alone = list(dict.fromkeys(case.alone for case in every))
    done = call(tiny_transformer.record_all, folder / "1", alone, frameworks=True)
    assert done.returncode == 0, done.stderr
    for count, of_ranks in cases.items():
        if count == 1:
            done = [call(tiny_transformer.record_all, folder / "1", of_ranks, frameworks=True)]
        else:
            done = call_on_ranks(count, SECONDS, tiny_transformer.record_all, folder / str(count), of_ranks)
        assert all(rank.returncode == 0 for rank in done), done[0].stderr


def compared(folder: Path, count: int, case: Case) -> RunComparison:
    one = folder / "1" / f"{case.alone.name}.amp"
    return compare_runs(one, folder / str(count) / f"{case.name}.amp", layouts=True)


def assert_silent(found: RunComparison, case: Case) -> None:
    assert found.is_clean, f"{case.name}\n{found.report()}"
    assert found.random == 0
    # covers forward and backward of each step, gradients and the optimizer
    assert found.compared > 100 * case.steps, found.report()
    # A bug that loses the share of one of four ranks changes a sum by a quarter, so the median limit is less.
    assert found.unseen < (1e-3 if case.precision == "fp32" else 0.2), found.report()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    record_cases(folder, QUICK)
    return folder


@pytest.mark.dist
@pytest.mark.parametrize("case", QUICK[2], ids=lambda case: case.name)
def test_a_healthy_layout_is_silent(healthy: Path, case: Case) -> None:
    found = compared(healthy, 2, case)
    assert_silent(found, case)
    swapped = compare_runs(healthy / "2" / f"{case.name}.amp", healthy / "1" / f"{case.alone.name}.amp")
    assert swapped.is_clean
    assert (swapped.only_first, swapped.only_second) == (found.only_second, found.only_first)


@pytest.mark.dist
@pytest.mark.whole_run
@pytest.mark.parametrize("of_ranks", [MATRIX, FRESH, UNSEEN], ids=["matrix", "fresh", "unseen"])
def test_all_healthy_layouts_are_silent(tmp_path: Path, of_ranks: dict[int, list[Case]]) -> None:
    record_cases(tmp_path, of_ranks)
    loud = []
    for count, cases in of_ranks.items():
        for case in cases:
            found = compared(tmp_path, count, case)
            verdict = "silent" if found.is_clean else f"LOUD {found.unexplained}"
            print(count, case.name, found.compared, f"{found.unseen:.1e}", verdict)
            if not found.is_clean:
                loud.append(f"{count} {case.name}\n{found.report()}")
            else:
                assert_silent(found, case)
    assert not loud, "\n\n".join(loud)


def record_bugs(folder: Path, bugs: list[str], seed: int = 0, steps: int = parallel_by_hand.STEPS) -> None:
    done = [
        call(parallel_by_hand.record_alone, folder, seed, steps, frameworks=True),
        *call_on_ranks(4, SECONDS, parallel_by_hand.record_all, folder, bugs, seed, steps),
    ]
    assert all(rank.returncode == 0 for rank in done), "\n".join(rank.stderr for rank in done)


def with_bug(folder: Path, bug: str) -> RunComparison:
    one = "one dropout" if "dropout" in bug else "one"
    return compare_runs(folder / f"{one}.amp", folder / f"{bug}.amp")


@pytest.fixture(scope="module")
def bugs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bugs")
    record_bugs(folder, [QUICK_BUG], steps=1)
    return folder


@pytest.mark.dist
def test_a_model_that_is_sharded_by_hand_is_silent(bugs: Path) -> None:
    found = with_bug(bugs, "healthy")
    assert found.is_clean, found.report()
    assert found.mesh == {"data": 2, "tensor": 2}
    assert found.random == 0
    random = with_bug(bugs, "dropout")
    assert random.is_clean, random.report()
    assert random.random > 0


@pytest.mark.dist
def test_a_bug_of_sharding_is_named(bugs: Path) -> None:
    missing = with_bug(bugs, QUICK_BUG).unexplained
    assert missing.op == "aten::pow.Tensor_Scalar"  # the clip squares the gradient here
    assert missing.mesh == ("tensor",)
    assert "a sum over the ranks is missing" in missing.reason
    result = amp("compare", "--json", bugs / "one.amp", bugs / f"{QUICK_BUG}.amp")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["unexplained"]["mesh"] == ["tensor"]


@pytest.mark.dist
@pytest.mark.whole_run
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_all_bugs_of_sharding_are_named(tmp_path: Path, seed: int) -> None:
    record_bugs(tmp_path, list(BUGS), seed)
    healthy = [with_bug(tmp_path, name) for name in ("healthy", "dropout")]
    assert all(found.is_clean for found in healthy), "\n".join(found.report() for found in healthy)
    named = 0
    for bug, dimension in BUGS.items():
        found = with_bug(tmp_path, bug)
        first = (*found.dropouts_second, found.unexplained)[0]
        is_named = first is not None and bool(first.op) and (not dimension or first.mesh == (dimension,))
        named += is_named
        print(f"--- {bug}: {'named' if is_named else 'NOT NAMED'}\n{first}")
    assert named >= 13


def piece(tensor: torch.Tensor) -> Piece:
    return Piece(fingerprint(tensor), part_of(tensor))


def layout_of(whole: torch.Tensor, parts: list[torch.Tensor]) -> Layout:
    pieces = {(number,): piece(part) for number, part in enumerate(parts)}
    return Layout(whole=piece(whole), pieces=pieces, axes=(Axis("ranks", len(parts)),))


def nearest(layout: Layout) -> float:
    assert layout.is_comparable
    return min(way.relative for way in layout.ways())


@pytest.mark.parametrize("shape", [(40,), (12, 30), (4, 6, 20), (2, 4, 6, 5)])
def test_shards_and_partial_sums_make_up_the_tensor(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole = torch.randn(shape, dtype=torch.float64)
    other = torch.randn(shape, dtype=torch.float64)
    for dim, size in enumerate(shape):
        first = size // 3 if size > 3 else 1
        shards = [*whole.split([first, size - first], dim)]
        assert nearest(layout_of(whole, shards)) < 1e-12
        assert nearest(layout_of(whole, shards[::-1])) < 1e-12  # the order of the shards does not matter
        assert nearest(layout_of(whole, [shards[0], shards[1] * 1.1])) > 1e-3
    assert nearest(layout_of(whole, [other, whole - other])) < 1e-12
    assert nearest(layout_of(whole, [whole, whole])) == 0
    assert nearest(layout_of(whole, [whole, whole * 1.01])) > 5e-3
    assert nearest(layout_of(whole, [other, other])) > 0.1


def test_a_result_of_another_shape_is_not_compared() -> None:
    whole = torch.randn(4, 6)
    assert not layout_of(whole, [whole.reshape(6, 4)] * 2).is_comparable
    assert not layout_of(whole, [torch.randn(24)] * 2).is_comparable
    assert not layout_of(whole, [whole[:1], whole[:1]]).is_comparable  # two ranks cannot hold all four parts
    three = torch.randn(4, 6, 8)
    assert not layout_of(three, [three[:2, :3, :4]] * 2).is_comparable


def test_names_of_another_implementation() -> None:
    names = {"GPT": "Net", "GPT.layers.*.mlp": "Net.blocks.*.feed_forward"}
    assert name_in_first(names, "Net.blocks.11.feed_forward.up") == "GPT.layers.11.mlp.up"
    assert name_in_first(names, "Net.head") == "GPT.head"
    assert name_in_first(names, "Net") == "GPT"
    assert name_in_first(names, "Network.head") == "Network.head"
    assert name_in_first({}, "Net._fsdp_wrapped_module.head") == "Net.head"
    with pytest.raises(ValueError, match="different numbers of"):
        compare_runs("first.amp", "second.amp", names={"GPT.layers.*": "Net.first"})


class First(torch.nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.inner, self.factor = torch.nn.Linear(4, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.factor * self.inner(x)).tanh()


class Second(torch.nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.deep, self.factor = torch.nn.Linear(4, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.factor * self.deep(x)).tanh()


def test_two_implementations_are_compared_by_a_mapping_of_names(tmp_path: Path) -> None:
    models = {"first": First(), "second": Second(), "wrong": Second(1.1)}
    for name, model in models.items():
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn_like(weight))
        data = torch.ones(2, 4)
        with record_run(tmp_path / name):
            model(data)
    file = tmp_path / "names.yaml"
    file.write_text("First: Second\nFirst.inner: Second.deep\n")
    words = ("compare", "--names", file, tmp_path / "first")
    assert amp(*words, tmp_path / "second").exit_code == 0
    result = amp(*words, tmp_path / "wrong")
    assert result.exit_code == 1
    assert "aten::mul.Tensor in First" in result.stdout
    assert amp("compare", tmp_path / "first", tmp_path / "second").exit_code == 2
    file.write_text("- a list\n")
    assert "not a mapping of names" in amp(*words, tmp_path / "second").output


def test_what_cannot_be_put_together_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with record_run(tmp_path / "one"):
        torch.ones(2) * 2
    for ranks in (2, 3):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        for rank in range(ranks - (ranks == 3)):
            monkeypatch.setenv("RANK", str(rank))
            with record_run(tmp_path / f"of {ranks}"):
                torch.ones(2) * 2
    assert compare_runs(tmp_path / "one", tmp_path / "of 2").is_clean
    with pytest.raises(ValueError, match="rank 2 left no file"):
        compare_runs(tmp_path / "one", tmp_path / "of 3")
    with pytest.raises(ValueError, match="one of them with a single process"):
        compare_runs(tmp_path / "of 2", tmp_path / "of 3")


def test_other_weights_at_the_beginning_are_named_first(tmp_path: Path) -> None:
    for name, micro_batches in (("one", 1), ("micro", 2)):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        if micro_batches > 1:
            with torch.no_grad():
                model.weight[0].mul_(2)
        data, optimizer = torch.randn(4, 4), torch.optim.SGD(model.parameters(), lr=0.1)
        with record_run(tmp_path / name):
            for part in data.chunk(micro_batches):
                (model(part).square().mean() / micro_batches).backward()
            optimizer.step()
    found = compare_runs(tmp_path / "one", tmp_path / "micro", layouts=True).unexplained
    assert (found.op, found.module) == ("weight weight", "Linear")
    assert "begin with different weights" in found.reason


def test_a_case_has_a_name_of_its_own() -> None:
    cases = [(count, case) for count, of_ranks in MATRIX.items() for case in of_ranks]
    assert len({(count, case.name) for count, case in cases}) == len(cases) >= 40
    assert replace(Case("ddp"), layout="one") == Case("ddp").alone
