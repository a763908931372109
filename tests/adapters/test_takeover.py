"""`amp-plugin run`: unedited programs use amp_plugin while they run, and everything is restored afterwards."""

import copy
import importlib.util
import os
import pickle
import runpy
import sys
from contextlib import contextmanager

import pytest
import torch

from amp_plugin import GradScaler, OptionError, autocast
from amp_plugin.adapters.takeover import Takeover, bind_environment, end_runs, when_imported
from tests.adapters.accelerate_pair import reset
from tests.adapters.commands import run_unedited, torchrun
from tests.commands import amp, with_entry_points
from tests.warm_processes import call_on_ranks

LOOP = """\
import copy, sys
import torch
from torch.amp import GradScaler, autocast
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu")
for step in range(3):
    with {block}:
        output = model(torch.ones(4, 8))
        loss = torch.nn.functional.mse_loss(output, torch.ones(4, 1))
    scaler.scale(loss).backward()
    if step == 1:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    ema = copy.deepcopy(model)
scaler.load_state_dict(copy.deepcopy(scaler.state_dict()))
print(type(scaler).__mro__[1].__module__, output.dtype, loss.item(), sys.argv[1:])
"""
ACCELERATE = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
print(type(accelerator).__name__, accelerator.mixed_precision)
"""
LIGHTNING = """\
import torch, warnings
warnings.simplefilter("ignore")
from {package} import Trainer
from {package}.demos.boring_classes import BoringModel
from {package}.plugins import MixedPrecision
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", max_steps=2, limit_val_batches=0, gradient_clip_val=0.01, **quiet, {chosen})
scaler = getattr(trainer.precision_plugin, "scaler", None)
print(repr(trainer.precision_plugin).split()[0], scaler.get_scale() if scaler else 1.0)
"""
IN_A_FUNCTION = """
import gc, torch, weakref

def main():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale((weight * (float("inf") if {overflows} else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return [weakref.ref(kept) for kept in (scaler, weight, optimizer, scaler.core.log)]

kept = main()
gc.collect()
assert [reference() for reference in kept] == [None] * 4
{end}
"""
MOST_SKIPPED = "Most steps were skipped: `amp-plugin diagnose train.py` finds the reason"
BELOW_1 = (
    "The loss scale fell below 1, so gradients overflow even without a loss scale: "
    "`amp-plugin diagnose train.py` finds the reason"
)
STEPS = f"; 3 optimizer steps, 2 skipped, final loss scale 16384. {MOST_SKIPPED}"
STOCK_PLUGIN = 'plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]'
FIT = """
dtypes = set()
torch.manual_seed(0)
model = BoringModel()
model.layer.register_forward_hook(lambda *call: dtypes.add(call[-1].dtype))
trainer.fit(model)
print(model.layer.weight.tolist())
print(*dtypes)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write a program and run it with the command.

    Return its result and the lines that amp-plugin printed.
    """
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)

    def run_text(text: str, *words: str, arguments: tuple[str, ...] = ()):
        program = tmp_path / "train.py"
        program.write_text(text)
        result = amp("run", *words, program, *arguments)
        said = [line for line in result.stderr.splitlines() if line.startswith("amp-plugin run")]
        return result, said

    return run_text


@pytest.fixture
def taken():
    with Takeover("a test", precision="fp16") as takeover:
        yield takeover


def names() -> list[object]:
    autocast = torch.autocast
    return [
        *(autocast, torch.amp.autocast, torch.cuda.amp.autocast, autocast.__init__, autocast.__enter__),
        *(torch.amp.GradScaler, torch.amp.GradScaler.__init__, GradScaler.__init__, list(sys.meta_path)),
        *(torch.cpu.amp.autocast.__init__.__defaults__, torch.compiler.config.cache_key_tag),
        {name: value for name, value in os.environ.items() if "AMP_PLUGIN" in name or "ACCELERATE" in name},
    ]


class TestTorchAmp:
    def test_a_plain_loop_runs_on_ours_with_its_own_numbers(self, run):
        text = LOOP.format(block='autocast("cpu", dtype=torch.float16)')
        result, said = run(text, arguments=("--lr", "3"))
        assert result.exit_code == 0, result.output
        module, dtype, loss, *arguments = result.stdout.split()
        assert (module, dtype) == ("amp_plugin.scaling.grad_scaler", "torch.float16")
        assert arguments == ["['--lr',", "'3']"]
        space: dict[str, object] = {}
        exec(text.replace("print", "value = loss.item() #"), space)
        assert float(loss) == space["value"]
        assert "torch.autocast, torch.amp.GradScaler" in said[0]
        assert said[1:] == [f"amp-plugin run: train.py used torch.autocast in fp16, GradScaler{STEPS}"]

    @pytest.mark.parametrize("end", ["", "raise KeyError('gone')"], ids=["ends well", "fails"])
    @pytest.mark.parametrize(
        ("overflows", "told"),
        [
            ("step == 1", "; 4 optimizer steps, 1 skipped, final loss scale 512"),
            (
                "step",
                f"; 4 optimizer steps, 3 skipped, final loss scale 128. {MOST_SKIPPED}",
            ),
        ],
    )
    def test_the_last_line_counts_steps_of_scalers_that_are_gone(self, run, overflows, told, end):
        assert run(IN_A_FUNCTION.format(overflows=overflows, end=end))[1][-1].endswith(
            "used GradScaler" + told
        )

    @pytest.mark.parametrize(
        ("init_scale", "told"),
        [
            ("2.0", "; 4 optimizer steps, 1 skipped, final loss scale 1"),
            (
                "1.0",
                f"; 4 optimizer steps, 1 skipped, final loss scale 0.5. {BELOW_1}",
            ),
        ],
    )
    def test_a_loss_scale_below_1_is_told(self, run, init_scale, told):
        text = IN_A_FUNCTION.format(overflows="step == 1", end="").replace("1024.0", init_scale)
        assert run(text)[1][-1].endswith("used GradScaler" + told)

    def test_a_program_without_a_step_is_told_of_none(self, run):
        said = run("import torch\nscaler = torch.amp.GradScaler('cpu')\nscaler.scale(torch.ones(1))")[1]
        assert said[-1].endswith("train.py used GradScaler")

    def test_precision_is_for_blocks_that_name_no_dtype(self, run):
        result, said = run(LOOP.format(block='autocast("cpu")'), "--precision", "fp16")
        assert "torch.float16" in result.stdout
        assert said[0].endswith(
            "are replaced by those of amp_plugin while train.py runs; the precision is fp16 unless the program chooses one"
        )
        assert len(said) == 2
        result, said = run(LOOP.format(block='autocast("cpu", dtype=torch.bfloat16)'), "--precision", "fp16")
        assert said[1:] == [
            "amp-plugin run: train.py used torch.autocast in bf16, GradScaler; 3 optimizer steps, none skipped, final loss scale 65536",
            "amp-plugin run: --precision fp16 had no effect: each block of torch.autocast in train.py names its dtype; leave out dtype= in the blocks that --precision should set",
        ]

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("print('hello')", "used none of these; a plain loop needs torch.autocast(device)"),
            ("import amp_plugin; amp_plugin.GradScaler('cpu')", "uses amp_plugin itself"),
        ],
    )
    def test_a_program_of_which_nothing_is_taken_over_is_told(self, run, text, why):
        result, said = run(text, "--precision", "bf16")
        assert result.exit_code == 0
        assert f"amp_plugin replaced nothing in this process: train.py {why}" in said[1]

    @pytest.mark.parametrize(
        ("made", "told"),
        [
            ("", True),
            ("torch.amp.GradScaler('cpu', enabled=False)", True),
            ("torch.amp.GradScaler('cpu')", False),
            ("amp_plugin.GradScaler('cpu')", False),
        ],
    )
    def test_float16_without_a_scaler_that_scales_is_told(self, run, made, told):
        block = "with torch.autocast('cpu', torch.float16): torch.ones(2, 2) @ torch.ones(2, 2)"
        said = run(f"import torch, amp_plugin\n{made}\n{block}")[1]
        assert ["float16 ran without a torch.amp.GradScaler" in line for line in said[2:]] == [True] * told

    @pytest.mark.parametrize(
        ("end", "code"), [("raise KeyError('gone')", 1), ("import sys; sys.exit(7)", 7), ("pass", 0)]
    )
    def test_the_exit_code_is_the_programs(self, run, end, code):
        assert run(f"import torch\ntorch.amp.GradScaler('cpu')\n{end}")[0].exit_code == code

    def test_everything_is_given_back_at_the_end(self):
        before = names()
        Takeover("a test", precision="bf16").begin()
        assert isinstance(torch.amp.GradScaler("cpu"), GradScaler)
        end_runs()
        assert names() == before
        assert type(torch.amp.GradScaler("cpu")) is torch.amp.GradScaler

    @pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])  # Lightning sets only the local rank
    def test_each_rank_says_which_it_is(self, run, monkeypatch, variable):
        monkeypatch.setenv(variable, "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert all(line.startswith("amp-plugin run [rank 1 of 2]: ") for line in run("")[1])

    def test_a_scaler_is_ours_under_every_name(self, taken):
        with pytest.warns(FutureWarning):
            made = [torch.amp.GradScaler("cpu"), torch.cpu.amp.GradScaler(2.0), torch.GradScaler("cpu")]
        for scaler in made:
            assert isinstance(scaler, GradScaler)
            assert isinstance(scaler, torch.amp.GradScaler)
        assert isinstance(made[1], torch.cpu.amp.GradScaler)
        assert made[1].get_scale() == 2.0
        with pytest.warns(FutureWarning):
            assert not torch.cuda.amp.GradScaler(enabled=False).is_enabled()

    def test_a_subclass_keeps_its_methods_and_copies(self, taken):
        scaler = Counting("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.ones(2))], lr=0.5)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        assert scaler.steps == 1
        assert not scaler.last_step(optimizer).skipped
        assert weight.tolist() == [0.5, 0.5]
        scaler.update()
        for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
            assert type(twin) is type(scaler)
            assert twin.get_scale() == 4.0

    def test_a_scaler_that_overrides_torchs_own_steps_is_left(self, taken, capfd):
        scaler = Inner("cpu")
        assert type(scaler) is Inner
        assert not isinstance(scaler, GradScaler)
        assert (
            "Inner overrides private methods of torch.amp.GradScaler, so it is not replaced"
            in capfd.readouterr().err
        )

    def test_autocast_stays_torchs_class(self, taken):
        class Mine(torch.autocast):
            pass

        @torch.autocast("cpu")
        def product(a):
            assert torch.is_autocast_enabled("cpu")
            return a @ a

        a = torch.ones(2, 2)
        assert product(a).dtype is torch.float16
        with Mine("cpu") as block:
            assert isinstance(block, torch.autocast)
            assert (a @ a).dtype is torch.float16
        with pytest.warns(FutureWarning), torch.cpu.amp.autocast():
            assert (a @ a).dtype is torch.float16
        with autocast("cpu", dtype=torch.bfloat16):
            assert (a @ a).dtype is torch.bfloat16


class Counting(torch.amp.GradScaler):
    steps = 0

    def step(self, optimizer, *args, **kwargs):
        self.steps += 1
        return super().step(optimizer, *args, **kwargs)


class Inner(torch.amp.GradScaler):
    def _unscale_grads_(self, *args):
        return super()._unscale_grads_(*args)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.one_graph)])
def test_autocast_assigned_by_hand_does_not_recurse(monkeypatch, compiled):
    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(torch.amp, "autocast", autocast)

    def product(a):
        with torch.autocast("cpu", dtype=torch.float16):
            return a @ a

    call = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    assert call(torch.ones(2, 2)).dtype is torch.float16


class TestAccelerate:
    def test_an_accelerator_is_ours_and_gets_the_precision(self, run):
        from accelerate import Accelerator

        original = Accelerator.__init__
        result, said = run(ACCELERATE)
        assert result.stdout == "AmpAccelerator no\n"
        reset()
        result, said = run(ACCELERATE, "--precision", "bf16")
        assert said[1:] == ["amp-plugin run: train.py used Accelerator(mixed_precision='bf16')"]
        assert Accelerator.__init__ is original

    def test_the_launchers_precision_stays(self, run, monkeypatch):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        result, said = run(ACCELERATE, "--precision", "fp16")
        assert result.stdout == "AmpAccelerator bf16\n"
        assert said[1:] == ["amp-plugin run: train.py used Accelerator(mixed_precision='bf16')"]


OWN = """\
{first}
{second}
accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
print(type(accelerator).__module__)
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from amp_plugin import AmpAccelerator", "import accelerate"),
        ("import amp_plugin.adapters.accelerate.installation", "import accelerate"),
        ("from transformers import Trainer", "import accelerate; from amp_plugin import AmpKwargs"),
    ],
)
def test_our_adapter_may_be_imported_first(tmp_path, first, second):
    """This needs a new process, in which neither Accelerate nor the adapter has been imported."""
    (tmp_path / "train.py").write_text(OWN.format(first=first, second=second))
    done = run_unedited("train.py", environment={}, folder=tmp_path)
    assert done.stdout.split() == ["amp_plugin.adapters.accelerate.accelerator"], done.stderr
    assert "train.py used Accelerator(mixed_precision='bf16')" in done.stderr


class TestLightning:
    @pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
    def package(self, request):
        pytest.importorskip(request.param)
        return request.param

    @pytest.mark.parametrize(
        ("chosen", "words", "plugin", "used"),
        [
            ('precision="16-mixed"', [], "AmpPrecision('fp16') 65536.0", "Trainer(precision='16-mixed')"),
            (STOCK_PLUGIN, [], "AmpPrecision('fp16') 64.0", "GradScaler, Trainer(precision='16-mixed')"),
            ("precision=32", ["bf16"], "AmpPrecision('bf16') 1.0", "Trainer(precision='bf16-mixed')"),
            ("precision=32", [], "<", "none of these; "),
        ],
    )
    def test_a_trainer_takes_our_plugin_for_mixed_precision(self, run, package, chosen, words, plugin, used):
        precision = ["--precision", *words] if words else []
        result, said = run(LIGHTNING.format(package=package, chosen=chosen), *precision)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(plugin)
        assert f"train.py used {used}" in said[1]

    def test_a_program_trains_with_its_own_numbers(self, run, package, capsys):
        text = LIGHTNING.format(package=package, chosen='precision="bf16-mixed"') + FIT
        plugin, *trained = run(text)[0].stdout.splitlines()
        exec(text, {})
        stock, *expected = capsys.readouterr().out.splitlines()
        assert plugin.startswith("AmpPrecision")
        assert stock.startswith("<")
        assert trained == expected

    @pytest.mark.native
    def test_the_plugin_follows_the_rules(self, run, package, tmp_path):
        (tmp_path / "rules.yaml").write_text("device_type: cpu\nrules: {aten::linear: fp32}\n")
        text = LIGHTNING.format(package=package, chosen='precision="bf16-mixed"') + FIT
        assert run(text)[0].stdout.splitlines()[-1] == "torch.bfloat16"
        result, _ = run(text, "--rules", str(tmp_path / "rules.yaml"))
        assert result.stdout.splitlines()[-1] == "torch.float32"
        assert "nothing has read the rules" not in result.stderr

    def test_fabric_takes_our_plugin(self, run, package):
        fabric = "lightning.fabric" if package == "lightning.pytorch" else "lightning_fabric"
        text = (
            "import warnings; warnings.simplefilter('ignore')\n"
            f"import {fabric} as fabric\n"
            "print(repr(fabric.Fabric(accelerator='cpu', precision='16-mixed')._precision))"
        )
        result, said = run(text)
        assert result.stdout == "FabricAmpPrecision('fp16')\n"
        assert said[-1].endswith("used Fabric(precision='16-mixed')")


def test_looking_for_a_module_is_not_importing_it(tmp_path, monkeypatch):
    """transformers first checks whether accelerate is installed, and imports it later."""
    (tmp_path / "found_then_imported.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []

    @contextmanager
    def around(module):
        seen.append(module.value)
        yield
        seen.append("over")

    with when_imported({"found_then_imported": around}):
        assert importlib.util.find_spec("found_then_imported") is not None
        assert seen == []
        importlib.import_module("found_then_imported")
        assert seen == [1]
    assert seen == [1, "over"]


@pytest.fixture
def installed(tmp_path) -> dict[str, str]:
    return {**with_entry_points(tmp_path), "OMP_NUM_THREADS": "1"}


CHILD = """\
import torch
print(type(torch.amp.GradScaler("cpu")).__mro__[1].__module__, torch.autocast("cpu").fast_dtype, flush=True)
"""
PARENT = """\
import multiprocessing, subprocess, sys
import torch

def work():
    import child

if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start()
        process.join()
    subprocess.run([sys.executable, "child.py"], check=True)
"""


@pytest.mark.dist
def test_a_program_that_starts_others_takes_them_along(tmp_path, installed):
    """The processes that it starts use amp_plugin too.

    New interpreters and spawned children read the environment when they import torch. Forks inherit the
    state.
    """
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    done = run_unedited("--precision", "fp16", "parent.py", environment=installed, folder=tmp_path)
    assert done.stdout.split() == ["amp_plugin.scaling.grad_scaler", "torch.float16"] * 4, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("amp-plugin run")]
    assert (
        sum(" while parent.py runs" in line for line in said) == 1
    )  # the spawned child has the same name, but prints nothing
    names = ("parent.py", "this process", "child.py")  # the second name is that of the fork server
    assert [said.count(f"amp-plugin run: {name} used GradScaler") for name in names] == [2, 1, 1]
    assert "amp_plugin replaced nothing in this process: parent.py used none of these" in said[-1]


RANK = """\
import torch
import torch.distributed as dist
from tests.process_groups import destroy
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(4):
    x = torch.randn(4, 8) * (float("inf") if step == 2 and dist.get_rank() == 1 else 1.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
weights = [param.detach().double().sum().item() for param in model.parameters()]
print(f"{scaler.get_scale()} {weights}\\n", end="", flush=True)  # in one piece: ranks share a pipe
destroy()
"""


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_takes_each_rank_over(tmp_path, installed):
    """Both ranks get the weights of a run without the command, and skip a step if one of them overflows."""
    program = tmp_path / "train.py"
    program.write_text(RANK)
    words = ("--nproc-per-node", "2", "-m", "amp_plugin", "run", program.name)
    done = torchrun(*words, environment=installed, folder=tmp_path)
    bare = call_on_ranks(2, 100, runpy.run_path, str(program), None, "__main__")
    assert bare[0].stdout.startswith("512.0 ["), bare[0].stderr
    assert done.stdout.splitlines(keepends=True) == [rank.stdout for rank in bare], done.stderr
    for rank in (0, 1):
        used = "train.py used torch.autocast in fp16, GradScaler"
        steps = "4 optimizer steps, 1 skipped, final loss scale 512"
        said = f"amp-plugin run [rank {rank} of 2]: {used}; {steps}\n"
        assert done.stderr.count(said) == 1


def test_a_wrong_word_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_TAKEOVER", "fp8")
    with pytest.raises(
        ValueError, match="AMP_PLUGIN_TAKEOVER=fp8 is unknown; allowed are fp16, bf16, auto, as-w"
    ):
        bind_environment()


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("growth_factor", "0.5", r"more than 1 \(growth_factor comes from AMP_PLUGIN_GROWTH_FACTOR\)"),
        ("on_spike", "jump", r"\(on_spike comes from AMP_PLUGIN_ON_SPIKE\)"),
        ("min_scale", "131072", r"change one of the three \(min_scale comes from AMP_PLUGIN_MIN_SCALE\)"),
    ],
)
def test_an_error_names_the_variable_that_sets_the_option(taken, monkeypatch, option, value, text):
    monkeypatch.setenv(f"AMP_PLUGIN_{option.upper()}", value)
    with pytest.raises(OptionError, match=text):
        torch.amp.GradScaler("cpu", 65536.0)
    monkeypatch.delenv(f"AMP_PLUGIN_{option.upper()}")
    assert torch.amp.GradScaler("cpu").is_enabled()


def test_an_error_of_the_program_itself_names_no_variable(taken, monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_HYSTERESIS", "3")
    with pytest.raises(OptionError, match="more than 1$"):
        torch.amp.GradScaler("cpu", growth_factor=0.5)
    with pytest.raises(TypeError, match="growth_factr"):
        torch.amp.GradScaler("cpu", growth_factr=2.0)


def test_an_error_names_the_flag_of_the_command(run):
    result, _ = run(LOOP.format(block='autocast("cpu")'), "--on-spike", "jump")
    assert result.exit_code == 1
    assert "(on_spike comes from --on-spike of amp-plugin run)" in result.stderr


def test_the_environment_sets_what_a_program_leaves_open(taken, monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_INIT_SCALE", "16")
    monkeypatch.setenv("AMP_PLUGIN_HYSTERESIS", "3")
    with pytest.warns(FutureWarning):
        open_ = [torch.amp.GradScaler("cpu"), torch.cpu.amp.GradScaler()]
    assert [scaler.get_scale() for scaler in open_] == [16.0, 16.0]
    assert open_[0].loss_scale.options.hysteresis == 3
    assert torch.amp.GradScaler("cpu", 8.0).get_scale() == 8.0
    assert torch.amp.GradScaler("cpu", init_scale=8.0).get_scale() == 8.0
